"""What the figures of a run say about what to change: the lines that `run` and `report` share."""

from __future__ import annotations

from typing import Any

from memmgr._sizes import show_size

UNLIMITED = 2**64 - 1


def advice(stats: dict[str, Any]) -> list[str]:
    """Lines about a finished run, most useful first; empty where there is nothing to say.

    Args:
        stats: `memmgr.stats()`.
    """
    wall = max(float(stats.get("wall_seconds", 0.0)), 1e-9)
    budget, peak = int(stats["budget_bytes"]), int(stats["resident_bytes.peak"])
    unmanaged = int(stats["unmanaged_peak_bytes"])
    lines = []
    checkpoint = float(stats.get("checkpoint_seconds", 0.0))
    watched = max(float(stats.get("watched_seconds", 0.0)), 1e-9)
    if budget < UNLIMITED and unmanaged < 0.9 * budget and checkpoint > 0.02 * watched:
        lines.append(
            f"the script's own checkpointing recomputes for {checkpoint / watched:.0%} of the time while "
            f"{show_size(budget - unmanaged)} of the budget are never used; without it memmgr would recompute only what "
            "does not fit"
        )
    if budget == UNLIMITED:
        lines.append(f"it needs {show_size(unmanaged)}; the floor is about {show_size(int(stats['floor_bytes']))}")
    elif unmanaged <= budget:
        lines.append(f"everything fitted: {show_size(peak)} of {show_size(budget)}")
    else:
        recompute, stall = float(stats["recompute_seconds"]) / wall, float(stats["stall_seconds"]) / wall
        lines.append(
            f"{show_size(unmanaged)} in {show_size(budget)} (floor about {show_size(int(stats['floor_bytes']))}): "
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
