"""How malloc answers a request that finds no room, or no run of addresses, by name."""

from __future__ import annotations

from dataclasses import dataclass

from memmgr.common.constants import BY_DTE, BY_SCORE, BY_WINDOW, REMAP_FIRST, REMAP_LAST, REMAP_NEVER

SEARCHES = {"remap": -1, "score": BY_SCORE, "dte": BY_DTE, "window": BY_WINDOW}


@dataclass(frozen=True)
class Placement:
    """How victims are chosen, and where blocks lie.

    Attributes:
        search: -1: in the order of the ranking, with remapping to higher addresses where there is no run; 0 score, 1
            DTE, 2 sliding window: within the budget's length of addresses, until the request fits there.
        remap: 0 first, 1 when no eviction would help, 2 never.
        apart: cheap and expensive blocks from opposite ends.
    """

    search: int
    remap: int
    apart: bool


REMAP = Placement(SEARCHES["remap"], REMAP_FIRST, False)
"""The CPU's default: the lowest floor, or a tie, and the fewest bytes that leave."""


def default_placement(device_type: str) -> str:
    """The placement of a budget whose caller names none.

    On the CPU `mremap` moves a page's address in microseconds, so `remap` has the lowest floor at no cost. An accelerator's
    driver takes 150 us to move a page, and its users have to be waited for first, so a run of addresses is made by evicting
    neighbours (`window`), and pages are moved only where that does not help.
    """
    return "remap" if device_type == "cpu" else "window"


def parse_placement(text: str) -> Placement:
    """`remap`, `window`, `score` or `dte`, with `+apart` and `+strict` (addresses further up are never used).

    Raises:
        ValueError: unknown.
    """
    name, *rest = text.strip().lower().split("+")
    if name not in SEARCHES or not set(rest) <= {"apart", "strict"} or (name == "remap" and "strict" in rest):
        raise ValueError(
            f"unknown placement {text!r}. Accepted: {', '.join(SEARCHES)}, each with +apart, and all but remap with +strict"
        )
    if name == "remap":
        return Placement(-1, REMAP_FIRST, "apart" in rest)
    return Placement(SEARCHES[name], REMAP_NEVER if "strict" in rest else REMAP_LAST, "apart" in rest)
