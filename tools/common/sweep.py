"""Shares schedules between the budgets of a sweep, and words its picture's title."""

from __future__ import annotations

from collections.abc import Sequence


def no_worse(seconds: Sequence[float | None]) -> list[int]:
    """The budget whose schedule each budget uses. A schedule that fits a budget fits every larger one, for which a
    search may find a worse one.

    Returns, for each budget, the index of the best among itself and all smaller ones. `seconds`: time of a step, the
    largest budget first; None: no schedule was found.
    """
    best = len(seconds) - 1
    found = []
    for place in range(best, -1, -1):
        own, least = seconds[place], seconds[best]
        if least is None or (own is not None and own <= least):
            best = place
        found.append(best)
    return found[::-1]


def cut(factors: Sequence[float | None], highest: float) -> str:
    """The part of a picture's title about factors above its upper end; empty without one."""
    largest = max((factor for factor in factors if factor is not None), default=0.0)
    return f"; cut at {highest:g}x, the largest is {largest:.1f}x" if largest > highest else ""
