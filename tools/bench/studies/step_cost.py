"""Overhead of memmgr without evictions: op by op, and a step at 100 % of its need, as ratios of plain torch.

    python tools/bench/studies/step_cost.py [--quick] [--json FILE] [--only ops,full] [--steps 20] [--threads N]

Sections:
  ops    microseconds an op over plain torch, without evictions. Plain and managed blocks take turns in one process.
  full   a step at 100 % of its need: models whose ops take 100 us and more, about 10 us, and 1 to 2 us.

Steps in less than they need are `memmgr bench`'s. In `full` every system trains in a process of its own, from the same
beginning. They take turns, one step at a time, while the others wait, so a minute in which the machine is slow falls on all of
them. Each is warmed up first, until its plan is followed. A ratio is of the same turn; the median over turns is shown, with the
quartiles. Parameters are compared bit by bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))  # `make bench` runs with -P

from _training import MODELS, Run
from _turns import in_turns, take_turns

import memmgr
from memmgr.api import budget as budgets
from memmgr.tools.bench.cell import digest_of

WARM_STEPS = 8
ROUNDS = 15


# ---- op by op ------------------------------------------------------------------------------------------------------------


def _ops() -> dict[str, tuple[Callable[[], object], int]]:
    small, weight, square = torch.randn(4), nn.Parameter(torch.randn(4)), torch.randn(16, 16)
    large, large_weight = torch.randn(20_000), nn.Parameter(torch.randn(20_000))
    wide = torch.randn(256, 1024)
    norm = nn.LayerNorm(16)
    rows = torch.randn(8, 16)
    return {
        "view": (lambda: large.view(100, 200), 2000),
        "add, 4 elements": (lambda: small + small, 2000),
        "add, 4 elements, with grad": (lambda: weight + small, 2000),
        "mm, 16 x 16": (lambda: square @ square, 2000),
        "layer_norm, 8 x 16, with grad": (lambda: norm(rows), 1000),
        "add_, 80 kB": (lambda: large.add_(1), 1000),
        "add, 80 kB, recorded": (lambda: large_weight + 1, 1000),
        "tanh, 1 MB": (lambda: torch.tanh(wide), 100),
    }


def _seconds(run: Callable[[], object], times: int) -> float:
    run()
    begun = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - begun) / times


def ops(rounds: int) -> dict[str, tuple[float, float]]:
    """For each op: seconds in plain torch, and under a budget that it is far below. Medians over the rounds; one
    thread.
    """
    torch.set_num_threads(1)
    what = _ops()
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in what}
    for _ in range(rounds):
        for managed in (False, True):
            with memmgr.budget("8GB", quiet=True) if managed else contextlib.nullcontext():
                for name, (run, times) in what.items():
                    found[name][managed].append(_seconds(run, times))
    return {name: (statistics.median(plain), statistics.median(ours)) for name, (plain, ours) in found.items()}


# ---- step by step --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class System:
    """One way to train a model. `limit`: bytes; None: plain torch."""

    name: str
    model: str
    limit: int | None = None


@dataclass
class _Step:
    """One training step a turn."""

    run: Run

    def turn(self) -> dict[str, float]:
        begun = time.perf_counter()
        self.run.step()
        return {"step": time.perf_counter() - begun}


def _train(system: System, quick: bool, threads: int, pipe: Connection) -> None:
    """In the system's process: a step a turn, and its results at the end."""
    torch.set_num_threads(threads)
    managed = memmgr.budget(f"{system.limit}B", quiet=True) if system.limit else None
    with managed or contextlib.nullcontext():
        run = MODELS[system.model](quick)
        for _ in range(WARM_STEPS):
            run.step()
        before = memmgr.stats()
        steps = take_turns(_Step(run), pipe)
        told: dict[str, Any] = {}
        if managed is not None:
            after = memmgr.stats()
            keys = ("evictions", "recomputes", "recompute_seconds", "stall_seconds", "planned_passes", "offload_bytes")
            told = {f"{key}_per_step": (after[key] - before[key]) / max(1, steps) for key in keys}
            told["peak_of_limit"] = after["resident_bytes.peak"] / after["budget_bytes"]
            runtime: Any = budgets.current()
            plan = runtime.plans.latest()
            if plan is not None:
                told |= {"predicted": plan.overhead, "bound": plan.lower_bound}
    pipe.send({**told, "digest": digest_of(run.model.parameters())})


def turns(systems: list[System], quick: bool, threads: int, steps: int) -> dict[str, dict[str, Any]]:
    """For each system: ratios to the first one, turn by turn, and its results.

    Raises `RuntimeError`: a system cannot run.
    """
    rows = in_turns({system.name: (_train, (system, quick, threads)) for system in systems}, steps)
    for name, row in rows.items():
        if "error" in row:
            raise RuntimeError(f"{name}: {row['error']}")
        row["seconds"] = [turn["step"] for turn in row.pop("turns")]
    plain = rows[systems[0].name]
    for row in rows.values():
        row["ratios"] = [mine / other for mine, other in zip(row["seconds"], plain["seconds"], strict=True)]
        row["same"] = row["digest"] == plain["digest"]
    return rows


def needs(model: str, quick: bool) -> int:
    """Most bytes that plain torch has resident."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_needs, (model, quick))


def _needs(model: str, quick: bool) -> int:
    with memmgr.budget(None, policy="keep", quiet=True) as mm:
        run = MODELS[model](quick)
        for _ in range(3):
            run.step()
    return int(mm.stats()["unmanaged_peak_bytes"])


def _show(title: str, found: dict[str, dict[str, Any]]) -> None:
    print(f"\n{title}")
    for name, row in found.items():
        low, middle, high = statistics.quantiles(row["ratios"], n=4)
        took = statistics.median(row["seconds"]) * 1e3
        line = f"  {name:24} {took:8.1f} ms a step, {middle:.3f} of plain ({low:.3f} to {high:.3f})"
        if "predicted" in row:
            bound = f", bound {row['bound']:.3f}" if row["bound"] is not None else ""
            line += f"; predicted {row['predicted']:.3f}{bound}"
        if "peak_of_limit" in row:
            line += f"; peak {row['peak_of_limit']:.1%} of the budget"
        print(line + ("" if row["same"] else "  OTHER BITS"), flush=True)


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="ops,full")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="small models, three steps")
    args = parser.parse_args()
    wanted, steps = set(args.only.split(",")), 3 if args.quick else args.steps
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {args.threads} threads")
    found: dict[str, Any] = {}
    if "ops" in wanted:
        found["ops"] = ops(3 if args.quick else ROUNDS)
        for name, (plain, ours) in found["ops"].items():
            print(f"  {name:32} {plain * 1e6:8.2f} us {ours * 1e6:8.2f} us {1e6 * (ours - plain):+6.2f}")

    def compare(title: str, systems: list[System]) -> None:
        result = turns(systems, args.quick, args.threads, steps)
        found[title] = {"systems": [asdict(system) for system in systems], "rows": result}
        _show(title, result)

    if "full" in wanted:
        for model in MODELS:
            limit = needs(model, args.quick)
            compare(f"{model}, 100 %", [System("plain", model), System("memmgr", model, int(limit * 1.01))])
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
