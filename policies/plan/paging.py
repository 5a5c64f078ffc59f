"""Plans for passes that repeat: which blocks leave between two touches, when they are written and when they are read back.

Parameters and optimizer states are touched in the same order in every pass, so what leaves and comes back is a cycle.
`paged` plays passes one after the other with what is known of all of them: the link, whenever it is idle, brings in what is
missing and touched next, in the room of what is touched last (Cao, Felten, Karlin, Li: A study of integrated prefetching and
caching strategies, SIGMETRICS 1995). Either of anything (their *aggressive*: never idle, but it moves more than it has to),
or only of what Belady's choice, made on demand with a part of the budget, lets go anyway (their *conservative*; the other
part is for what is brought in early). What was changed since its copy was made is written first. Where ops will need the room
before that touch, nothing is brought in. A pass that ends as it began is the plan; the shortest of all ways counts.

What runs again is decided before: the program is any schedule of computes, recomputes and frees, and what it holds is paged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np

from memmgr.policies.trace import TierLink, Trace
from memmgr.policies.trace.schedule import Do, Step

from .blocks import Program, plain, program_of, steps_of

_MOST_PASSES = 6
"""The first begins with nothing in memory; most end as they began from the second on, and one in a hundred by `return_to`."""

_RESERVES = (0.1, 0.25, 0.5)
"""Of the budget, what is for bytes that come early, where only Belady's choice leaves."""

_MANY = 4_000
"""Events from which on one of them has to do."""

_AHEAD = 0.05
"""Of a pass: what ops will make in so much time should find room without waiting for a write."""

_LOOKED_AT = 32
"""Blocks, for one that should be written before its room is needed."""

_STRETCHES = 48
"""Beginnings that the bound looks at."""


@dataclass(frozen=True)
class Paged:
    """A pass that ends as it began.

    Attributes:
        steps: what is done.
        away: constants that are below, and not resident, when it begins.
        clean: constants that are resident then and have a copy below.
        seconds: what it takes, waits included.
        peak_bytes: most bytes resident.
        written_bytes: to the tier.
        read_bytes: back.
    """

    steps: tuple[Step, ...]
    away: tuple[int, ...]
    clean: tuple[int, ...]
    seconds: float
    peak_bytes: int
    written_bytes: int
    read_bytes: int


class _Full(Exception):
    """Nothing can leave."""


_Gap = tuple[int, int]
"""A block, and the number of the touch that ends the gap."""

_ABSENT, _RESIDENT, _UNBORN = range(3)
_FAR = 1 << 60


class _Pager:
    """Memory, link and clock of passes that are played one after the other.

    Times are seconds, an event of the pass that is played has the number `base + event`.
    """

    def __init__(self, p: Program, budget_bytes: int, link: TierLink, may_leave: set[_Gap] | None = None) -> None:
        self.p, self.budget, self.n = p, budget_bytes, len(p.steps)
        self.first = {late: first for first, late in p.handed.items()}
        self.may_leave = may_leave
        self.left: set[_Gap] = set()
        self.rates = (link.read_bytes_per_second, link.write_bytes_per_second)
        self.latency = link.latency_seconds
        self.cpu = link.cpu_seconds_per_byte
        self.slowed = 0.0  # what copies take of the op that runs
        self.lanes = (0, 0) if link.shared else (0, 1)  # of reads, of writes
        self.free_at = [0.0, 0.0]  # by lane
        self.now = 0.0
        self.base = self.used = self.peak = 0
        n = len(p.blocks)
        self.state = [_UNBORN] * n
        self.dirty = [False] * n
        self.reading = [False] * n
        self.done_at = [0.0] * n  # of the copy that was begun last
        self.touch = [0] * n  # which of its touches comes next
        self.next = [_FAR] * n  # and when
        self.missing: list[tuple[int, int]] = []
        self.leaving: list[tuple[int, int]] = []
        self.staying: list[tuple[int, int]] = []  # leave where nothing else can
        for k, b in enumerate(p.blocks):
            if b.held:
                self.next[k] = b.touches[0]
                self.state[k] = _RESIDENT if b.stays else _ABSENT
                if b.stays:
                    self.used += b.size
                else:
                    heappush(self.missing, (self.next[k], k))
        made = np.array([sum(p.blocks[k].size for k in born) for born in p.born] * 2, dtype=np.int64)
        lost = np.array([sum(p.blocks[k].size for k in died) for died in p.died] * 2, dtype=np.int64)
        self.after = np.cumsum(made) - np.cumsum(lost)  # what ops have made and not let go of, after each
        self.during = self.after + lost
        starts = np.concatenate(([0.0], np.cumsum(p.seconds * 2)))
        self.soon = np.searchsorted(starts, starts[: self.n] + _AHEAD * starts[self.n]).tolist()
        self.done: list[tuple[int, Do, int]] = []

    # ---- one pass --------------------------------------------------------------------------------------------------

    def play(self, *, ahead: bool = True) -> None:
        """One pass; `done` is what was done in it, (before which event, what, block), `left` the gaps in which blocks left.

        Args:
            ahead: whether anything moves before it has to.
        """
        p = self.p
        self.done, self.left = [], set()
        if self.base:
            self._hand_over()
        for event, (touched, born) in enumerate(zip(p.touched, p.born, strict=True)):
            at = self.base + event
            self._make_room(sum(p.blocks[k].size for k in born), event)
            for k in born:
                self.state[k], self.dirty[k], self.next[k] = _RESIDENT, True, at
                self._take(k)
            for k in touched:
                if self.state[k] == _ABSENT:
                    self._make_room(p.blocks[k].size, event)
                    self._read(k, self.now, event)
            for k in touched:
                if self.reading[k]:
                    self.now = max(self.now, self.done_at[k])
                    self.reading[k] = False
            if ahead:
                self._ahead(event, self.now + p.seconds[event])
            self.now += p.seconds[event] + self.slowed
            self.slowed = 0.0
            for k in touched:
                b = p.blocks[k]
                if event in b.writes:
                    self.dirty[k] = True
                self.touch[k] += 1
                if self.touch[k] < len(b.touches):
                    self.next[k] = self.base + b.touches[self.touch[k]]
                else:
                    self.touch[k] = 0
                    self.next[k] = self._next_pass(k)
            for k in p.died[event]:
                if self.state[k] == _RESIDENT:
                    self.used -= p.blocks[k].size
                self.state[k], self.dirty[k] = _UNBORN, False
            for k in touched:
                if self.state[k] == _RESIDENT and not p.blocks[k].stays:
                    self._line_up(k)
        self.base += self.n

    def _next_pass(self, k: int) -> int:
        """When it is touched next, after its last touch of a pass."""
        b = self.p.blocks[self.first.get(k, k)]
        return self.base + self.n + b.touches[0] if b.held and k not in self.p.handed else _FAR

    def _hand_over(self) -> None:
        """A pass begins, and what took something's place at the end of the one before is that thing."""
        columns: tuple[list[Any], ...] = (self.state, self.dirty, self.reading, self.done_at, self.next)
        for first, late in self.p.handed.items():
            for column in columns:
                column[first] = column[late]
            self.touch[first] = 0
            self.state[late], self.dirty[late], self.reading[late], self.next[late] = _UNBORN, False, False, _FAR
            if self.state[first] == _RESIDENT:
                self._line_up(first)
            else:
                heappush(self.missing, (self.next[first], first))

    def _now(self, k: int) -> int:
        """The block that is in the place of one that passes begin with, between two passes."""
        return self.p.handed.get(k, k) if self.base else k

    def held(self) -> dict[int, tuple[int, bool]]:
        """What lives from one pass to the next: where it is, and whether it was changed since its copy was made."""
        held = ((k, self._now(k)) for k, b in enumerate(self.p.blocks) if b.held)
        return {k: (self.state[now], self.dirty[now]) for k, now in held}

    def return_to(self, began: dict[int, tuple[int, bool]]) -> None:
        """At the end of a pass that others would follow in turns: all is where it was when it began."""
        then = [(self._now(k), state, dirty) for k, (state, dirty) in began.items()]
        for k, state, dirty in then:
            if self.state[k] == _RESIDENT and self.dirty[k] and not dirty:
                self._write(k, self.n)
            if self.state[k] == _RESIDENT and state == _ABSENT:
                self._leave(k, self.n)
        for k, state, _ in then:
            if self.state[k] == _ABSENT and state == _RESIDENT:
                self._read(k, self.now, self.n)
        self.now = max(self.now, *self.free_at)

    # ---- what moves ------------------------------------------------------------------------------------------------

    def _gap(self, k: int) -> _Gap:
        return (self.first.get(k, k) if self.touch[k] == 0 else k), self.touch[k]

    def _line_up(self, k: int) -> None:
        may = self.may_leave is None or self._gap(k) in self.may_leave
        heappush(self.leaving if may else self.staying, (-self.next[k], k))

    def _take(self, k: int) -> None:
        self.used += self.p.blocks[k].size
        self.peak = max(self.peak, self.used)

    def _copy(self, k: int, do: Do, begin: float, event: int) -> None:
        lane, rate = (self.lanes[0], self.rates[0]) if do is Do.RELOAD else (self.lanes[1], self.rates[1])
        begin = max(begin, self.free_at[lane], self.done_at[k])
        self.done_at[k] = self.free_at[lane] = begin + self.latency + self.p.blocks[k].size / rate
        self.slowed += self.p.blocks[k].size * self.cpu
        self.done.append((event, do, k))

    def _read(self, k: int, begin: float, event: int) -> None:
        self._copy(k, Do.RELOAD, begin, event)
        self.state[k], self.reading[k] = _RESIDENT, True
        self._take(k)
        self._line_up(k)

    def _write(self, k: int, event: int) -> None:
        self._copy(k, Do.OFFLOAD, self.now, event)
        self.dirty[k] = False

    def _leave(self, k: int, event: int) -> None:
        self.state[k] = _ABSENT
        self.left.add(self._gap(k))
        self.used -= self.p.blocks[k].size
        self.done.append((event, Do.FREE, k))
        if self.next[k] < _FAR:
            heappush(self.missing, (self.next[k], k))

    def _unneeded(self, k: int) -> bool:
        """Nothing touches it any more, and it needs no copy: were it touched, its op would run again."""
        return self.next[k] == _FAR and self.p.blocks[k].again

    def _last(self, use: int, line: list[tuple[int, int]] | None = None) -> int | None:
        """What is touched last, and after `use`, of what can leave."""
        line = self.leaving if line is None else line
        waiting = []
        found = None
        while line:
            far, k = line[0]
            if self.state[k] != _RESIDENT or self.next[k] != -far:
                heappop(line)
            elif -far <= use:
                break
            elif self.reading[k] and self.done_at[k] > self.now:
                waiting.append(heappop(line))
            else:
                found = k
                break
        for entry in waiting:
            heappush(line, entry)
        return found

    def _make_room(self, size: int, event: int) -> None:
        """At once, whatever it takes."""
        while self.used + size > self.budget:
            k = self._last(self.base + event)
            if k is None:
                k = self._last(self.base + event, self.staying)
            if k is None:
                raise _Full
            if not self._unneeded(k):
                if self.dirty[k]:
                    self._write(k, event)
                self.now = max(self.now, self.done_at[k])
            self._leave(k, event)

    def _growth(self, event: int, until: int) -> int:
        """Most bytes that ops after `event` have made on top of what is there, before event `until`."""
        until = min(until, event + self.n)
        return max(int(self.during[event + 1 : until].max(initial=0)) - int(self.after[event]), 0)

    def _ahead(self, event: int, until: float) -> None:
        """What the link begins while the op runs, which ends at `until`."""
        reads, writes = self.lanes
        while min(self.free_at[reads], self.free_at[writes]) < until:
            while self.missing:
                use, k = self.missing[0]
                if self.state[k] == _ABSENT and self.next[k] == use:
                    break
                heappop(self.missing)
            if self.missing and self.free_at[reads] < until:
                room = self.p.blocks[k].size + self._growth(event, use - self.base)
                began, when = self._clear(room, use, event, until)
                if when is not None:
                    heappop(self.missing)
                    self._read(k, max(when, self.now), event)
                    continue
                if began:
                    continue
            soon = self.soon[event]
            if not self._written_soon(self._growth(event, soon), self.base + soon, event, until):
                return

    def _clear(self, size: int, use: int, event: int, until: float) -> tuple[bool, float | None]:
        """Lets go of what is touched after `use`. Whether a write was begun for it, and when there is room, if there is."""
        when = 0.0
        while self.used + size > self.budget:
            k = self._last(use)
            if k is None:
                return False, None
            if not self._unneeded(k):
                if self.dirty[k]:
                    if self.free_at[self.lanes[1]] >= until:
                        return False, None
                    self._write(k, event)
                    if self.lanes[0] == self.lanes[1] and self.free_at[0] >= until:
                        return True, None
                when = max(when, self.done_at[k])
            self._leave(k, event)
        return False, when

    def _written_soon(self, size: int, use: int, event: int, until: float) -> bool:
        """Begins to write what will have to leave for `size` bytes; False: there is nothing to write."""
        if self.free_at[self.lanes[1]] >= until:
            return False
        short = self.used + size - self.budget
        passed: list[tuple[int, int]] = []
        found = False
        while short > 0 and len(passed) < _LOOKED_AT:
            k = self._last(use)
            if k is None:
                break
            if self.dirty[k] and not self._unneeded(k):
                self._write(k, event)
                found = True
                break
            short -= self.p.blocks[k].size
            passed.append(heappop(self.leaving))
        for entry in passed:
            heappush(self.leaving, entry)
        return found


def paged(trace: Trace, budget_bytes: int, link: TierLink, program: Iterable[Step] | None = None) -> Paged | None:
    """The pass of a cycle that pages what a program holds; None: it does not fit.

    Args:
        trace: a measured pass, with its cycle.
        budget_bytes: most bytes resident at any time.
        link: the tier.
        program: computes, recomputes and frees; None: the trace's own.
    """
    p = program_of(trace, plain(trace) if program is None else program)
    found = [_settled(p, budget_bytes, link, None)]
    for reserve in _RESERVES if len(p.steps) < _MANY else _RESERVES[:1]:
        belady = _Pager(p, int(budget_bytes * (1 - reserve)), link)
        try:
            for _ in range(_MOST_PASSES // 2):
                belady.play(ahead=False)
        except _Full:
            continue
        found.append(_settled(p, budget_bytes, link, belady.left))
    return min((one for one in found if one is not None), key=lambda one: one.seconds, default=None)


def _settled(p: Program, budget_bytes: int, link: TierLink, may_leave: set[_Gap] | None) -> Paged | None:
    """The pass that ends as it began."""
    pager = _Pager(p, budget_bytes, link, may_leave)
    try:
        for _ in range(_MOST_PASSES):
            begun, began = pager.now, pager.held()
            pager.peak = pager.used
            pager.play()
            if pager.held() == began:
                break
        else:
            pager.return_to(began)
    except _Full:
        return None
    away = tuple(sorted(s for s, k in p.begins.items() if began[k] == (_ABSENT, False)))
    clean = tuple(sorted(s for s, k in p.begins.items() if began[k] == (_RESIDENT, False) and not p.blocks[k].stays))
    moved = {do: sum(p.blocks[k].size for _, d, k in pager.done if d is do) for do in (Do.OFFLOAD, Do.RELOAD)}
    return Paged(
        tuple(steps_of(p, pager.done)), away, clean, pager.now - begun, pager.peak, moved[Do.OFFLOAD], moved[Do.RELOAD]
    )


def least_seconds(trace: Trace, budget_bytes: int, link: TierLink) -> float:
    """No pass of a cycle takes less: what the trace takes, and the worst stretch of ops whose traffic does not fit beside it.

    A stretch touches D bytes that come from before it, of which the budget's at most are resident when it begins, and changes
    W bytes that go on after it, of which the budget's at most are resident when it ends: D - M come in and W - M go out
    meanwhile (the step of an optimizer is the worst such stretch of a training). What may run again is left out.
    """
    p = program_of(trace, plain(trace))
    n = len(p.steps)
    touched = [[k for k in here if p.blocks[k].held] for here in p.touched]
    ends = [set(died) for died in p.died]
    begins = [event for event, here in enumerate(touched) if here]
    worst = 0.0
    for first in begins[:: max(len(begins) // _STRETCHES, 1)]:
        met: set[int] = set()
        changed: set[int] = set()
        into = out = 0
        seconds = 0.0
        for event in (*range(first, n), *range(first)):
            seconds += p.seconds[event]
            for k in touched[event]:
                size = p.blocks[k].size
                if k not in met:
                    met.add(k)
                    into += 0 if k in p.born[event] else size
                if k not in changed and (event in p.blocks[k].writes or k in p.born[event]):
                    changed.add(k)
                    out += size
            for k in ends[event] & changed:
                changed.remove(k)
                out -= p.blocks[k].size
            coming = max(into - budget_bytes, 0) / link.read_bytes_per_second
            going = max(out - budget_bytes, 0) / link.write_bytes_per_second
            moving = coming + going if link.shared else max(coming, going)
            worst = max(worst, moving - seconds)
    return sum(p.seconds) + worst
