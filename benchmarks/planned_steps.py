"""Recompute-only plans beside full activation checkpointing at its own peak, step by step (issue 4, point 4).

    python benchmarks/planned_steps.py [--steps 20] [--threads N] [--json FILE] [--quick]

Three processes train the demo's GPT from the same beginning: plain, with full checkpointing, and under a budget that is the peak
which checkpointing reached (taken with the manager off), policy `evict`. They take turns, one step at a time, while the other two
wait; so a minute in which the machine is slow falls on all three, which blocks of steps (benchmarks/step_cost.py) do not
achieve. Each is warmed up first until the plan is followed.

Ratios are of the same turn, and their median over turns is shown, with the quartiles. The bound is that of the plan's own trace:
no recompute-only schedule under that budget is faster.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # `make bench` runs with -P

from _training import Run, demo_gpt
from step_cost import _plan, needs

import memmgr
from memmgr.policies.plan.planner import plan as plan_of

WARM_STEPS = 8
NAMES = ("plain", "checkpointing", "evict, planned")


def digest(run: Run) -> str:
    """Of the parameters."""
    sha = hashlib.sha256()
    for parameter in run.model.parameters():
        sha.update(parameter.detach().numpy().tobytes())
    return sha.hexdigest()


def train(name: str, quick: bool, threads: int, limit: int, pipe: Connection) -> None:
    """A child: a step for each message until there is none, and what was seen at the end."""
    torch.set_num_threads(threads)
    managed = name == NAMES[2]
    with memmgr.budget(limit, policy="evict", quiet=True) if managed else contextlib.nullcontext() as mm:
        run = demo_gpt(quick, checkpointed=name == NAMES[1])
        for _ in range(WARM_STEPS):
            run.step()
        before = mm.stats() if mm is not None else {}
        pipe.send(None)
        steps = 0
        while pipe.recv():
            begun = time.perf_counter()
            run.step()
            pipe.send(time.perf_counter() - begun)
            steps += 1
        told: dict[str, Any] = {"digest": digest(run)}
        if mm is not None:
            plan, trace = _plan()
            after = mm.stats()
            keys = ("evictions", "recomputes", "recompute_seconds", "stall_seconds", "planned_passes")
            told |= {f"{key}_per_step": (after[key] - before[key]) / max(1, steps) for key in keys}
            if plan is not None and trace is not None:
                told["predicted"] = plan.overhead
                # With the linear program, which live runs do without.
                told["lower_bound"] = plan_of(trace, limit).lower_bound
        pipe.send(told)


def turns(
    quick: bool, threads: int, limit: int, steps: int
) -> tuple[dict[str, list[float]], dict[str, dict[str, Any]]]:
    """Seconds of each step, and what each child said at its end."""
    context = multiprocessing.get_context("spawn")
    pipes, children = {}, []
    for name in NAMES:
        pipes[name], theirs = context.Pipe()
        children.append(context.Process(target=train, args=(name, quick, threads, limit, theirs), daemon=True))
        children[-1].start()
        pipes[name].recv()  # warm
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for turn in range(steps):
        for name in (*NAMES[turn % 3 :], *NAMES[: turn % 3]):
            pipes[name].send(True)
            seconds[name].append(pipes[name].recv())
    told = {}
    for name in NAMES:
        pipes[name].send(False)
        told[name] = pipes[name].recv()
    for child in children:
        child.join()
    return seconds, told


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="a small model, three steps")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    limit = needs(functools.partial(demo_gpt, args.quick, checkpointed=True))
    seconds, told = turns(args.quick, args.threads, limit, 3 if args.quick else args.steps)
    print(f"torch {torch.__version__}, {platform.machine()}, {args.threads} threads, budget {limit / 1e6:.1f} MB")
    ratios = {
        name: [mine / plain for mine, plain in zip(seconds[name], seconds["plain"], strict=True)] for name in NAMES
    }
    for name in NAMES:
        low, middle, high = statistics.quantiles(ratios[name], n=4)
        took = statistics.median(seconds[name]) * 1e3
        print(f"  {name:16} {took:8.1f} ms a step, {middle:.3f} of plain ({low:.3f} to {high:.3f})")
    found: dict[str, Any] = {"limit": limit, "seconds": seconds, "told": told, "ratios": ratios}
    extra = statistics.median(ratios[NAMES[2]]) - 1
    other = statistics.median(ratios[NAMES[1]]) - 1
    print(
        f"  of checkpointing's extra time: {extra / other:.2f}" if other > 0 else "  checkpointing costs nothing here"
    )
    mine = told[NAMES[2]]
    if "lower_bound" in mine:
        bound = mine["lower_bound"]
        print(
            f"  bound {bound:.3f}, predicted {mine['predicted']:.3f}; extra over the bound's: {extra / (bound - 1):.2f}"
        )
    print("  " + ", ".join(f"{key} {value:.4g}" for key, value in mine.items() if key.endswith("_per_step")))
    print(f"  parameters as in the plain run: {mine['digest'] == told['plain']['digest']}")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
