"""Plans for passes that repeat: which blocks are evicted between two touches, when they are written and when they are
read back.

Parameters and optimizer states are touched in the same order in every pass, so evictions and reads form a cycle.
`paged` simulates passes one after the other with full knowledge of them. Whenever the link is idle, it reads the absent
block that is touched next into the room of the block that is touched last (Cao, Felten, Karlin, Li: A study of
integrated prefetching and caching strategies, SIGMETRICS 1995). The room may be that of any block (their *aggressive*:
never idle, but it moves more than necessary), or only that of blocks which Belady's choice, made on demand with a part
of the budget, evicts anyway (their *conservative*; the other part is for prefetched blocks). A block that was changed
since its copy was made is written first. Where ops will need the room before that touch, no read begins. A pass that
ends as it began is the plan; the shortest one counts.

Recomputation is decided before: the program is any schedule of computes, recomputes and frees, and the storages that it
holds are paged.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

import numpy as np

from memmgr.policies.simulate.cycle import ABSENT, FAR, MOST_PASSES, RESIDENT, Cycle, Full, Paged, settled
from memmgr.policies.trace import TierLink, Trace
from memmgr.policies.trace.blocks import Program, plain, program_of, spent
from memmgr.policies.trace.schedule import Step

_RESERVES = (0.1, 0.25, 0.5)
"""The share of the budget for prefetched blocks, where only Belady's choice is evicted."""

_MANY = 4_000
"""Events from which on one of them has to do, and none where the first way is good enough."""

_AHEAD = 0.05
"""The share of a pass for which ops and the link should find room without waiting for a write."""

_LOOKED_AT = 8
"""Blocks, for one that should be written before its room is needed."""

_STRETCHES = 16
"""Beginnings that the bound looks at."""


_Gap = tuple[int, int]
"""A block, and the number of the touch that ends the gap."""


class _Pager(Cycle):
    """The victim is the block touched last. The link is never idle, or reads only into the room of Belady's victims."""

    def __init__(self, p: Program, budget_bytes: int, link: TierLink, may_leave: set[_Gap] | None = None) -> None:
        super().__init__(p, budget_bytes, link)
        self.may_leave = may_leave
        self.left: set[_Gap] = set()  # in the pass that was played last
        self.eager = True  # whether anything moves before it has to
        self.missing = [(self.next[k], k) for k, state in enumerate(self.state) if state == ABSENT]
        heapify(self.missing)
        self.away = sum(p.blocks[k].size for _, k in self.missing)  # bytes
        self.brought = int(_AHEAD * sum(p.seconds) * self.rates[0])  # bytes
        self.leaving: list[tuple[int, int]] = []
        self.staying: list[tuple[int, int]] = []  # leave where nothing else can
        starts = np.concatenate(([0.0], np.cumsum(p.seconds * 2)))
        self.soon = np.searchsorted(starts, starts[: self.n] + _AHEAD * starts[self.n]).tolist()
        self.starts: list[float] = starts.tolist()

    def play(self) -> None:
        self.left = set()
        super().play()

    def after(self, event: int) -> None:
        for k in self.p.touched[event]:
            if self.state[k] == RESIDENT and not self.p.blocks[k].stays:
                self._line_up(k)

    def read(self, k: int, begin: float, event: int) -> None:
        super().read(k, begin, event)
        self.away -= self.p.blocks[k].size
        self._line_up(k)

    def leave(self, k: int, event: int) -> None:
        super().leave(k, event)
        self.left.add(self._gap(k))
        if self.next[k] < FAR:
            self.away += self.p.blocks[k].size
            heappush(self.missing, (self.next[k], k))

    def hand_over(self, first: int, late: int) -> None:
        super().hand_over(first, late)
        if self.state[first] == RESIDENT:
            self._line_up(first)
        else:
            heappush(self.missing, (self.next[first], first))

    def _gap(self, k: int) -> _Gap:
        return (self.first.get(k, k) if self.touch[k] == 0 else k), self.touch[k]

    def _line_up(self, k: int) -> None:
        may = self.may_leave is None or self._gap(k) in self.may_leave
        heappush(self.leaving if may else self.staying, (-self.next[k], k))

    def _unneeded(self, k: int) -> bool:
        """Nothing touches it any more, and it needs no copy: were it touched, its op would run again."""
        return self.next[k] == FAR and self.p.blocks[k].again

    def _last(self, use: int, line: list[tuple[int, int]] | None = None) -> int | None:
        """The block, among those that can be evicted, whose next touch is last and after `use`."""
        line = self.leaving if line is None else line
        waiting = []
        found = None
        while line:
            far, k = line[0]
            if self.state[k] != RESIDENT or self.next[k] != -far:
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

    def make_room(self, size: int, event: int) -> None:
        """Evicts until `size` bytes are free, now and at any cost."""
        while self.used + size > self.budget:
            k = self._last(self.base + event)
            if k is None:
                k = self._last(self.base + event, self.staying)
            if k is None:
                raise Full
            if not self._unneeded(k):
                if self.dirty[k]:
                    self.write(k, event)
                self.now = max(self.now, self.done_at[k])
            self.leave(k, event)

    def ahead(self, event: int, until: float) -> None:
        """Begins transfers while the op runs, which ends at `until`."""
        reads, writes = self.lanes
        while self.eager and min(self.free_at[reads], self.free_at[writes]) < until:
            while self.missing:
                use, k = self.missing[0]
                if self.state[k] == ABSENT and self.next[k] == use:
                    break
                heappop(self.missing)
            if self.missing and self.free_at[reads] < until:
                room = self.p.blocks[k].size + self.growth(event, use - self.base)
                cleared, again = self._clear(room, use, event, until)
                if cleared:
                    heappop(self.missing)
                    self.read(k, self.now, event)
                if again:
                    continue
            soon = self.soon[event]
            coming = min(self.away, self.brought)
            if not self._written_soon(self.growth(event, soon) + coming, self.base + soon, event, until):
                return

    def _clear(self, size: int, use: int, event: int, until: float) -> tuple[bool, bool]:
        """Evicts blocks that are touched after `use`. Returns if there is room now, and if the link may be asked again.
        A block whose write has not ended stays, since ops would wait for it.
        """
        while self.used + size > self.budget:
            k = self._last(use)
            if k is None:
                return False, False
            if not self._unneeded(k):
                if self.dirty[k]:
                    if self.free_at[self.lanes[1]] >= until or self._touched_before_written(k, event):
                        return False, False
                    self.write(k, event)
                    return False, self.free_at[self.lanes[0]] < until
                if self.done_at[k] > self.now:
                    return False, False
            self.leave(k, event)
        return True, True

    def _touched_before_written(self, k: int, event: int) -> bool:
        """Tells if a copy begun now would not have ended by the next touch: it would be in vain if that touch changes
        the block.
        """
        touched = min(self.next[k] - self.base, len(self.starts) - 1)
        wait = max(self.free_at[self.lanes[1]] - self.now, 0.0) + self.latency
        return self.starts[touched] - self.starts[event] < wait + self.p.blocks[k].size / self.rates[1]

    def _written_soon(self, size: int, use: int, event: int, until: float) -> bool:
        """Begins to write blocks that must be evicted for `size` bytes. False: there is none to write."""
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
                found = not self._touched_before_written(k, event)
                if found:
                    self.write(k, event)
                break
            short -= self.p.blocks[k].size
            passed.append(heappop(self.leaving))
        for entry in passed:
            heappush(self.leaving, entry)
        return found


def paged(
    trace: Trace, budget_bytes: int, link: TierLink, program: Iterable[Step] | None = None, enough: float = 0.0
) -> Paged | None:
    """The pass of a cycle that pages the storages of a program; None: it does not fit.

    Args:
        trace: a measured pass, with its cycle.
        budget_bytes: most bytes resident at any time.
        link: the tier.
        program: computes, recomputes and frees; None: the trace's own.
        enough: seconds that are good enough.
    """
    p = program_of(trace, plain(trace) if program is None else program)
    found = [settled(_Pager(p, budget_bytes, link))]
    many, first = len(p.steps) >= _MANY, found[0]
    if many and first is not None and first.seconds <= enough:
        return first
    for reserve in _RESERVES[:1] if many else _RESERVES:
        belady = _Pager(p, int(budget_bytes * (1 - reserve)), link)
        belady.eager = False
        try:
            for _ in range(MOST_PASSES // 2):
                belady.play()
        except Full:
            continue
        found.append(settled(_Pager(p, budget_bytes, link, belady.left)))
    return min((one for one in found if one is not None), key=lambda one: one.seconds, default=None)


def least_seconds(trace: Trace, budget_bytes: int, link: TierLink) -> float:
    """A lower bound on a pass of a cycle: the trace's own time, plus the worst excess of traffic over compute in a
    stretch of ops.

    A stretch touches D bytes that come from before it, of which at most M, the budget, are resident when it begins. It
    changes W bytes that live on after it, of which at most M are resident when it ends. So D - M bytes are read and W -
    M are written during it. In a training the optimizer's step is the worst such stretch. Where copies take time from
    the cores that compute, the ops take longer by that. Storages that may be recomputed are left out.
    """
    p = program_of(trace, plain(trace))
    n = len(p.steps)
    touched = [[k for k in here if p.blocks[k].held] for here in p.touched]
    over = spent(p)
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
            for k in over[event] & changed:
                changed.remove(k)
                out -= p.blocks[k].size
            coming, going = max(into - budget_bytes, 0), max(out - budget_bytes, 0)
            reads, writes = coming / link.read_bytes_per_second, going / link.write_bytes_per_second
            moving = reads + writes if link.shared else max(reads, writes)
            worst = max(worst, moving - seconds, (coming + going) * link.cpu_seconds_per_byte)
    return sum(p.seconds) + worst
