"""What model states cost that do not fit: steps of a fused AdamW, and tokens of `generate`, in less than they need.

    python benchmarks/model_states.py [--quick] [--json FILE] [--only train,generate] [--steps 10] [--batch 4] [--threads N]
    python benchmarks/model_states.py --only published --batch 1

Sections:
  train     a GPT of 60 million parameters with dropout, fused AdamW, 256 tokens a sequence, `--batch` of them, in 75, 50, 25
            and 10 % of what it needs. A batch of 4 computes for about 1.5 s on two cores, one of 8 for about 3.
  generate  a Llama of 120 million parameters (random weights): seconds a token, and of a prompt of 512, in half and a quarter
            of its weights. With transformers installed.
  published ZeRO-Offload, ZeRO-Infinity, PatrickStar and L2L beside the plan and the bound, in the simulator, over a step of that
            GPT recorded in a tenth of what it needs (so in fine slices). The times are the judge's. Only where it is named.

Every system runs in a process of its own, from the same beginning, and takes its turn while the others wait. A ratio is of
the same turn; the median is shown, with the quartiles. Parameters and tokens are compared bit by bit. `bound` is what the
plan says that none can beat, with the speed that the tier had when it was made; `moved` is what a step wrote and read, and
what its plan said.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memmgr
from memmgr import _budget
from memmgr._trace_file import read_trace
from memmgr.tools.gpt import GPT, GPTConfig

WARM_STEPS = 7
TRAINED = (0.75, 0.5, 0.25, 0.1)
GENERATED = (0.5, 0.25)
TOKENS = 12


class Training:
    """One turn is a step."""

    def __init__(self, quick: bool, batch: int) -> None:
        torch.manual_seed(0)
        config = GPTConfig(10, 10, 640, 256, vocabulary=8192, dropout=0.1)
        if quick:
            config = GPTConfig(layers=4, heads=4, width=128, context=64)
        self.model: nn.Module = GPT(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.batch, self.config = batch, config
        self.warm = 3 if quick else WARM_STEPS

    def turn(self) -> dict[str, float]:
        shape = self.batch, self.config.context
        tokens, targets = (torch.randint(self.config.vocabulary, shape) for _ in range(2))
        begun = time.perf_counter()
        self.model(tokens, targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"step": time.perf_counter() - begun}

    def digest(self) -> str:
        return digest_of([p.detach() for p in self.model.parameters()])


class Generating:
    """One turn is a few tokens, and a long prompt."""

    def __init__(self, quick: bool, batch: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        width, vocabulary = (128, 256) if quick else (1024, 8192)
        config = LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=2816 * width // 1024, num_hidden_layers=8,
            num_attention_heads=16, max_position_embeddings=1024, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        )  # fmt: skip
        self.model: Any = LlamaForCausalLM(config).eval()
        self.short, self.long = (torch.randint(1, vocabulary, (1, n)) for n in (32, 512))
        self.made: list[torch.Tensor] = []
        self.warm = 1

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


PUBLISHED = ("plan", "zero_offload", "zero_infinity", "patrickstar", "l2l")


def recorded(limit: int, quick: bool, batch: int, threads: int, path: str) -> None:
    """A process that records a step which repeats the one before."""
    torch.set_num_threads(threads)
    with memmgr.budget(limit, quiet=True, trace=path, trace_pass=WARM_STEPS + 1):
        workload = Training(quick, batch)
        for _ in range(WARM_STEPS + 2):
            workload.turn()


def published(args: argparse.Namespace) -> dict[str, Any]:
    """A table of policies by share of what the step needs."""
    context = multiprocessing.get_context("spawn")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.trace"
        with context.Pool(1, maxtasksperchild=1) as pool:
            need = pool.apply(needs, ("train", args.quick, args.batch))
            pool.apply(
                recorded, (int(need * (0.5 if args.quick else 0.1)), args.quick, args.batch, args.threads, str(path))
            )
        trace = read_trace(path)
        peak, link = trace.unmanaged_peak[0], trace.links[0]
        rates = f"{link.write_bytes_per_second / 1e9:.2f} GB/s down, {link.read_bytes_per_second / 1e9:.2f} up"
        print(f"\npublished: {peak / 1e6:,.0f} MB, {trace.seconds:.3f} s, {len(trace.ops):,} ops, a link of {rates}")
        print(f"  {'':5}{'bound':>14}" + "".join(f"{name:>14}" for name in PUBLISHED))
        for share in TRAINED:
            words = ["--log", str(path), "--policy", "all", "--ratio", str(share), "--json"]
            command = [sys.executable, "-P", "-m", "memmgr.tools.cli", "simulate", *words]
            told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            rows = {row["policy"]: row for row in told["results"]}
            cells = [rows[name] for name in PUBLISHED]
            shown = [f"{c['overhead']:.3f}" if c["feasible"] else f"from {c['least_bytes'] / peak:.1%}" for c in cells]
            print(f"  {share:<5.0%}" + "".join(f"{text:>14}" for text in (f"{cells[0]['lower_bound']:.3f}", *shown)))
            found[f"{share:.0%}"] = rows
    return found


WORKLOADS: dict[str, Any] = {"train": Training, "generate": Generating}


def digest_of(tensors: list[torch.Tensor]) -> str:
    sums = hashlib.sha256()
    for tensor in tensors:
        sums.update(tensor.numpy().tobytes())
    return sums.hexdigest()


def needs(name: str, quick: bool, batch: int) -> int:
    """Bytes: of a step the most that is resident, of a generation the weights."""
    if name == "generate":
        return sum(p.nbytes for p in Generating(quick, batch).model.parameters())
    with memmgr.budget(None, policy="keep", quiet=True) as mm:
        workload = Training(quick, batch)
        for _ in range(2):
            workload.turn()
    return int(mm.stats()["unmanaged_peak_bytes"])


def run(name: str, limit: int | None, quick: bool, batch: int, threads: int, pipe: Connection) -> None:
    """A process of one system."""
    torch.set_num_threads(threads)
    told: dict[str, Any] = {}
    with memmgr.budget(limit, quiet=True) if limit is not None else contextlib.nullcontext() as mm:
        workload = WORKLOADS[name](quick, batch)
        for _ in range(workload.warm):
            workload.turn()
        before = mm.stats() if mm is not None else {}
        pipe.send(None)
        turns = 0
        while pipe.recv():
            pipe.send(workload.turn())
            turns += 1
        if mm is not None:
            now, runtime = mm.stats(), _budget.current()
            made = runtime.plans.latest() if runtime is not None else None
            told = {key: (now[key] - before[key]) / turns for key in ("offload_bytes", "reload_bytes", "stall_seconds")}
            told["peak_of_limit"] = now["resident_bytes.peak"] / now["budget_bytes"]
            if made is not None:
                told |= {"predicted": made.overhead, "bound": made.lower_bound, "planned_bytes": made.moved_bytes}
    pipe.send({"digest": workload.digest(), **told})


def compare(name: str, shares: tuple[float, ...], args: argparse.Namespace) -> dict[str, Any]:
    """Turns of all systems."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        need = pool.apply(needs, (name, args.quick, args.batch))
    print(f"\n{name}: {need / 1e6:,.0f} MB")
    pipes: dict[str, Connection] = {}
    for share in (None, *shares):
        ours, theirs = context.Pipe()
        limit = None if share is None else int(need * share)
        asked = (name, limit, args.quick, args.batch, args.threads, theirs)
        context.Process(target=run, args=asked, daemon=True).start()
        ours.recv()  # warm
        pipes["plain" if share is None else f"{share:.0%}"] = ours
    turns: dict[str, list[dict[str, float]]] = {system: [] for system in pipes}
    for _ in range(2 if args.quick else args.steps):
        for system, pipe in pipes.items():
            pipe.send(True)
            turns[system].append(pipe.recv())
    rows: dict[str, Any] = {}
    for system, pipe in pipes.items():
        pipe.send(False)
        rows[system] = {"turns": turns[system], **pipe.recv()}
        show(system, rows[system], rows["plain"])
    return {"need": need, "rows": rows}


def show(system: str, row: dict[str, Any], plain: dict[str, Any]) -> None:
    """One system's lines."""
    for what in row["turns"][0]:
        mine, other = ([turn[what] for turn in one["turns"]] for one in (row, plain))
        low, middle, high = statistics.quantiles([a / b for a, b in zip(mine, other, strict=True)], n=4)
        print(
            f"  {system:6} {what:14} {statistics.median(mine):8.3f} s, {middle:.3f} of plain ({low:.3f} to {high:.3f})"
            + ("" if row["digest"] == plain["digest"] else "  OTHER BITS")
        )
    if "predicted" in row:
        bound = f"bound {row['bound']:.3f}, " if row["bound"] is not None else ""
        moved, planned = (row["offload_bytes"] + row["reload_bytes"]) / 1e6, row["planned_bytes"] / 1e6
        print(
            f"         {bound}predicted {row['predicted']:.3f}, moved {moved:,.0f} MB a turn (plan {planned:,.0f} a pass), "
            f"waited {row['stall_seconds']:.2f} s, peak {row['peak_of_limit']:.1%} of the budget"
        )


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="train,generate")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="small models, two turns")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {args.threads} threads")
    shares = {"train": TRAINED, "generate": GENERATED}
    if args.quick:
        shares = {"train": (0.75, 0.5), "generate": (0.7,)}
    found = {
        name: published(args) if name == "published" else compare(name, shares[name], args)
        for name in args.only.split(",")
    }
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
