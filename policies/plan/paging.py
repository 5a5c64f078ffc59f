"""Plans for passes that repeat: the blocks that are evicted between two touches, and the times of their writes and reads.

Parameters and optimizer states are touched in the same order in every pass, so evictions and reads form a cycle.
`paged` simulates passes one after the other with full knowledge of them. The blocks that leave are chosen by the time that
the link has for their copies (windows.py). Such a block is written once the link is free after its last change, it leaves when
its room is needed, and it is read back as soon as there is room for it until its touch: whenever the link is idle, the absent
block that is touched next (Cao, Felten, Karlin, Li: A study of integrated prefetching and caching strategies, SIGMETRICS 1995,
whose *aggressive* also evicts the block that is touched last, so that it moves more than necessary). A pass that ends as it
began is the plan. The waits of a pass are time for copies, so blocks are chosen again with them, and the shortest pass counts.
A block that turned out to stay in memory is not written: the pass is played once more without it.

Recomputation is decided before: the program is any schedule of computes, recomputes and frees, and the storages that it
holds are paged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush

from memmgr.policies.simulate.cycle import ABSENT, FAR, RESIDENT, Cycle, Full, Paged, settled
from memmgr.policies.trace import TierLink, Trace
from memmgr.policies.trace.blocks import Program, plain, program_of, spent
from memmgr.policies.trace.schedule import Step

from .windows import Gap, chosen

_ROUNDS = 3
"""How often blocks are chosen, while that makes the pass shorter."""

MANY = 4_000
"""Events of a long pass, for which blocks are chosen once: each choice looks at all of them."""

_GAIN = 0.995
"""Choosing again has been worth it if the pass takes at most this share of the time before."""

_SAME = 1.001
"""A pass that writes less may take this much longer."""

_STRETCHES = 16
"""Beginnings that the bound looks at."""


class _Pager(Cycle):
    """Plays a pass in which the blocks of certain gaps are evicted. The link is busy as long as one of them has to be written,
    or as an absent one fits.

    Attributes:
        gaps: see `windows.chosen`.
        took: per event of the pass that was played last, its seconds with all waits.
        left: the gaps in which blocks were evicted in that pass.
    """

    def __init__(self, p: Program, budget_bytes: int, link: TierLink, gaps: Mapping[Gap, int]) -> None:
        super().__init__(p, budget_bytes, link)
        self.gaps = gaps
        self.changed: dict[int, list[int]] = {}  # by event, the blocks that it changes last before they leave
        for (k, touch), event in gaps.items():
            self.changed.setdefault(event, []).append(k if touch else p.handed.get(k, k))
        self.to_write: deque[int] = deque()
        self.took: list[float] = []
        self.left: set[Gap] = set()
        self.ended = 0.0
        self.missing = [(self.next[k], k) for k, state in enumerate(self.state) if state == ABSENT]
        heapify(self.missing)
        # Resident blocks by (- next touch, block): those of gaps with a whole copy, those of gaps without one, and the others,
        # which leave where nothing else can. An entry that is no longer true is skipped.
        self.copied: list[tuple[int, int]] = []
        self.changing: list[tuple[int, int]] = []
        self.staying: list[tuple[int, int]] = []
        # Blocks of gaps whose copy is under way: (its end, - next touch, block).
        self.written: list[tuple[float, int, int]] = []

    def play(self) -> None:
        self.took, self.left, self.ended = [], set(), self.now
        super().play()

    def after(self, event: int) -> None:
        for k in self.p.touched[event]:
            if self.state[k] == RESIDENT and not self.p.blocks[k].stays:
                self._line_up(k)
        self.to_write.extend(self.changed.get(event, ()))
        self.took.append(self.now - self.ended)
        self.ended = self.now

    def read(self, k: int, begin: float, event: int) -> None:
        super().read(k, begin, event)
        self._line_up(k)

    def write(self, k: int, event: int) -> None:
        super().write(k, event)
        self._line_up(k)

    def leave(self, k: int, event: int) -> None:
        self.left.add(self._gap(k))
        super().leave(k, event)
        if self.next[k] < FAR:
            heappush(self.missing, (self.next[k], k))

    def hand_over(self, first: int, late: int) -> None:
        super().hand_over(first, late)
        if self.state[first] == RESIDENT:
            self._line_up(first)
        else:
            heappush(self.missing, (self.next[first], first))

    def _gap(self, k: int) -> Gap:
        return (self.first.get(k, k) if self.touch[k] == 0 else k), self.touch[k]

    def _line_up(self, k: int) -> None:
        if self._gap(k) not in self.gaps:
            heappush(self.staying, (-self.next[k], k))
        elif self._has_to_be_written(k):
            heappush(self.changing, (-self.next[k], k))
        elif self.done_at[k] > self.now:
            heappush(self.written, (self.done_at[k], -self.next[k], k))
        else:
            heappush(self.copied, (-self.next[k], k))

    def _unneeded(self, k: int) -> bool:
        """Nothing touches it any more, and it needs no copy: were it touched, its op would run again."""
        return self.next[k] == FAR and self.p.blocks[k].again

    def _first_written(self, use: int) -> int | None:
        """The block of a gap that can leave first, and is touched after `use`; the one that is touched last, of several."""
        while self.written and self.written[0][0] <= self.now:
            _, far, k = heappop(self.written)
            if self._is_there(far, k) and not self._has_to_be_written(k):
                heappush(self.copied, (far, k))
        found = self._last(use, self.copied, False)
        if found is not None:
            return found
        under_way = [
            (end, far, k)
            for end, far, k in self.written
            if -far > use and self._is_there(far, k) and not self.reading[k] and not self.dirty[k]
        ]
        return min(under_way)[2] if under_way else self._last(use, self.changing, True)

    def _is_there(self, far: int, k: int) -> bool:
        return self.state[k] == RESIDENT and self.next[k] == -far

    def _has_to_be_written(self, k: int) -> bool:
        return self.dirty[k] and not self._unneeded(k)

    def _last(self, use: int, line: list[tuple[int, int]], without_copy: bool | None = None) -> int | None:
        """The block in line whose next touch is last and after `use`.

        Args:
            without_copy: whether it has to be written before it leaves; None: either.
        """
        waiting = []
        found = None
        while line:
            far, k = line[0]
            if not self._is_there(far, k) or without_copy not in (None, self._has_to_be_written(k)):
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
            k = self._first_written(self.base + event)
            if k is None:
                k = self._last(self.base + event, self.staying)
            if k is None:
                raise Full
            if not self._unneeded(k):
                if self.dirty[k]:
                    self.write(k, event)
                self.now = max(self.now, self.done_at[k])
            self.leave(k, event)

    def ready(self, event: int, wanted: Iterable[int]) -> float:
        """When the event can begin: the writes of the blocks that it changes have ended, too."""
        changed = (self.done_at[k] for k in self.p.touched[event] if event in self.p.blocks[k].writes)
        return max(super().ready(event, wanted), max(changed, default=0.0))

    def beside(self, event: int, until: float) -> None:
        while self._write_next(event, until):
            pass

    def ahead(self, event: int, until: float) -> None:
        """Begins transfers while the op runs, which ends at `until`."""
        while True:
            read = self.free_at[self.lanes[0]] < until and self._read_next(event)
            written = self._write_next(event, until)
            if not read and not written:
                return

    def _read_next(self, event: int) -> bool:
        """Begins to read the absent block that is touched next. False: there is none, or no room."""
        while self.missing:
            use, k = self.missing[0]
            if self.state[k] == ABSENT and self.next[k] == use:
                break
            heappop(self.missing)
        if not self.missing or not self._clear(self.p.blocks[k].size + self.growth(event, use - self.base), use, event):
            return False
        heappop(self.missing)
        self.read(k, self.now, event)
        return True

    def _clear(self, size: int, use: int, event: int) -> bool:
        """Evicts blocks that are touched after `use` and have a copy. Returns if there is room now."""
        while self.used + size > self.budget:
            k = self._first_written(use)
            if k is None or (not self._unneeded(k) and (self.dirty[k] or self.done_at[k] > self.now)):
                return False
            self.leave(k, event)
        return True

    def _write_next(self, event: int, until: float) -> bool:
        """Begins to write a block that will leave. False: there is none, or the link is busy."""
        while self.to_write and self.free_at[self.lanes[1]] < until:
            k = self.to_write.popleft()
            if self.state[k] == RESIDENT and self._has_to_be_written(k):
                self.write(k, event)
                return True
        return False


def paged(trace: Trace, budget_bytes: int, link: TierLink, program: Iterable[Step] | None = None) -> Paged | None:
    """The pass of a cycle that pages the storages of a program; None: it does not fit.

    Args:
        trace: a measured pass, with its cycle.
        budget_bytes: most bytes resident at any time.
        link: the tier.
        program: computes, recomputes and frees; None: the trace's own.
    """
    p = program_of(trace, plain(trace) if program is None else program)
    best: Paged | None = None
    useful: dict[Gap, int] = {}
    took: list[float] | None = None
    for _ in range(_ROUNDS if len(p.steps) < MANY else 1):
        pager = _Pager(p, budget_bytes, link, chosen(p, budget_bytes, link, took))
        made = settled(pager)
        if made is None:
            break
        better = best is None or made.seconds < best.seconds * _GAIN
        if best is None or made.seconds < best.seconds:
            best = made
            useful = {gap: event for gap, event in pager.gaps.items() if gap in pager.left}
        if not better or made.seconds * _GAIN <= sum(p.seconds):
            break
        took = pager.took
    if best is None or not useful:
        return best
    sparing = settled(_Pager(p, budget_bytes, link, useful))
    if sparing is None or sparing.seconds > best.seconds * _SAME or sparing.moved_bytes >= best.moved_bytes:
        return best
    return sparing


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
