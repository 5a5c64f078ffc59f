"""Real training under a budget with each placement: processor time of a step, interleaved, and what was evicted.

    python benchmarks/window_real.py [--rounds 5] [--share 0.5] [--placements window score]

What the replay cannot say: what remap costs (pages given back and fetched again), and what searching costs in a real step.
Recompute only (no disk tier), one thread; the processor's time, user and system, is what a busy machine leaves comparable.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]  # `make bench` runs with -P

from budget import models  # noqa: E402
from window_worth import _llama  # noqa: E402

import memmgr  # noqa: E402

PLACEMENTS = ("remap", "remap+apart", "window", "window+apart", "score", "dte")


def _steps(
    make: Callable[[], Callable[[], object]], budget: int | None, placement: str, steps: int
) -> dict[str, float]:
    """Processor seconds of the steps after the first two, and the figures of the run."""
    torch.manual_seed(0)
    with memmgr.budget(budget, disk=False, policy="evict", quiet=True, _placement=placement, _sleep=False) as opened:
        step = make()
        for _ in range(2):
            step()
        begun = time.process_time()
        for _ in range(steps):
            step()
        seconds = (time.process_time() - begun) / steps
        arena = memmgr._budget.current().native.arena_stats()
    stats = opened.stats()
    return {
        "seconds": seconds,
        "peak": stats["unmanaged_peak_bytes"],
        "evicted": stats["evicted_bytes"],
        "recompute": stats["recompute_seconds"],
        "search": stats["search_seconds"],
        "remapped": arena.get("remapped_bytes", 0),
        "beyond": arena.get("evicted_beyond_bytes", 0),
    }


def table(rounds: int, share: float, steps: int, placements: Sequence[str]) -> str:
    """In Markdown."""
    torch.set_num_threads(1)
    lines = [
        "| model | placement | CPU of a step, beside remap (quartiles) | evicted MB | recompute s | search s | remapped MB |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    cases: dict[str, Callable[[], Callable[[], object]]] = {
        "GPT": lambda: models.gpt().step,
        "ResNet-like": lambda: models.convnet(batch=16).step,
        "Llama, any length": _llama,
    }
    for name, make in cases.items():
        peak = _steps(make, None, "remap", steps)["peak"]
        budget = int(share * peak)
        runs: dict[str, list[dict[str, float]]] = {placement: [] for placement in placements}
        for number in range(rounds):
            for placement in placements if number % 2 else reversed(placements):
                runs[placement].append(_steps(make, budget, placement, steps))
        for placement, of in runs.items():
            ratios = sorted(a["seconds"] / b["seconds"] for a, b in zip(of, runs["remap"], strict=True))
            spread = f"{statistics.median(ratios):.3f} ({ratios[len(ratios) // 4]:.2f} to {ratios[-1 - len(ratios) // 4]:.2f})"
            mid = {key: statistics.median(run[key] for run in of) for key in of[0]}
            lines.append(
                f"| {name} | {placement} | {spread} | {mid['evicted'] / 1e6:.1f} | {mid['recompute']:.3f} | "
                f"{mid['search']:.4f} | {mid['remapped'] / 1e6:.1f} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--placements", nargs="+", default=PLACEMENTS, help="remap is always among them")
    options = parser.parse_args()
    placements = list(dict.fromkeys(["remap", *options.placements]))
    print(table(options.rounds, options.share, options.steps, placements))


if __name__ == "__main__":
    main()
