"""`pin`: tensors that stay in memory, for uses that memmgr cannot see."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from . import budget as budgets


def _tensors(thing: Any) -> list[torch.Tensor]:
    if isinstance(thing, torch.nn.Module):
        return [*thing.parameters(), *thing.buffers()]
    if not isinstance(thing, torch.Tensor):
        raise TypeError(
            f"memmgr.pin takes tensors, modules, and lists, tuples and dicts of these; not {type(thing).__name__!r}"
        )
    return [thing]


class pin:
    """Keeps the bytes of tensors in memory, at their addresses, until `release()`, or the end of a `with`.

        with memmgr.pin(table):
            kernel.attach(table)  # C++ that goes on reading it, though it is no argument of later calls
            train()

    Rarely needed: the tensors of an op are in memory while the op runs, and a tensor whose address was taken
    (`data_ptr`, numpy, DLPack) stays by itself. But memmgr cannot see a tensor that C++ keeps from one call and reads
    in another. Absent bytes are restored first. Pinned bytes count against the budget, and towards its floor.

    Args:
        things: tensors on the budget's device, modules (their parameters and buffers), and lists, tuples and dicts of these. The
            storages live as long as the pin.

    Raises:
        BudgetError: they do not fit.
        TypeError: something else.

    Known limitations: outside of a budget it does nothing, and it does not reach into a budget that opens later.
    Tensors below 64 KiB are evicted only where very many of them fill the budget.
    """

    def __init__(self, *things: Any) -> None:
        tensors = [tensor for thing in tree_leaves(things) for tensor in _tensors(thing)]
        runtime = budgets.current()
        self._held: Any = runtime.native.pin(tensors, written=True, held=True) if runtime is not None else None

    def release(self) -> None:
        """They may leave again. A second call does nothing."""
        self._held = None

    def __enter__(self) -> pin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
