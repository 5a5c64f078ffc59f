"""Passes of a cycle that are simulated one after the other: memory, link and clock, for any policy.

Storages that live from one pass to the next begin in the tier, and later where the pass before left them. A pass that
ends as it began (`settled`) is a schedule for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from memmgr.policies.trace import TierLink, Trace
from memmgr.policies.trace.blocks import Program, plain, program_of, steps_of
from memmgr.policies.trace.schedule import Do, Step

from .simulator import Run

MOST_PASSES = 6
"""The first begins with nothing in memory; most end as they began from the second on, and one in a hundred by `return_to`."""

NO_CYCLE = (
    "the trace is no cycle: the pass before it was not recorded, or differs (memmgr trace --pass 4 records a later one)"
)

ABSENT, RESIDENT, UNBORN = range(3)
FAR = 1 << 60


@dataclass(frozen=True)
class Paged:
    """A pass that ends as it began."""

    steps: tuple[Step, ...]  # the schedule
    away: tuple[int, ...]  # constants that are in the tier, and not resident, when it begins
    clean: tuple[int, ...]  # constants that are resident then and have a copy in the tier
    seconds: float  # its time, waits included
    peak_bytes: int  # most bytes resident
    written_bytes: int  # to the tier
    read_bytes: int  # back

    @property
    def moved_bytes(self) -> int:
        """Bytes that it writes and reads."""
        return self.written_bytes + self.read_bytes


class Full(Exception):
    """Nothing can leave."""


class Cycle:
    """Memory, link and clock of passes that are simulated one after the other. Subclasses decide: `make_room`, and
    transfers ahead of need (`ahead`, `after`).

    Times are seconds, an event of the current pass has the number `base + event`.

    Attributes:
        wanted: per event, the blocks that must be resident: those that it touches, or more.
        loose: blocks that may be evicted.
        state: per block, ABSENT, RESIDENT or UNBORN.
        dirty: per block, if it was changed since its copy was made.
        reading: per block, if a read has begun and no event has waited for it.
        done_at: per block, when the copy that was begun last is complete.
        next: per block, when it is touched next.
        done: the actions of the pass, (before which event, action, block).
    """

    def __init__(self, p: Program, budget_bytes: int, link: TierLink) -> None:
        self.p, self.budget, self.n = p, budget_bytes, len(p.steps)
        self.first = {late: first for first, late in p.handed.items()}
        self.wanted = p.touched
        self.loose = {k for k, b in enumerate(p.blocks) if not b.stays}
        self.rates = (link.read_bytes_per_second, link.write_bytes_per_second)
        self.latency = link.latency_seconds
        self.cpu = link.cpu_seconds_per_byte
        self.slowed = 0.0  # seconds that copies take from the op that runs
        self.lanes = (0, 0) if link.shared else (0, 1)  # of reads, of writes
        self.free_at = [0.0, 0.0]  # by lane
        self.now = 0.0
        self.base = self.used = self.peak = 0
        n = len(p.blocks)
        self.state = [UNBORN] * n
        self.dirty = [False] * n
        self.reading = [False] * n
        self.done_at = [0.0] * n
        self.touch = [0] * n  # which of its touches comes next
        self.next = [FAR] * n
        for k, b in enumerate(p.blocks):
            if b.held:
                self.next[k] = b.touches[0]
                self.state[k] = RESIDENT if b.stays else ABSENT
                if b.stays:
                    self.take(k)
        made = np.array([sum(p.blocks[k].size for k in born) for born in p.born] * 2, dtype=np.int64)
        lost = np.array([sum(p.blocks[k].size for k in died) for died in p.died] * 2, dtype=np.int64)
        left = np.cumsum(made) - np.cumsum(lost)
        self.left_after: list[int] = left.tolist()  # bytes that ops have made and not freed, after each
        # [j][event]: most of them during 2**j ops from that one on. Lists, since NumPy would give the interpreter's lock back and
        # take it again so fast that a thread which waits for it starts to wait anew.
        during, half = left + lost, 1
        self.most_during: list[list[int]] = [during.tolist()]
        while 2 * half <= self.n:
            during = np.maximum(during[:-half], during[half:])
            self.most_during.append(during.tolist())
            half *= 2
        self.done: list[tuple[int, Do, int]] = []

    # ---- decisions

    def make_room(self, size: int, event: int) -> None:
        """Evicts until `size` bytes are free, now and at any cost. Raises `Full`: no block can be evicted."""
        raise NotImplementedError

    def ahead(self, event: int, until: float) -> None:
        """Begins transfers while the event runs, which ends at `until`."""

    def ready(self, event: int, wanted: Iterable[int]) -> float:
        """When the event can begin: the reads of these blocks have ended."""
        return max((self.done_at[k] for k in wanted if self.reading[k]), default=self.now)

    def beside(self, event: int, until: float) -> None:
        """Begins transfers while the event waits for its reads, which end at `until`."""

    def after(self, event: int) -> None:
        """The event is over."""

    # ---- one pass

    def play(self) -> None:
        """One pass. Raises `Full`: it does not fit."""
        p = self.p
        self.done = []
        if self.base:
            for first, late in p.handed.items():
                self.hand_over(first, late)
        for event, (touched, born, wanted) in enumerate(zip(p.touched, p.born, self.wanted, strict=True)):
            at = self.base + event
            self.make_room(self.room_for(born), event)
            for k in born:
                self.state[k], self.dirty[k], self.next[k] = RESIDENT, True, at
                self.take(k)
            for k in wanted:
                if self.state[k] == ABSENT:
                    self.make_room(self.room_for([k]), event)
                    self.read(k, self.now, event)
            ready = self.ready(event, wanted)
            if ready > self.now:
                self.beside(event, ready)
                self.now = ready
            for k in wanted:
                self.reading[k] = False
            self.ahead(event, self.now + p.seconds[event])
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
                was, self.state[k], self.dirty[k] = self.state[k], UNBORN, False
                if was == RESIDENT:
                    self.drop(k)
            self.after(event)
        self.base += self.n

    def behind(self) -> float:
        """Seconds of copies that were asked for and are not done."""
        return max(0.0, *(at - self.now for at in self.free_at))

    def hand_over(self, first: int, late: int) -> None:
        """Begins a pass: the block that took the place of `first` before the end of the last pass is `first` now."""
        columns: tuple[list[Any], ...] = (self.state, self.dirty, self.reading, self.done_at, self.next)
        for column in columns:
            column[first] = column[late]
        self.touch[first] = 0
        if self.state[late] == RESIDENT:
            self.drop(late)
            self.take(first)
        self.state[late], self.dirty[late], self.reading[late], self.next[late] = UNBORN, False, False, FAR

    def _next_pass(self, k: int) -> int:
        """When it is touched next, after its last touch of a pass."""
        b = self.p.blocks[self.first.get(k, k)]
        return self.base + self.n + b.touches[0] if b.held and k not in self.p.handed else FAR

    def _now(self, k: int) -> int:
        """Between two passes, the block that is in the place of one that passes begin with."""
        return self.p.handed.get(k, k) if self.base else k

    def held(self) -> dict[int, tuple[int, bool]]:
        """Blocks that live from one pass to the next: where each is, and if it was changed since its copy was made."""
        held = ((k, self._now(k)) for k, b in enumerate(self.p.blocks) if b.held)
        return {k: (self.state[now], self.dirty[now]) for k, now in held}

    def return_to(self, began: dict[int, tuple[int, bool]]) -> None:
        """At the end of a pass that others would follow in turns: all is where it was when it began."""
        then = [(self._now(k), state, dirty) for k, (state, dirty) in began.items()]
        for k, state, dirty in then:
            if self.state[k] == RESIDENT and self.dirty[k] and not dirty:
                self.write(k, self.n)
            if self.state[k] == RESIDENT and state == ABSENT:
                self.leave(k, self.n)
        for k, state, _ in then:
            if self.state[k] == ABSENT and state == RESIDENT:
                self.read(k, self.now, self.n)
        self.now = max(self.now, *self.free_at)

    # ---- transfers

    def bytes_of(self, blocks: Iterable[int]) -> int:
        """Bytes of these blocks."""
        return sum(self.p.blocks[k].size for k in blocks)

    def room_for(self, blocks: Iterable[int]) -> int:
        """Bytes that these blocks need when they are read."""
        return self.bytes_of(blocks)

    def take(self, k: int) -> None:
        """k is resident from now on."""
        self.used += self.p.blocks[k].size
        self.peak = max(self.peak, self.used)

    def drop(self, k: int) -> None:
        """k is resident no more."""
        self.used -= self.p.blocks[k].size

    def copy(self, k: int, do: Do, begin: float, event: int) -> None:
        """The link is asked for a copy, which begins when it is free."""
        lane, rate = (self.lanes[0], self.rates[0]) if do is Do.RELOAD else (self.lanes[1], self.rates[1])
        begin = max(begin, self.free_at[lane], self.done_at[k])
        self.done_at[k] = self.free_at[lane] = begin + self.latency + self.p.blocks[k].size / rate
        self.slowed += self.p.blocks[k].size * self.cpu
        self.done.append((event, do, k))

    def read(self, k: int, begin: float, event: int) -> None:
        """Begins to read k; its room is taken."""
        self.copy(k, Do.RELOAD, begin, event)
        self.state[k], self.reading[k] = RESIDENT, True
        self.take(k)

    def write(self, k: int, event: int) -> None:
        """k begins to be written."""
        self.copy(k, Do.OFFLOAD, self.now, event)
        self.dirty[k] = False

    def leave(self, k: int, event: int) -> None:
        """k goes; its copy is whole."""
        self.state[k] = ABSENT
        self.drop(k)
        self.done.append((event, Do.FREE, k))

    def growth(self, event: int, until: int) -> int:
        """Most bytes that ops after `event`, before event `until`, make in addition to the resident ones."""
        first, until = event + 1, min(until, event + self.n)
        if first >= until:
            return 0
        level = (until - first).bit_length() - 1
        most = self.most_during[level]
        return max(most[first] - self.left_after[event], most[until - (1 << level)] - self.left_after[event], 0)

    def least_bytes(self) -> int:
        """A lower bound on the budget: the blocks that are never evicted, and at each event those that it needs."""
        p, loose = self.p, self.loose
        level = self.bytes_of(k for k, b in enumerate(p.blocks) if b.held and k not in loose)
        most = 0
        for born, wanted, died in zip(p.born, self.wanted, p.died, strict=True):
            level += self.bytes_of(k for k in born if k not in loose)
            most = max(most, level + self.bytes_of(loose.intersection(wanted)))
            level -= self.bytes_of(k for k in died if k not in loose)
        return most


def settled(passes: Cycle) -> Paged | None:
    """The pass that ends as it began; None: it does not fit."""
    p = passes.p
    try:
        for _ in range(MOST_PASSES):
            begun, began, behind = passes.now, passes.held(), passes.behind()
            passes.peak = passes.used
            passes.play()
            if passes.held() == began:
                break
        else:
            passes.return_to(began)
    except Full:
        return None
    left = max(passes.behind() - behind, 0.0)  # to the next one: all of them would
    seconds = passes.now - begun + left
    away = tuple(sorted(s for s, k in p.begins.items() if began[k] == (ABSENT, False)))
    clean = tuple(sorted(s for s, k in p.begins.items() if began[k] == (RESIDENT, False) and not p.blocks[k].stays))
    moved = {do: sum(p.blocks[k].size for _, d, k in passes.done if d is do) for do in (Do.OFFLOAD, Do.RELOAD)}
    return Paged(
        tuple(steps_of(p, passes.done)), away, clean, seconds, passes.peak, moved[Do.OFFLOAD], moved[Do.RELOAD]
    )  # fmt: skip


def run_cycle(
    name: str, trace: Trace, budget_bytes: int, tier: TierLink | None, make: Callable[[Program, TierLink], Cycle]
) -> Run:
    """A published policy over the program as it is: no op runs again.

    `trace`: a measured pass, with its cycle. `tier`: the one that evicted blocks are written to. `make`: the policy,
    before the first pass.
    """
    if tier is None or not trace.cycle:
        why = "what lives from pass to pass needs a tier below" if trace.cycle else NO_CYCLE
        return Run(name, budget_bytes, False, [], 0, 0.0, trace.seconds, 0.0, why)
    cycle = make(program_of(trace, plain(trace)), tier)
    least = cycle.least_bytes()
    made = settled(cycle)
    if made is None:
        why = f"needs {least} bytes"
        return Run(name, budget_bytes, False, [], 0, 0.0, trace.seconds, 0.0, why, least_bytes=least)
    return Run(
        name, budget_bytes, True, list(made.steps), made.peak_bytes, made.seconds, trace.seconds, made.seconds - trace.seconds,
        away=made.away, clean=made.clean, moved_bytes=made.moved_bytes, least_bytes=least,
    )  # fmt: skip
