"""The errors that memmgr raises."""

from __future__ import annotations

from torch import OutOfMemoryError


class BudgetError(OutOfMemoryError):
    """The budget is spent and nothing more can be let go.

    A subclass of `torch.OutOfMemoryError`, so that whatever handles torch's own error handles this one. Its text begins
    as torch's does, then says the smallest budget that would have worked so far and what holds the rest (design §4).

    Attributes:
        floor_bytes: the smallest budget that would have worked up to here, in bytes; a later part of the run may need more.
        budget_bytes: the budget that was passed, in bytes.

    Known limitation: where C++ code outside the dispatch mode and outside backward allocates, the plain
    `torch.OutOfMemoryError` arrives instead, with the floor in its text.
    """

    floor_bytes: int = 0
    budget_bytes: int = 0


class RecomputeError(RuntimeError):
    """A recomputed tensor differs from what was dropped, or cannot be recomputed: raised instead of a wrong gradient."""
