"""The compiled shim of the open budget, and what saves for backward in it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import memmgr
from memmgr import _budget

EVICT, OFFLOAD = 1, 2
PRESENT, OFFLOADED = 0, 2
MIB = 1 << 20


def native() -> Any:
    """The module."""
    manager = _budget.current()
    assert manager is not None
    return manager.native


@contextmanager
def opened(limit: Any = "1GB", policy: str = "auto", **options: Any) -> Iterator[Any]:
    with memmgr.budget(limit, policy=policy, quiet=True, _sleep=False, **options):
        yield native()


def saved(native: Any) -> list[Any]:
    return list(native.handled())


def graph(n: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf, and a loss whose graph saves exp's and sigmoid's results, which nobody else holds."""
    x = torch.randn(n, n, requires_grad=True)
    return x, x.exp().sigmoid().sum()


def proven() -> None:
    """The kinds of `graph` prove themselves at their first use."""
    graph()
    gc.collect()
