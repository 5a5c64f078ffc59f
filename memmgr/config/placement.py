"""How malloc answers a request that finds no run of addresses, by name."""

from __future__ import annotations

from typing import Literal

Placement = Literal["remap", "window"]
"""`remap`: the block goes to higher addresses, and as many pages are given back elsewhere. `window`: neighbours are evicted,
and pages move only where that does not help."""


def default_placement(device_type: str) -> Placement:
    """The placement of a budget whose caller names none.

    On the CPU `mremap` moves a page's address in microseconds, so `remap` has the lowest floor at no cost. An accelerator's
    driver takes 150 us to move a page, and its users have to be waited for first.
    """
    return "remap" if device_type == "cpu" else "window"


def parse_placement(text: str) -> Placement:
    """Raises `ValueError` for another name."""
    match text.strip().lower():
        case "remap":
            return "remap"
        case "window":
            return "window"
    raise ValueError(f"unknown placement {text!r}. Accepted: remap, window")
