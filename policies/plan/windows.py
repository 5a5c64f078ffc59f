"""Which blocks leave a pass that repeats, chosen by the time that the link has for each of their copies.

A block that leaves between two touches is written after its last change and before memory is short, and read back after that
and before its next touch. Belady's choice, the block that is touched last, may have been changed a moment ago. Its write then
has no time to hide, and the op that needs the room waits for it. `chosen` takes blocks one after the other: for the event that
lacks most bytes, the block whose copies make the pass wait least per byte, by the seconds of the link that are free in its two
windows.

*Known limitations*: it is greedy. A copy is spread over its window as if the link could change between copies at any time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memmgr.policies.trace import TierLink
from memmgr.policies.trace.blocks import Program

Gap = tuple[int, int]
"""A block, and the number of the touch that ends the gap; 0: the first touch of the next pass."""

_TIE = 1e-3
"""The worth of a second of the link that nothing waits for, in seconds of waiting."""

_EASY = 0.25
"""The share of `_TIE` that a block is spared if both windows are as long as the pass: other blocks cannot use so many seconds."""


@dataclass(frozen=True)
class _Gap:
    """A gap between two touches. Events are counted on over the end of the pass.

    Attributes:
        name: see `Gap`.
        size: bytes.
        changed: the event that changed the block last, up to a pass before `begin`.
        begin: the touch before the gap.
        end: the touch that ends it.
        moves: whether an op changes the block at all; otherwise its copy is always whole.
    """

    name: Gap
    size: int
    changed: int
    begin: int
    end: int
    moves: bool


def _gaps(p: Program) -> list[_Gap]:
    n = len(p.steps)
    before = {late: first for first, late in p.handed.items()}
    born = {(k, event) for event, here in enumerate(p.born) for k in here}
    found = []
    for k, b in enumerate(p.blocks):
        if b.stays or not b.size or not b.touches:
            continue
        changes = sorted(b.writes if b.held else b.writes | {b.touches[0]})
        ends = [(k, number, end) for number, end in enumerate(b.touches)][1:]
        if k in before:  # in the next pass it is the block that it takes the place of
            ends.append((before[k], 0, n + p.blocks[before[k]].touches[0]))
        elif b.held and k not in p.handed:
            ends.append((k, 0, n + b.touches[0]))
        for begin, (owner, number, end) in zip(b.touches, ends, strict=False):
            if (owner, end % n) in born:
                continue  # it has died in between
            earlier = bisect_right(changes, begin)
            changed = changes[earlier - 1] if earlier else changes[-1] - n if changes else begin
            found.append(_Gap((owner, number), b.size, max(changed, begin - n), begin, end, bool(changes)))
    return found


def _levels(p: Program) -> NDArray[np.int64]:
    """Bytes that are there during each event if nothing leaves."""
    born = np.array([sum(p.blocks[k].size for k in here) for here in p.born], dtype=np.int64)
    died = np.array([sum(p.blocks[k].size for k in here) for here in p.died], dtype=np.int64)
    held = sum(b.size for b in p.blocks if b.held)
    return held + np.cumsum(born) - np.concatenate(([0], np.cumsum(died)[:-1]))


class _Lane:
    """Seconds of one way of the link that are free during each event."""

    def __init__(self, seconds: NDArray[np.float64]) -> None:
        self.n = len(seconds)
        self.free = seconds.copy()

    def sums(self) -> NDArray[np.float64]:
        """Entry n + k: the free seconds from event -n up to event k, of three passes."""
        return np.concatenate(([0.0], np.cumsum(np.tile(self.free, 3))))

    def take(self, events: range, seconds: float) -> tuple[int, float]:
        """Takes free seconds of the events in turn. Returns the last of them that it needed, and the seconds that lack."""
        if not events:
            return events.start, seconds
        where = np.arange(events.start, events.stop, events.step) % self.n
        until = np.cumsum(self.free[where])
        last = int(np.searchsorted(until, seconds))
        if last == len(where):
            self.free[where] = 0.0
            return events[-1], seconds - float(until[-1])
        self.free[where[last]] = until[last] - seconds
        self.free[where[:last]] = 0.0
        return events[last], 0.0


class _Choice:
    """The blocks that leave, one after the other.

    Attributes:
        short: per event, the bytes that are still too many.
        out: the gaps so far.
    """

    def __init__(self, p: Program, budget_bytes: int, link: TierLink, seconds: NDArray[np.float64]) -> None:
        self.gaps = _gaps(p)
        self.n, self.total = len(seconds), max(float(seconds.sum()), 1e-30)
        self.reads = _Lane(seconds)
        self.writes = self.reads if link.shared else _Lane(seconds)
        self.short = _levels(p) - budget_bytes
        self.out: dict[Gap, int] = {}
        self.size = np.array([g.size for g in self.gaps], dtype=np.int64)
        self.begin, self.end = (
            np.array([getattr(g, at) for g in self.gaps], dtype=np.int64) for at in ("begin", "end")
        )
        self.changed = np.array([g.changed for g in self.gaps], dtype=np.int64)
        moves = np.array([g.moves for g in self.gaps], dtype=bool)
        self.write = moves * (link.latency_seconds + self.size / link.write_bytes_per_second)
        self.read = link.latency_seconds + self.size / link.read_bytes_per_second
        self.left = np.ones(len(self.gaps), dtype=bool)
        self.copies: dict[tuple[int, int], list[int]] = {}  # the gaps for which one write will do
        for i, g in enumerate(self.gaps):
            self.copies.setdefault((g.name[0], g.changed), []).append(i)

    def best(self, event: int) -> tuple[int, int] | None:
        """The gap that gives the event room at the least cost, and the event's number in the pass of the gap."""
        at = np.where((self.begin < event) & (event < self.end), event, event + self.n)
        may = np.flatnonzero(self.left & (self.begin < at) & (at < self.end))
        if not may.size:
            return None
        here, into, out = at[may], self.reads.sums(), self.writes.sums()
        before = out[self.n + here] - out[self.n + self.changed[may] + 1]
        after = into[self.n + self.end[may]] - into[self.n + here + 1]
        late = np.maximum(self.write[may] - before, 0.0) + np.maximum(self.read[may] - after, 0.0)
        tie = _TIE * (1.0 - 0.5 * _EASY * (before + after) / self.total)
        cost = (late + tie * (self.write[may] + self.read[may])) / np.minimum(self.size[may], self.short[event])
        found = int(cost.argmin())
        return int(may[found]), int(here[found])

    def leave(self, i: int, event: int) -> None:
        """Takes the link's seconds for the copies of a gap, as far from the event as they are free."""
        n, begin, end = self.n, int(self.begin[i]), int(self.end[i])
        self.left[i] = False
        self.out[self.gaps[i].name] = int(self.changed[i]) % n
        written = begin
        if self.write[i]:
            written, late = self.writes.take(range(int(self.changed[i]) + 1, event), float(self.write[i]))
            if self.reads is not self.writes:
                self.reads.free[(event - 1) % n] += late  # a wait for a write is time for reads, and the reverse
        back, late = self.reads.take(range(end - 1, event, -1), float(self.read[i]))
        if self.reads is not self.writes:
            self.writes.free[(event + 1) % n] += late
        first, last = min(max(written, begin) + 1, event), max(back, event + 1)
        self.short[first : min(last, n)] -= self.size[i]
        self.short[max(first - n, 0) : max(last - n, 0)] -= self.size[i]
        for same in self.copies[self.gaps[i].name[0], self.gaps[i].changed]:
            self.write[same] = 0.0


def chosen(p: Program, budget_bytes: int, link: TierLink, seconds: Sequence[float] | None = None) -> dict[Gap, int]:
    """The gaps in which a block is absent so that the others fit, and per gap the event that has changed the block last.

    Args:
        p: the pass.
        budget_bytes: most bytes resident.
        link: the tier. Both ways of a shared one take the same seconds.
        seconds: how long each event takes with its waits, as far as that is known; None: without any.

    Returns:
        Each gap that helps, if all of them do not suffice.
    """
    choice = _Choice(p, budget_bytes, link, np.array(p.seconds if seconds is None else seconds))
    while len(choice.short):
        event = int(choice.short.argmax())
        if choice.short[event] <= 0:
            break
        found = choice.best(event)
        if found is None:
            choice.short[event] = 0  # nothing more can be done for it
        else:
            choice.leave(*found)
    return choice.out
