"""Model states as a kind of their own: where their bytes are, how many moved, and how many the link could have moved.
Computed from `memmgr.stats()` alone, so that a reader of the stream or of a log shows the same figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memmgr.common.constants import Purpose

STATE_PURPOSES = tuple(purpose.name.lower() for purpose in Purpose if purpose)
KINDS = (*STATE_PURPOSES, "other")
"""The kinds of figures (`moved_bytes.parameters`); `other` is memory without a model or optimizer: activations, mostly.
"""


@dataclass(frozen=True)
class Flow:
    """One kind.

    Attributes:
        resident_bytes: on the device now.
        offloaded_bytes: offloaded now.
        moved_bytes: over the link, both ways, in a pass.
    """

    kind: str
    resident_bytes: int
    offloaded_bytes: int
    moved_bytes: float


@dataclass(frozen=True)
class Flows:
    """All kinds over some passes.

    Attributes:
        each: of every kind, in the order of `KINDS`.
        pass_seconds: how long a pass took.
        link_bytes: bytes that the link could have moved in it, one way at a time; 0: there is none.
    """

    each: tuple[Flow, ...]
    pass_seconds: float
    link_bytes: float

    @property
    def moved_bytes(self) -> float:
        """In a pass."""
        return sum(flow.moved_bytes for flow in self.each)

    @property
    def states_moved_bytes(self) -> float:
        """The model states' part of it."""
        return sum(flow.moved_bytes for flow in self.each if flow.kind in STATE_PURPOSES)

    @property
    def states_offloaded_bytes(self) -> int:
        """Bytes of model states that are offloaded now."""
        return sum(flow.offloaded_bytes for flow in self.each if flow.kind in STATE_PURPOSES)


def flows(stats: Mapping[str, Any], since: Mapping[str, Any] | None = None) -> Flows | None:
    """The bytes moved between two readings, per pass.

    Args:
        stats: `memmgr.stats()`.
        since: an earlier reading; without one the run begins there.

    Returns:
        None where the figures are missing (a log of an older memmgr). Without a pass in between: a pass is all the time.
        Turns of a loop without a backward share all the time, since their begin is not recorded.
    """
    if f"moved_bytes.{KINDS[0]}" not in stats:
        return None
    before = since or {}

    def grown(name: str) -> float:
        return float(stats.get(name, 0.0)) - float(before.get(name, 0.0))

    passes = max(grown("passes"), 1.0)
    seconds = max(0.0, grown("watched_seconds") or grown("wall_seconds")) / passes
    each = tuple(
        Flow(
            kind,
            int(stats[f"resident_bytes.{kind}"]),
            int(stats[f"offloaded_bytes.{kind}"]),
            max(0.0, grown(f"moved_bytes.{kind}")) / passes,
        )
        for kind in KINDS
    )
    return Flows(each, seconds, seconds * float(stats.get("link_bytes_per_second", 0.0)))
