"""Where a smaller budget begins to cost time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MOST = 1.1
"""The most that the knee may cost: times over a pass without a limit."""

SHARES = tuple(range(95, 0, -5))
"""Per cent of the need that are looked at."""


@dataclass(frozen=True)
class Knee:
    """The smallest budget that costs little.

    Attributes:
        budget_bytes: the budget.
        slowdown: the time of a pass under it over that of one without a limit, as predicted.
    """

    budget_bytes: int
    slowdown: float


def knee(need_bytes: int, slowdown: Callable[[int], float | None], most: float = MOST) -> Knee:
    """The smallest of 100, 95, 90 ... 5 per cent of the need under which a pass takes at most `most` times as long.

    Args:
        need_bytes: peak of a pass without a limit.
        slowdown: the time of a pass under so many bytes over that of one without a limit; None: it does not fit. Called
            about five times.
        most: times over a pass without a limit.

    Known limitation: found by bisection, so a share that is slow although smaller ones are fast may be passed over.
    """
    best = Knee(need_bytes, 1.0)
    good, bad = -1, len(SHARES)
    while bad - good > 1:
        middle = (good + bad) // 2
        budget_bytes = need_bytes * SHARES[middle] // 100
        times = slowdown(budget_bytes)
        if times is not None and times <= most:
            good, best = middle, Knee(budget_bytes, times)
        else:
            bad = middle
    return best
