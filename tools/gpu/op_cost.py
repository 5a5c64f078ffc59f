"""Host time of an op on tensors of 1 MiB, which memmgr records: without a budget, without a limit and under one. JSON lines."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import memmgr  # before CUDA is initialised

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda"
OPS, ROUNDS = (150, 15) if DEVICE == "cuda" else (30, 3)


def main() -> None:
    """Medians of rounds that take turns."""
    x = torch.ones(1 << 18, device=DEVICE, requires_grad=True)
    small = torch.ones(64, device=DEVICE, requires_grad=True)
    ops: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
        "neg, saves nothing": (torch.neg, x),
        "sin, saves its input": (torch.sin, x),
        "add_": (lambda t: t.detach().add_(1.0), x),
        "neg, 64 elements": (torch.neg, small),
    }

    def wait() -> None:
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    def chain(op: Callable[[Tensor], Tensor], start: Tensor) -> float:
        y = start
        wait()
        before = time.perf_counter()
        for _ in range(OPS):
            y = op(y)
        took = (time.perf_counter() - before) / OPS
        wait()
        return 1e6 * took

    host: dict[str, Any] = {"host": "16MB"} if DEVICE == "cuda" else {}  # nothing is offloaded
    ways: dict[str, Callable[[], Any] | None] = {
        "no budget": None,
        "no limit": lambda: memmgr.budget(None, device=DEVICE, quiet=True, **host),
        "8 GB": lambda: memmgr.budget("8GB", device=DEVICE, quiet=True, **host),
    }
    for name, (op, start) in ops.items():
        found: dict[str, list[float]] = {way: [] for way in ways}
        for index in range(ROUNDS + 1):
            for way, opened in ways.items():
                if opened is None:
                    took = chain(op, start)
                else:
                    with opened():
                        chain(op, start)
                        took = chain(op, start)
                if index:
                    found[way].append(took)
        medians = {way: round(statistics.median(times), 2) for way, times in found.items()}
        print(json.dumps({"event": "op cost", "name": name, "microseconds": medians}), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
