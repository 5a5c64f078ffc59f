"""Write-back: which dirty cells to write early, so that a request rarely meets one. Like a page cache's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .types import Action, Candidates, Ints, Link, Ranking


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Shares of the budget, and how much to hand to the link at a time.

    Attributes:
        low: below it nothing is written early.
        high: from here on the queue is not limited.
        queue_seconds: between them at most so much work waits for the link, so that a late change of mind is cheap.
        least_bytes: smaller cells are not written early: a request's latency is most of what they take, early or late.
    """

    low: float = 0.70
    high: float = 0.90
    queue_seconds: float = 0.1
    least_bytes: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.high <= 1.0:
            raise ValueError(f"watermarks must be 0 <= low <= high <= 1, are {self.low!r} and {self.high!r}")
        if not self.queue_seconds > 0:
            raise ValueError(f"queue_seconds must be > 0, is {self.queue_seconds!r}")


WATERMARKS = Watermarks(least_bytes=64 << 10)
"""Those of live runs and of the simulator."""


@dataclass(frozen=True, slots=True, eq=False)
class WriteBack:
    """What to write now.

    Attributes:
        order: int64 (k,), indices into the candidates, first written first. They stay resident; writing makes them
            clean.
        total_bytes: their sizes.
    """

    order: Ints
    total_bytes: int


def plan_writeback(
    candidates: Candidates,
    ranking: Ranking,
    link: Link,
    *,
    resident_bytes: int,
    budget_bytes: int,
    watermarks: Watermarks = Watermarks(),
) -> WriteBack:
    """Walks the ranking until what could leave at once reaches down to the low watermark.

    The goal is resident - low x budget bytes at the head of the ranking that a request can have without waiting: cells
    to evict and clean ones are that already, dirty ones to be offloaded are written. Bytes that the link has queued
    count as written.

    Args:
        candidates: the cells.
        ranking: who leaves next, from `rank` over the same candidates, ideally with `need_bytes=None` or at least the
            goal. Cells whose write is under way must not be among the candidates as dirty ones (the caller leaves them
            out).
        link: `queued_write_bytes` is what has been handed over and not written.
        resident_bytes: now.
        budget_bytes: allowed.
        watermarks: see `Watermarks`.

    Returns:
        A `WriteBack`. At least one cell if the goal asks for any and the link is idle, so that large cells are written
        at all.

    Known limitations: a cell that is used once more and released without pressure was written for nothing: the price of
    never waiting; `low` limits it.
    """
    nothing = WriteBack(np.zeros(0, dtype=np.int64), 0)
    goal = resident_bytes - watermarks.low * budget_bytes
    if goal <= 0 or len(ranking) == 0 or link.write_bytes_per_second <= 0:
        return nothing
    size = candidates.size_bytes[ranking.order]
    before = size.cumsum() - size + link.queued_write_bytes
    dirty = (ranking.action == Action.OFFLOAD) & ~candidates.clean[ranking.order] & (size >= watermarks.least_bytes)
    at = np.flatnonzero(dirty & (before < goal))
    if resident_bytes < watermarks.high * budget_bytes:
        queued = link.queued_write_bytes + size[at].cumsum()
        limit = link.write_bytes_per_second * watermarks.queue_seconds
        within = int(np.searchsorted(queued, limit, side="right"))
        at = at[: max(within, 1 if link.queued_write_bytes == 0 else 0)]
    return WriteBack(ranking.order[at], int(size[at].sum()))
