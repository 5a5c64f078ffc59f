"""TensorBoard, or whatever has its `add_scalar`."""

from __future__ import annotations

from typing import Any, Protocol

from memmgr._budget import stats
from memmgr._sizes import UNLIMITED


class Writer(Protocol):
    """What of `torch.utils.tensorboard.SummaryWriter` is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> Any:
        """Notes one number."""


def log_stats(writer: Writer, step: int, prefix: str = "memmgr/") -> None:
    """Writes `memmgr.stats()` as scalars, each in the unit that its name says.

    Args:
        writer: a `SummaryWriter`.
        step: the step to which they belong.
        prefix: before each name; a slash makes it a group.

    Nothing is written before the first budget, and no `budget_bytes` where there is no limit.
    """
    for name, value in stats().items():
        if value != UNLIMITED:
            writer.add_scalar(prefix + name, float(value), step)
