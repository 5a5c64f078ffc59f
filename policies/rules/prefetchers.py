"""Prefetchers: the offloaded cells to restore now. They act in the simulator, which asks, copies, and asks again.

Live, plans read ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from .types import Ints, Link


@dataclass(frozen=True, slots=True, eq=False)
class Upcoming:
    """Offloaded cells without a running read, in the order in which backward will need them.

    Attributes:
        size_bytes: int64 (n,).
        distance: int64 (n,), uses of others until each is needed; never decreasing.
    """

    size_bytes: Ints
    distance: Ints

    def __len__(self) -> int:
        return len(self.size_bytes)

    @classmethod
    def build(cls, size_bytes: ArrayLike, distance: ArrayLike | None = None) -> Upcoming:
        """From anything array-like; the distance defaults to 0, 1, 2, ...

        Raises:
            ValueError: lengths differ, a size is negative or distances decrease.
        """
        size = np.atleast_1d(np.asarray(size_bytes, dtype=np.int64))
        away = (
            np.arange(len(size), dtype=np.int64) if distance is None else np.atleast_1d(np.asarray(distance, np.int64))
        )
        if size.shape != away.shape or size.ndim != 1:
            raise ValueError(f"distance has shape {away.shape}, expected {size.shape}")
        if (size < 0).any():
            raise ValueError("size_bytes must be >= 0")
        if (np.diff(away) < 0).any():
            raise ValueError("cells must come in the order of use: distance decreases")
        return cls(size, away)


Prefetcher: TypeAlias = Callable[[Upcoming, Link, int, float, int], Ints]
"""(upcoming, link, headroom_bytes, seconds_per_use, in_flight_bytes) -> indices to ask for now, a prefix of `upcoming`.

headroom_bytes: budget - resident - reserve, where resident contains the blocks of the reads in flight.
seconds_per_use: backward's pace, seconds from one use to the next; 0 if unknown: all is urgent.
in_flight_bytes: asked for, not here yet; they come first.
"""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """As far ahead as bandwidth x headroom allows, and no earlier than is safe.

    The link is serial, so cell i has to start no later than min over j >= i of (use of j - time to read i..j). It is
    asked for now if that moment is near: within `caution` times the time to read everything up to it, or within
    `ahead_uses` uses. The answer ends before the first cell that does not fit: later ones do not overtake it, as it is
    needed sooner.

    Source: Capuchin's in-trigger (ASPLOS 2020, section 4.4) without a plan: the latest safe start, continually
    recomputed.

    Attributes:
        caution: 0: exactly just in time; 1: start when twice the time is left.
        ahead_uses: always look at least so many uses ahead.

    Known limitations: the pace is one number; a slow op between two uses makes a fetch early, which costs room, not
    time.
    """

    caution: float = 1.0
    ahead_uses: int = 8

    def __call__(
        self, upcoming: Upcoming, link: Link, headroom_bytes: int, seconds_per_use: float, in_flight_bytes: int
    ) -> Ints:
        fits = _fitting(upcoming, headroom_bytes)
        if fits == 0 or link.read_bytes_per_second <= 0:
            return _NONE
        ends = (in_flight_bytes + upcoming.size_bytes.cumsum()) * link.read_seconds_per_byte + link.latency_seconds
        use = upcoming.distance * seconds_per_use
        spare = np.minimum.accumulate((use - ends)[::-1])[::-1]  # a later burst makes an earlier cell urgent
        near = (spare <= self.caution * ends) | (upcoming.distance <= self.ahead_uses)
        late = np.flatnonzero(~near[:fits])
        return np.arange(late[0] if len(late) else fits, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Fifo:
    """The next `ahead` cells in the order of use, as far as there is room. Source: DELTA's Prefetcher, look-ahead 5
    (which its public code never calls).

    The look-ahead counts uses, so asking twice between two uses does not run further ahead.

    Known limitations: blind to sizes and to bandwidth: five small cells are too few, five large ones too many.
    """

    ahead: int = 5

    def __post_init__(self) -> None:
        if self.ahead < 1:
            raise ValueError(f"a look-ahead is at least 1 cell, not {self.ahead}; to switch prefetching off: 'off'")

    def __call__(
        self, upcoming: Upcoming, link: Link, headroom_bytes: int, seconds_per_use: float, in_flight_bytes: int
    ) -> Ints:
        near = int(
            np.searchsorted(upcoming.distance, self.ahead, side="left")
        )  # uses, so that repeated asking is idempotent
        return np.arange(min(near, self.ahead, _fitting(upcoming, headroom_bytes)), dtype=np.int64)


def fifo(ahead: int = 5) -> Prefetcher:
    """DELTA's look-ahead of `ahead` cells."""
    return Fifo(ahead)


def off(upcoming: Upcoming, link: Link, headroom_bytes: int, seconds_per_use: float, in_flight_bytes: int) -> Ints:
    """Nothing ahead of need: every reload is a stall."""
    return _NONE


bandwidth = Bandwidth()

PREFETCHERS: MappingProxyType[str, Prefetcher] = MappingProxyType({"bandwidth": bandwidth, "fifo": Fifo(), "off": off})

_NONE = np.zeros(0, dtype=np.int64)


def _fitting(upcoming: Upcoming, headroom_bytes: int) -> int:
    """How many of the next cells fit together."""
    return (
        int(np.searchsorted(upcoming.size_bytes.cumsum(), max(headroom_bytes, 0), side="right"))
        if headroom_bytes >= 0
        else 0
    )
