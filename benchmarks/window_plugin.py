"""A training step on the CPU with memmgr's allocator alone, beside torch's own: no recorder, no hooks, no budget.

    python benchmarks/window_plugin.py [--rounds 7] [--steps 3]

The same model takes its steps in turns, some under the plug-in and some without, in one process. The plug-in keeps large
blocks where torch's allocator gives them back to the system at each free, so a step should be faster, not slower. With
one thread the processor's time, user and system, is what a busy machine leaves comparable; the clock stands beside it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from budget import models

from memmgr import _shim

CASES: dict[str, Callable[[], models.Training]] = {
    "GPT, 4 layers of 128, 8 x 128 tokens": models.gpt,
    "residual convnet, 16 x 3 x 32 x 32": lambda: models.convnet(batch=16),
    "U-Net, 4 x 3 x 96 x 96": lambda: models.unet(height=96),
    "MLP, 8 layers of 128, 8192 rows": lambda: models.mlp(width=128, batch=8192),
}


def seconds_of(training: models.Training, steps: int) -> tuple[float, float]:
    """Of the processor, user and system, and of the clock, for one step."""
    begun, clock = time.process_time(), time.perf_counter()
    for _ in range(steps):
        training.step()
    return (time.process_time() - begun) / steps, (time.perf_counter() - clock) / steps


def compare(make: Callable[[], models.Training], rounds: int, steps: int) -> list[float]:
    """Median processor seconds with the plug-in and without, and the median ratios of neighbouring rounds."""
    native = _shim.load()
    torch.manual_seed(0)
    training = make()
    training.step()
    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for number in range(rounds):
        for plugged in (True, False) if number % 2 else (False, True):
            if plugged:
                native.open_arena(2**64 - 1, 0)
            training.step()  # not timed: the first step after a change fetches its pages
            times[plugged].append(seconds_of(training, steps))
            native.close_arena()
    ratios = [
        statistics.median(ours[which] / theirs[which] for ours, theirs in zip(times[True], times[False], strict=True))
        for which in (0, 1)
    ]
    return [statistics.median(cpu for cpu, _ in times[plugged]) for plugged in (True, False)] + ratios


def table(rounds: int, steps: int) -> str:
    """In Markdown."""
    torch.set_num_threads(1)
    lines = [
        "| a training step, one thread | plug-in alone, CPU | torch's allocator, CPU | ratio, CPU | ratio, clock |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, make in CASES.items():
        ours, theirs, ratio, clock = compare(make, rounds, steps)
        lines.append(f"| {name} | {1e3 * ours:.1f} ms | {1e3 * theirs:.1f} ms | {ratio:.2f} | {clock:.2f} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    print(table(options.rounds, options.steps))


if __name__ == "__main__":
    main()
