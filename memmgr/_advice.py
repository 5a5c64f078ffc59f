"""What the figures of a run say about what to change: lines for whoever ends a run, from `memmgr.stats()` alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ._sizes import show_size

UNLIMITED = 2**64 - 1
WORTH_SAYING = 0.03
"""Of the time: what costs less is not worth more memory."""


def own_checkpointing(stats: dict[str, Any]) -> list[str]:
    """A line where the program's activation checkpointing recomputes although the budget has room, else none."""
    budget, unmanaged = int(stats["budget_bytes"]), int(stats["unmanaged_peak_bytes"])
    checkpoint = float(stats.get("checkpoint_seconds", 0.0))
    watched = max(float(stats.get("watched_seconds", 0.0)), 1e-9)
    if budget >= UNLIMITED or unmanaged >= 0.9 * budget or checkpoint <= 0.02 * watched:
        return []
    return [
        f"the script's own checkpointing recomputes for {checkpoint / watched:.0%} of the time while "
        f"{show_size(budget - unmanaged)} of the budget are never used; without it memmgr would recompute only what "
        "does not fit"
    ]


def advice(stats: dict[str, Any]) -> list[str]:
    """Lines about a finished run, most useful first; empty where there is nothing to say.

    Args:
        stats: `memmgr.stats()`.
    """
    wall = max(float(stats.get("wall_seconds", 0.0)), 1e-9)
    budget, peak = int(stats["budget_bytes"]), int(stats["resident_bytes.peak"])
    unmanaged = int(stats["unmanaged_peak_bytes"])
    floor = int(stats["floor_bytes"])
    lines = []
    if budget == UNLIMITED:
        lines.append(f"it needs {show_size(unmanaged)}; the floor is about {show_size(floor)}")
    elif unmanaged <= budget:
        lines.append(f"everything fitted: {show_size(peak)} of {show_size(budget)}")
    else:
        recompute, stall = float(stats["recompute_seconds"]) / wall, float(stats["stall_seconds"]) / wall
        lines.append(
            f"{show_size(unmanaged)} in {show_size(budget)} (floor about {show_size(floor)}): "
            f"{recompute:.1%} of the time recomputing, {stall:.1%} waiting"
        )
        if stall > 2 * recompute and stall > 0.1:
            lines.append("mostly waiting for the tier below: try a faster --disk, or --policy evict")
    held = int(stats["held_bytes.peak"])
    if budget < UNLIMITED and unmanaged > budget and held > 0.7 * budget:
        lines.append(
            f"{show_size(held)} of the budget are held by the program itself and cannot leave; memmgr top shows by whom"
        )
    return lines


def more_budget(
    stats: dict[str, Any], costs: Iterable[tuple[int, float]], share: float = 0.8
) -> tuple[int, float] | None:
    """How much more budget would remove most of what the lack of it costs.

    What was brought back is taken to be kept instead, the dearest bytes first: that is what the policies keep. All of it
    would be kept with the unmanaged peak as the budget, so bytes brought back are scaled to what is missing to that.

    Args:
        stats: `memmgr.stats()` at the end.
        costs: (bytes, seconds) of what was recomputed, read back and waited for, by whatever grouping there is.
        share: of the seconds, to be removed.

    Returns:
        (bytes more, share of the seconds that they remove), or None where everything fitted or nothing is to be gained.

    Known limitation: an estimate. That an op recomputed early saves the recomputation of its inputs is not seen, and a
    coarse grouping hides cheap bytes among dear ones.
    """
    missing = int(stats["unmanaged_peak_bytes"]) - int(stats["budget_bytes"])
    known = [(size, seconds) for size, seconds in costs if seconds > 0]
    total = sum(seconds for _, seconds in known)
    size = sum(size for size, _ in known)
    wall = float(stats.get("wall_seconds", 0.0))
    if missing <= 0 or size <= 0 or total < WORTH_SAYING * wall:
        return None
    kept, saved = 0.0, 0.0
    for part, seconds in sorted(known, key=lambda cost: -cost[1] / max(cost[0], 1)):
        take = min(1.0, (share * total - saved) / seconds)  # of a group as much as is needed
        kept, saved = kept + take * part, saved + take * seconds
        if saved >= share * total * (1 - 1e-9):
            break
    return int(missing * kept / size), saved / total
