"""A total among the ranks of a job that wait for each other in every step, so that the slowest of them takes least.

Each rank has a curve: with so many bytes its step takes so long. It falls by steps, as only some budgets are looked at. For a
step of T seconds every rank takes the least budget that reaches T, so the least T is found by bisection over the times of all
curves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """The time of one rank's step by its budget.

    Attributes:
        points: (budget in bytes, seconds), budgets rising and times falling.
    """

    points: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, found: Iterable[tuple[int, float | None]]) -> Curve:
        """Builds a curve from budgets that were tried and their times; None: the step does not fit. More bytes never
        take longer.
        """
        points: list[tuple[int, float]] = []
        for budget, seconds in sorted((b, s) for b, s in found if s is not None):
            if not points or seconds < points[-1][1]:
                points.append((budget, seconds))
        return cls(tuple(points))

    @property
    def floor_bytes(self) -> int:
        """The smallest budget that was found to fit."""
        return self.points[0][0]

    def seconds(self, budget_bytes: int) -> float | None:
        """The time in so many bytes; None: it does not fit."""
        at = bisect_right([budget for budget, _ in self.points], budget_bytes)
        return self.points[at - 1][1] if at else None

    def least_bytes(self, seconds: float) -> int | None:
        """The smallest budget with which the step takes no longer; None: there is none."""
        return next((budget for budget, takes in self.points if takes <= seconds), None)


@dataclass(frozen=True)
class Limit:
    """The bytes that some ranks may have together: all ranks, those of a host, or one with its device."""

    ranks: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True)
class Split:
    """A budget for each rank, in bytes, and the time of the slowest rank."""

    budgets: tuple[int, ...]
    seconds: float


def split(curves: Sequence[Curve], limits: Sequence[Limit]) -> Split | None:
    """The split whose slowest rank takes least, in the fewest bytes; None: the floors do not fit.

    Args:
        curves: of each rank, none without a point.
        limits: all of them hold for the split.

    *Known limitations*: the ranks are taken to synchronize once a step. Those of a pipeline synchronize at every
    micro-batch. All later stages wait when one takes longer, so their step may take longer than the slowest stage,
    never less.
    """
    times = sorted({seconds for curve in curves for _, seconds in curve.points})
    best: Split | None = None
    low, high = 0, len(times)
    while low < high:
        middle = (low + high) // 2
        taken = [curve.least_bytes(times[middle]) for curve in curves]
        budgets = tuple(size for size in taken if size is not None)
        if len(budgets) == len(curves) and fits(budgets, limits):
            best, high = Split(budgets, times[middle]), middle
        else:
            low = middle + 1
    return best


def fits(budgets: Sequence[int], limits: Iterable[Limit]) -> bool:
    """Tells if all limits hold."""
    return all(sum(budgets[rank] for rank in limit.ranks) <= limit.size_bytes for limit in limits)


def equal(ranks: int, limits: Sequence[Limit]) -> tuple[int, ...]:
    """The same budget for each rank that shares a limit, as large as the tightest limit allows."""
    return tuple(
        min(limit.size_bytes // len(limit.ranks) for limit in limits if rank in limit.ranks) for rank in range(ranks)
    )


def spread(budgets: Sequence[int], most: Sequence[int], limits: Sequence[Limit]) -> tuple[int, ...]:
    """Adds the bytes left over, in equal parts, to ranks that can use them: a trace does not show every byte.

    Args:
        budgets: that fit.
        most: the bytes that each rank can use.
        limits: all of them hold for the result.
    """
    given = list(budgets)
    for done, rank in enumerate(sorted(range(len(given)), key=lambda r: most[r] - given[r])):
        left = max(0, most[rank] - given[rank])
        for limit in limits:
            if rank in limit.ranks:
                others = max(1, min(len(limit.ranks), len(given) - done))
                left = min(left, (limit.size_bytes - sum(given[r] for r in limit.ranks)) // others)
        given[rank] += left
    return tuple(given)
