"""Time of runs whose model states do not fit: steps of a fused AdamW, and tokens of `generate`, in less than they need.

    python tools/bench/studies/model_states.py [--quick] [--json FILE] [--only train,generate]
                                               [--variant amp,bf16,lora,accumulate]
                                      [--size tiny|small|large] [--steps 10] [--batch 4] [--threads N]
    python tools/bench/studies/model_states.py --only published --batch 1 --threads 1

Sections:
  train     a GPT of 60 million parameters (`--size small`: 14) with dropout, fused AdamW, 256 tokens a sequence, `--batch` of
            them, in 75, 50, 25 and 10 % of its need. The large one's batch of 4 computes for about 1.5 s on two cores.
  generate  a Llama of 120 million parameters (random weights): seconds a token, and of a prompt of 512, in half and a quarter
            of its weights. With transformers installed. `link` reads as many bytes as the weights have once, from a file as
            the tier's, past the page cache, two reads of 4 MiB at a time.
  published ZeRO-Offload, ZeRO-Infinity, PatrickStar and L2L beside the plan and the bound, in the simulator, over a step of that
            GPT recorded in a tenth of its need (so in fine slices). The times are the judge's. Only where it is named.

Variants of `train`, in 50 and 25 % (LoRA also in a third of its frozen base):
  amp         torch's autocast to bf16 over fp32 parameters and states
  bf16        parameters, activations and gradients in bf16; the optimizer keeps fp32 copies and states
  lora        peft's adapters on all projections of the frozen model
  accumulate  four micro-batches, clipped by their norm

Every system runs in a process of its own, from the same beginning, and takes its turn while the others wait. A ratio is of
the same turn; the median is shown, with the quartiles. Parameters, optimizer states, random numbers and tokens are compared
bit by bit. `bound` is the plan's lower bound, with the tier's speed at that time; `moved` is the bytes that a step
wrote and read, the plan's prediction, and the kernel's count in `/proc/self/io`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # `make bench` runs with -P

from _training import SIZES, VARIANTS
from _turns import in_turns, take_turns

import memmgr
from memmgr.api import budget as budgets
from memmgr.telemetry.trace_file import read_trace
from memmgr.tools.bench.cell import digest_of

TOKENS = 12
PIECE = 4 << 20


class Generating:
    """One turn is a few tokens, and a long prompt."""

    def __init__(self, size: str, batch: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        width, vocabulary = (128, 256) if size == "tiny" else (1024, 8192)
        config = LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=2816 * width // 1024, num_hidden_layers=8,
            num_attention_heads=16, max_position_embeddings=1024, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        )  # fmt: skip
        self.model: Any = LlamaForCausalLM(config).eval()
        self.short, self.long = (torch.randint(1, vocabulary, (1, n)) for n in (32, 512))
        self.made: list[torch.Tensor] = []
        self.warm, self.shares = 1, (0.7,) if size == "tiny" else (0.5, 0.25)

    def limits(self, need: int) -> dict[str, int]:
        return {f"{share:.0%}": int(need * share) for share in self.shares}

    def turn(self) -> dict[str, float]:
        begun = time.perf_counter()
        asked = {"attention_mask": torch.ones_like(self.short), "max_new_tokens": TOKENS, "do_sample": False}
        self.made.append(self.model.generate(self.short, **asked))
        turned = time.perf_counter()
        with torch.no_grad():
            self.model(self.long)
        return {"token": (turned - begun) / TOKENS, "prompt of 512": time.perf_counter() - turned}

    def digest(self) -> str:
        return digest_of(self.made)


class Streaming:
    """One turn reads a file of so many bytes once, as the tier would."""

    def __init__(self, need: int, file: int) -> None:
        self.offsets, self.file = range(0, need, PIECE), file
        self.memory = [mmap.mmap(-1, PIECE) for _ in range(2)]
        for offset in self.offsets:
            os.pwritev(file, [self.memory[0]], offset)
        os.fsync(file)

    def turn(self) -> dict[str, float]:
        begun = time.perf_counter()
        with ThreadPoolExecutor(len(self.memory)) as pool:
            list(pool.map(self.read, range(len(self.memory))))
        took = time.perf_counter() - begun
        return {"token": took, "prompt of 512": took}

    def read(self, one: int) -> None:
        for offset in self.offsets[one :: len(self.memory)]:
            os.preadv(self.file, [self.memory[one]], offset)


def stream(need: int, pipe: Connection) -> None:
    """A process of the link alone."""
    direct = os.O_DIRECT if os.environ.get("MEMMGR_TIER_DIRECT") != "0" else 0
    file = os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR | direct, 0o600)
    take_turns(Streaming(need, file), pipe)
    pipe.send({})


WORKLOADS: dict[str, Any] = {**VARIANTS, "generate": Generating}


def needs(name: str, size: str, batch: int) -> tuple[int, dict[str, int]]:
    """Bytes: of a step the most that is resident, of a generation the weights; and the budgets that are tried."""
    if name == "generate":
        workload = Generating(size, batch)
        need = sum(p.nbytes for p in workload.model.parameters())
        return need, workload.limits(need)
    with memmgr.budget(None, policy="keep", quiet=True) as mm:
        workload = WORKLOADS[name](size, batch)
        for _ in range(2):
            workload.turn()
    need = int(mm.stats()["unmanaged_peak_bytes"])
    return need, workload.limits(need)


def device_bytes() -> int:
    """Bytes read from and written to block devices for this process (`/proc/self/io`)."""
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(told["read_bytes"]) + int(told["write_bytes"])


def run(name: str, limit: int | None, size: str, batch: int, threads: int, pipe: Connection) -> None:
    """A process of one system."""
    torch.set_num_threads(threads)
    told: dict[str, Any] = {}
    with memmgr.budget(limit, quiet=True) if limit is not None else contextlib.nullcontext() as mm:
        workload = WORKLOADS[name](size, batch)
        for _ in range(workload.warm):
            workload.turn()
        before, device = mm.stats() if mm is not None else {}, device_bytes()
        turns = take_turns(workload, pipe)
        if mm is not None:
            now, runtime = mm.stats(), budgets.current()
            made = runtime.plans.latest() if runtime is not None else None
            told = {key: (now[key] - before[key]) / turns for key in ("offload_bytes", "reload_bytes", "stall_seconds")}
            told["device_bytes"] = (device_bytes() - device) / turns
            told["peak_of_limit"] = now["resident_bytes.peak"] / now["budget_bytes"]
            if made is not None:
                told |= {"predicted": made.overhead, "bound": made.lower_bound, "planned_bytes": made.moved_bytes}
    pipe.send({"digest": workload.digest(), **told})


def compare(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Turns of all systems."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        need, limits = pool.apply(needs, (name, args.size, args.batch))
    print(f"\n{name}: {need / 1e6:,.0f} MB")
    systems = {
        system: (run, (name, limit, args.size, args.batch, args.threads))
        for system, limit in {"plain": None, **limits}.items()
    }
    if name == "generate":
        systems["link"] = stream, (need,)
    rows = in_turns(systems, args.steps)
    for system, row in rows.items():
        show(system, row, rows["plain"])
        if "link" in rows and system in limits and "turns" in row:
            ratios = [a["token"] / b["token"] for a, b in zip(row["turns"], rows["link"]["turns"], strict=True)]
            print(f"         a token takes {statistics.median(ratios):.2f} of what the link takes for all weights once")
    return {"need": need, "limits": limits, "rows": rows}


def show(system: str, row: dict[str, Any], plain: dict[str, Any]) -> None:
    """One system's lines."""
    if "error" in row:
        print(f"  {system:6} did not run: {row['error']}")
        return
    for what in row["turns"][0]:
        mine, other = ([turn[what] for turn in one["turns"]] for one in (row, plain))
        low, middle, high = statistics.quantiles([a / b for a, b in zip(mine, other, strict=True)], n=4)
        print(
            f"  {system:6} {what:14} {statistics.median(mine):8.3f} s, {middle:.3f} of plain ({low:.3f} to {high:.3f})"
            + ("" if "digest" not in row else ", the same bits" if row["digest"] == plain["digest"] else "  OTHER BITS")
        )
    if "predicted" in row:
        bound = f"bound {row['bound']:.3f}, " if row["bound"] is not None else ""
        moved, planned = (row["offload_bytes"] + row["reload_bytes"]) / 1e6, row["planned_bytes"] / 1e6
        print(
            f"         {bound}predicted {row['predicted']:.3f}, moved {moved:,.0f} MB a turn (plan {planned:,.0f} a pass), "
            f"the kernel counted {row['device_bytes'] / 1e6:,.0f}, "
            f"waited {row['stall_seconds']:.2f} s, peak {row['peak_of_limit']:.1%} of the budget"
        )


PUBLISHED = ("plan", "zero_offload", "zero_infinity", "patrickstar", "l2l")


def recorded(limit: int, size: str, batch: int, threads: int, path: str) -> None:
    """A process that records a step which repeats the one before."""
    torch.set_num_threads(threads)
    warm = 7
    with memmgr.budget(limit, quiet=True, trace=path, trace_pass=warm + 1):
        workload = WORKLOADS["train"](size, batch)
        for _ in range(warm + 2):
            workload.turn()


def published(args: argparse.Namespace) -> dict[str, Any]:
    """A table of policies by share of the step's need."""
    context = multiprocessing.get_context("spawn")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.trace"
        with context.Pool(1, maxtasksperchild=1) as pool:
            need, limits = pool.apply(needs, ("train", args.size, args.batch))
            limit = int(need * (0.5 if args.size == "tiny" else 0.1))
            pool.apply(recorded, (limit, args.size, args.batch, args.threads, str(path)))
        trace = read_trace(path)
        peak, link = trace.unmanaged_peak[0], trace.links[0]
        rates = f"{link.write_bytes_per_second / 1e9:.2f} GB/s down, {link.read_bytes_per_second / 1e9:.2f} up"
        print(f"\npublished: {peak / 1e6:,.0f} MB, {trace.seconds:.3f} s, {len(trace.ops):,} ops, a link of {rates}")
        print(f"  {'':5}{'bound':>14}" + "".join(f"{name:>14}" for name in PUBLISHED))
        for share in limits:
            words = [str(path), "--policy", "all", "--ratio", share, "--json"]
            command = [sys.executable, "-P", "-m", "memmgr.tools.cli", "simulate", *words]
            told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            rows = {row["policy"]: row for row in told["results"]}
            cells = [rows[name] for name in PUBLISHED]
            shown = [f"{c['overhead']:.3f}" if c["feasible"] else f"from {c['least_bytes'] / peak:.1%}" for c in cells]
            print(f"  {share:<5}" + "".join(f"{text:>14}" for text in (f"{cells[0]['lower_bound']:.3f}", *shown)))
            found[share] = rows
    return found


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="train,generate")
    parser.add_argument("--variant", help="instead of those: amp, bf16, lora, accumulate, or several")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--size", choices=SIZES, default="large", help="of the GPT (default: %(default)s)")
    parser.add_argument("--quick", action="store_const", const=("tiny", 2), help="tiny models, two turns")
    args = parser.parse_args()
    args.size, args.steps = args.quick or (args.size, args.steps)
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {args.threads} threads")
    names = (args.variant or args.only).split(",")
    found = {name: published(args) if name == "published" else compare(name, args) for name in names}
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
