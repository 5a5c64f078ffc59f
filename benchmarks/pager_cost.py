"""What the pager costs where nothing has to leave: op by op, and a step of a GRUCell loop (ops of 1 to 2 us).

Plain torch and the pager take turns in one process; a figure is the median over the turns. Under the recorder, which runs by
default, the same table is printed with `--recorder`.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

ROUNDS = 15


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


def _gru() -> Callable[[], None]:
    cell, head = nn.GRUCell(16, 16), nn.Linear(16, 1)
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=1e-2)
    steps = torch.randn(20, 8, 16)

    def step() -> None:
        h = torch.zeros(8, 16)
        for x in steps:
            h = cell(x, h)
        head(h).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _mlp() -> Callable[[], None]:
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(256, 256)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _seconds(run: Callable[[], object], times: int) -> float:
    run()
    begun = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - begun) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recorder", action="store_true", help="measure what runs by default instead of the pager")
    options = parser.parse_args()
    os.environ["MEMMGR_PAGER"] = "0" if options.recorder else "1"
    import memmgr

    torch.set_num_threads(1)
    ops, steps = _ops(), {"GRUCell loop": (_gru(), 20), "MLP, ops of about 300 us": (_mlp(), 4)}
    plain: dict[str, list[float]] = {}
    managed: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for found, scope in ((plain, None), (managed, memmgr.budget("8GB", quiet=True))):
            if scope is not None:
                scope.__enter__()
            for name, (run, times) in {**ops, **steps}.items():
                found.setdefault(name, []).append(_seconds(run, times))
            if scope is not None:
                scope.__exit__(None, None, None)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, one thread, {ROUNDS} turns each")
    for name in ops:
        a, b = statistics.median(plain[name]), statistics.median(managed[name])
        print(f"{name:32s} {a * 1e6:8.2f} us {b * 1e6:8.2f} us {1e6 * (b - a):+6.2f}")
    for name in steps:
        a, b = statistics.median(plain[name]), statistics.median(managed[name])
        print(f"{name:32s} {a * 1e3:8.2f} ms {b * 1e3:8.2f} ms {b / a:6.2f}x")


if __name__ == "__main__":
    main()
