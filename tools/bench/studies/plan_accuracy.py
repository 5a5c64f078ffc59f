"""How near memmgr plan comes to a live run: peak and step time of six small models on the CPU.

    python tools/bench/studies/plan_accuracy.py [--models GPT,LSTM] [--rounds 5] [--json FILE]

A model has a process of its own. There the step is traced on fake tensors first; then rounds follow, in each of which the table
of its ops is measured and some live steps are taken, so that both see the same machine. Live is a budget without a limit. A
figure is the median over the rounds. Times are the processor's (user and system, one thread): on a machine that others
use, the wall clock shows how busy they are. The times of ops in the table are taken from it, so this measures the
difference between ops alone and ops in a step; `rates alone` is the same without the ops, from the measured arithmetic
and memory rates.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

import memmgr
from memmgr.tools.bench import measure
from memmgr.tools.bench.models import make
from memmgr.tools.common.fake_step import record
from memmgr.tools.common.rates import Rates

STEPS = 4
MODELS = ("GPT", "Llama", "BERT", "ResNet", "U-Net", "LSTM")


def compared(name: str, rounds: int) -> dict[str, float]:
    """One model; bytes and seconds, predicted and live."""
    torch.set_num_threads(1)
    measure.clock = time.process_time
    begun = time.perf_counter()
    step = record(lambda: make(name).step, accelerator=False)
    traced = time.perf_counter() - begun
    with memmgr.budget(None, device="cpu", quiet=True) as mm:
        live_step = make(name).step
        for _ in range(3):
            live_step()
    peak = mm.stats()["unmanaged_peak_bytes"]
    del live_step
    tables: list[Rates] = []
    live: list[float] = []
    for _ in range(rounds):
        tables.append(measure.measure(tempfile.gettempdir(), step, size=64 << 20))
        with memmgr.budget(None, device="cpu", quiet=True):
            live_step = make(name).step
            live_step()
            for _ in range(STEPS):
                begun = time.process_time()
                live_step()
                live.append(time.process_time() - begun)
            del live_step
    calls = {
        signature: (median(t.calls[signature][0] for t in tables), max(t.calls[signature][1] for t in tables))
        for signature in tables[0].calls
    }
    rates = replace(
        tables[0],
        calls=calls,
        call_seconds=median(t.call_seconds for t in tables),
        flops={"float32": median(t.flops["float32"] for t in tables)},
        bytes_per_second=median(t.bytes_per_second for t in tables),
    )
    bare = replace(rates, calls={})
    return {
        "ops": len(step.trace(rates).ops),
        "traced_seconds": traced,
        "live_peak_bytes": peak,
        "peak_bytes": step.trace(rates).unmanaged_peak[0],
        "rates_peak_bytes": step.trace(bare).unmanaged_peak[0],
        "live_seconds": median(live),
        "seconds": step.trace(rates).seconds,
        "rates_seconds": step.trace(bare).seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"{measure.processor()}, one thread, torch {torch.__version__}, Python {platform.python_version()}\n")
    print("| model | ops | traced in | live peak | predicted | rates alone | live step | predicted | rates alone |")
    print("|---|---|---|---|---|---|---|---|---|")
    found = {}
    for name in args.models.split(","):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            f = found[name] = pool.apply(compared, (name, args.rounds))
        peaks = [f"{f[key] / f['live_peak_bytes'] - 1:+.2%}" for key in ("peak_bytes", "rates_peak_bytes")]
        times = [f"{f[key] / f['live_seconds'] - 1:+.1%}" for key in ("seconds", "rates_seconds")]
        print(
            f"| {name} | {f['ops']} | {f['traced_seconds']:.1f} s | {f['live_peak_bytes'] / 1e6:.1f} MB | "
            f"{' | '.join(peaks)} | {f['live_seconds'] * 1e3:.1f} ms | {' | '.join(times)} |",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
