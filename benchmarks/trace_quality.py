"""How near the simulator comes to the live run of the same model, budget and policy (issue 4, point 2).

    python benchmarks/trace_quality.py [--models gpt,mlp,...] [--rounds 5] [--ratios 0.8,0.6,0.45] [--json FILE] [--quick]

Each round measures one pass without a limit (the trace) and then trains a few steps at each budget and policy, live: the
runs are interleaved, so that what else the machine does meets all of them. A live figure is the median over rounds of the
fastest step of a round, forward and backward without the optimizer; the simulated one the median over the rounds' traces. Live
peaks are the most that was resident in any step; the unmanaged peak is the allocator's against the trace's.

Two policies: `evict` (recompute only, no tier) and `auto` with the disk tier in --disk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' models; `make bench` runs with -P

import memmgr
from memmgr import _budget
from memmgr._trace import Measured
from memmgr.policies.registry import parse_policy
from memmgr.policies.simulator import simulate
from tests.budget import models

SIZES: dict[str, dict[str, int]] = {
    "gpt": {"layers": 4, "width": 256, "context": 128, "batch": 8},
    "mlp": {"depth": 8, "width": 512, "batch": 2048},
    "convnet": {"width": 32, "stages": 2, "blocks": 3, "batch": 16, "height": 32},
    "unet": {"width": 16, "batch": 4, "height": 96},
    "densenet": {"layers": 8, "growth": 16, "batch": 8, "height": 48},
    "lstm": {"width": 256, "time": 32, "batch": 128},
}


STEPS = 3


@dataclass(frozen=True)
class Row:
    """One model, policy and budget.

    Attributes:
        model, policy, ratio: which; ratio of the allocator's unmanaged peak.
        live_seconds, simulated_seconds: of forward and backward.
        live_peak_bytes, simulated_peak_bytes: most resident.
        feasible: whether the live run, and the simulated one, came to their end.
    """

    model: str
    policy: str
    ratio: float
    live_seconds: float
    simulated_seconds: float
    live_peak_bytes: float
    simulated_peak_bytes: float
    feasible: tuple[bool, bool]


class Passes:
    """A training whose passes are timed by themselves."""

    def __init__(self, training: models.Training) -> None:
        self._training = training

    def step(self) -> float:
        """One step; the seconds of its forward and backward."""
        began = time.perf_counter()
        loss = self._training.loss()
        loss.backward()
        del loss
        seconds = time.perf_counter() - began
        self._training.optimizer.step()
        self._training.optimizer.zero_grad()
        return seconds


def measured(passes: Passes, disk: str) -> tuple[Measured, float, int]:
    """Passes without a limit: the fastest trace, the fastest untraced pass's seconds, and the allocator's unmanaged peak."""
    made: list[Measured] = []
    seconds: list[float] = []
    with memmgr.budget(None, disk=disk, quiet=True) as opened:
        passes.step()
        manager = _budget.current()
        assert manager is not None
        for _ in range(STEPS):
            manager.measure_next_pass()
            seconds.append(passes.step())  # measuring begins at its end
            passes.step()
            assert manager.measured is not None
            made.append(manager.measured)
        peak = int(opened.stats()["unmanaged_peak_bytes"])
    return min(made, key=lambda m: m.trace.seconds), min(seconds), peak


def live(passes: Passes, limit: int, policy: str, disk: str | bool) -> tuple[float, int] | None:
    """Seconds of the fastest pass under the budget, and the peak; None where it does not fit."""
    try:
        with memmgr.budget(limit, policy=policy, disk=disk, quiet=True, _sleep=False) as opened:
            passes.step()  # proves its kinds
            seconds = min(passes.step() for _ in range(STEPS))
            return seconds, int(opened.stats()["resident_bytes.peak"])
    except memmgr.BudgetError:
        return None


def compare(name: str, ratios: list[float], rounds: int, disk: str) -> tuple[list[Row], dict[str, float]]:
    """All rows of a model, and how well the trace itself agrees with the unmanaged pass."""
    torch.manual_seed(0)
    passes = Passes(getattr(models, name)(**SIZES[name]))
    passes.step()
    lives: dict[tuple[str, float], list[tuple[float, int] | None]] = defaultdict(list)
    simulated: dict[tuple[str, float], list[tuple[bool, float, int]]] = defaultdict(list)
    plain, traced, need, seen, tracing = [], [], 0, 0, []
    for _ in range(rounds):
        made, seconds, peak = measured(passes, disk)
        plain.append(seconds)
        traced.append(made.trace.seconds)
        tracing.append(made.tracing_seconds / max(1, max(made.numbers)))
        need, seen = made.unmanaged_peak_bytes, made.trace.unmanaged_peak[0]
        for policy, tier in (("evict", None), ("auto", made.trace.links[0])):
            for ratio in ratios:
                limit = int(need * ratio)
                lives[policy, ratio].append(live(passes, limit, policy, disk if tier else False))
                run = simulate(made.trace, limit, parse_policy(policy), tier)
                simulated[policy, ratio].append((run.feasible, run.seconds, run.peak_bytes))
    rows = []
    for (policy, ratio), runs in lives.items():
        good = [run for run in runs if run is not None]
        fits = [run for run in simulated[policy, ratio] if run[0]]
        nan = float("nan")
        rows.append(
            Row(
                name, policy, ratio,
                statistics.median(r[0] for r in good) if good else nan,
                statistics.median(r[1] for r in fits) if fits else nan,
                max(r[1] for r in good) if good else nan,
                max(r[2] for r in fits) if fits else nan,
                (len(good) == len(runs), len(fits) == len(runs)),
            )
        )  # fmt: skip
    return rows, {
        "unmanaged_seconds": statistics.median(plain),
        "trace_seconds": statistics.median(traced),
        "unmanaged_peak_bytes": need,
        "trace_peak_bytes": seen,
        "tracing_seconds_per_op": statistics.median(tracing),
    }


def show(name: str, rows: list[Row], own: dict[str, float]) -> None:
    """Prints a model's rows."""
    print(
        f"{name}: unmanaged {own['unmanaged_seconds'] * 1e3:.1f} ms, trace {own['trace_seconds'] * 1e3:.1f} ms "
        f"({own['trace_seconds'] / own['unmanaged_seconds'] - 1:+.1%}); peak {own['unmanaged_peak_bytes'] / 1e6:.1f} MB, trace "
        f"({own['trace_peak_bytes'] / own['unmanaged_peak_bytes'] - 1:+.2%}); tracing {own['tracing_seconds_per_op'] * 1e6:.0f} us/op"
    )
    for r in rows:
        if not all(r.feasible):
            print(f"  {r.policy:6} {r.ratio:4.2f}  fits: live {r.feasible[0]}, simulated {r.feasible[1]}")
            continue
        print(
            f"  {r.policy:6} {r.ratio:4.2f}  live {r.live_seconds * 1e3:8.1f} ms {r.live_peak_bytes / 1e6:7.1f} MB   simulated "
            f"{r.simulated_seconds * 1e3:8.1f} ms ({r.simulated_seconds / r.live_seconds - 1:+6.1%}) "
            f"{r.simulated_peak_bytes / 1e6:7.1f} MB ({r.simulated_peak_bytes / r.live_peak_bytes - 1:+5.1%})",
            flush=True,
        )


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SIZES))
    parser.add_argument("--ratios", default="0.8,0.6,0.45")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="one round, one budget")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ratios = [0.6] if args.quick else [float(r) for r in args.ratios.split(",")]
    rounds = 1 if args.quick else args.rounds
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, one thread, {rounds} rounds\n")
    found: dict[str, Any] = {}
    for name in args.models.split(","):
        rows, own = compare(name, ratios, rounds, args.disk)
        show(name, rows, own)
        found[name] = {"own": own, "rows": [asdict(row) for row in rows]}
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
