"""What the budgets of a sweep know of each other."""

from __future__ import annotations

from collections.abc import Sequence


def no_worse(seconds: Sequence[float | None]) -> list[int]:
    """Whose schedule each budget takes: what keeps a budget keeps every larger one, and a search may find less in that.

    Args:
        seconds: what a step takes, the largest budget first; None: no schedule was found.

    Returns:
        Of each, the place of the best among itself and all that are smaller.
    """
    best = len(seconds) - 1
    found = []
    for place in range(best, -1, -1):
        own, least = seconds[place], seconds[best]
        if least is None or (own is not None and own <= least):
            best = place
        found.append(best)
    return found[::-1]
