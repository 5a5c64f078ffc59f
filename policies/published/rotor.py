"""rotor: optimal checkpointing of chains whose blocks differ (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, *Optimal
checkpointing for heterogeneous chains*, arXiv 1911.13214, section 4, theorem 1).

For a stretch of blocks s..t whose input is resident, and m bytes in addition, the fastest way through forward and
backward is the best of

- save all of block s: its forward, then s+1..t with the rest of m, then its backward;
- save the input of a later block: forward of s..j-1, of which only the input of j stays, then j..t with the rest of m,
  then s..j-1, from the input again, with all of m.

A block may offer several ways to save it, with less memory and more time (Rockmate's). Memory is counted in 500 units, as
published. The blocks are those of a pass that is no chain in truth, so the table is asked for all of its answers, and the
fastest that fits by the rules is taken.

*Known limitations*: at most 60 blocks, of about equally many ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from memmgr.policies.rules.types import Floats
from memmgr.policies.simulate.simulator import Run
from memmgr.policies.trace import OpKind, TierLink, Trace
from memmgr.policies.trace.schedule import Step

from .chain import Chain
from .runs import fastest, judged, largest_that_fits, runs_of

GRAINS = (60, 30, 15)
"""Blocks at most. Few are better where much skips the cuts between them."""
UNITS = 500
_ALL = 0  # a choice below `_LATER`: the way to save the block; from there on: the block whose input is saved
_LATER = 1000


@dataclass(frozen=True)
class Way:
    """One way to save a block between its forward and its backward."""

    saved: frozenset[int]  # storages that stay between the two
    seconds: float  # of its forward, and of the ops that run again in its backward
    forward_bytes: int  # at most, beside its input, when its forward runs
    backward_bytes: int  # at most, beside its input, when its backward runs
    backward: Sequence[Step]  # the ops that its backward runs


def rotor(trace: Trace, budget_bytes: int, tier: TierLink | None = None) -> Run:
    """Recompute only; a tier is not used."""

    def run(most: int) -> Run:
        costs = Costs(blocks(trace, most))
        return best_of("rotor", costs, [[costs.all_of(i)] for i in range(len(costs.chain))], budget_bytes, tier)

    return fastest(run(most) for most in GRAINS)


def blocks(trace: Trace, most: int) -> Chain:
    """The pass as a chain of so many blocks at most."""
    chain = Chain(trace)
    ops = sum(bool(op.outputs) and op.kind != OpKind.CONSTANT for op in trace.ops[: chain.turn])
    return chain.at(chain.narrow(min(ops, most)))


def best_of(name: str, costs: Costs, ways: Sequence[Sequence[Way]], budget_bytes: int, tier: TierLink | None) -> Run:
    """The fastest answer of the table that fits."""
    trace = costs.chain.trace
    table = Table(costs, ways)
    rooms = answers(table.best[0, table.n - 1])

    def run(i: int) -> Run:
        return judged(name, trace, budget_bytes, tier, table.events(rooms[i]))

    return largest_that_fits(len(rooms), run)


class Costs:
    """Seconds and bytes of the blocks of a chain.

    `ahead`: per block, seconds of its forward if only the input of the next one is made, and its bytes at most.
    `behind`: per op, bytes that backward has made and reads later. `crossing`: per cut, the bytes that cross it.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain, self.trace = chain, chain.trace
        self.crossing = [chain.crossing(cut) for cut in chain.cuts]
        self.behind, self.during = self._backward_bytes()
        self.ahead = [self.forward(i, self.crossing[i + 1]) for i in range(len(chain))]

    def bytes_of(self, storages: Iterable[int]) -> int:
        return sum(self.trace.storages[s].size_bytes for s in storages)

    def between(self, i: int, j: int) -> int:
        """Bytes of the input of block j beside that of block i."""
        return self.bytes_of(self.crossing[j] - self.crossing[i])

    def work(self, i: int) -> range:
        """The ops of block i's backward."""
        return range(self.chain.starts[i], self.chain.starts[i - 1] if i else len(self.trace.ops))

    def read_by_work(self, i: int) -> set[int]:
        """Storages that block i makes and its backward reads."""
        low, high = self.chain.cuts[i], self.chain.cuts[i + 1]
        read = {s for k in self.work(i) for s in self.trace.ops[k].inputs} - self.trace.constants
        return self.chain.interior[i] | {s for s in read if low <= self.trace.storages[s].maker < high}

    def all_of(self, i: int) -> Way:
        """Everything that backward reads is saved."""
        saved = self.read_by_work(i)
        seconds, most = self.forward(i, saved | self.crossing[i + 1])
        backward = max((self.during[k] for k in self.work(i)), default=0) + self.bytes_of(saved)
        return Way(frozenset(saved), seconds, most, backward, runs_of(self.work(i), again=False))

    def forward(self, i: int, targets: set[int]) -> tuple[float, int]:
        """Seconds of block i's forward, from its input to `targets`, and the most bytes beside the input."""
        low, high = self.chain.cuts[i], self.chain.cuts[i + 1]
        ops = self.chain.rematerialize(targets, low, high, self.crossing[i])
        last = {s: k for k in ops for s in (*self.trace.ops[k].inputs, *self.trace.ops[k].outputs)}
        live = most = 0
        for k in ops:
            live += self.bytes_of(self.trace.ops[k].outputs)
            most = max(most, live)
            gone = {s for s in (*self.trace.ops[k].inputs, *self.trace.ops[k].outputs) if last[s] == k} - targets
            live -= self.bytes_of(s for s in gone if low <= self.trace.storages[s].maker < high)
        return sum(self.trace.ops[k].seconds for k in ops), most

    def _backward_bytes(self) -> tuple[list[int], list[int]]:
        """Per op, bytes that backward has made and wants: before it, and while it runs."""
        n, turn = len(self.trace.ops), self.chain.turn
        held = set(self.trace.held_at_end)
        last = {s: k for k in range(turn, n) for s in (*self.trace.ops[k].inputs, *self.trace.ops[k].outputs)}
        before, during, live = [0] * (n + 1), [0] * (n + 1), 0
        for k in range(turn, n):
            op = self.trace.ops[k]
            before[k] = live
            live += self.bytes_of(op.outputs)
            during[k] = live
            gone = {s for s in (*op.inputs, *op.outputs) if last[s] == k and s not in held}
            live -= self.bytes_of(s for s in gone if self.trace.storages[s].maker >= turn)
        before[n] = live
        return before, during


def shifted(rest: Floats, need: int, spent: int) -> Floats:
    """Seconds by memory of a way that takes `rest` with `spent` units less; at least `need` units must be free."""
    least = np.full(UNITS + 1, np.inf)
    low = max(need, spent)
    if low <= UNITS:
        least[low:] = rest[low - spent : UNITS + 1 - spent]
    return least


def answers(least: Floats) -> list[int]:
    """Memories, in units, with different answers, ascending."""
    return [m for m in range(UNITS + 1) if np.isfinite(least[m]) and (m == 0 or least[m] != least[m - 1])]


class Table:
    """The dynamic program: for each stretch and each memory the least seconds, and the choice that leads there."""

    def __init__(self, costs: Costs, ways: Sequence[Sequence[Way]]) -> None:
        self.costs, self.ways, self.n = costs, ways, len(costs.chain)
        trace = costs.trace
        most = max(trace.unmanaged_peak[0], sum(max(w.forward_bytes for w in way) for way in ways)) + max(costs.during)
        self.unit = max(1, -(-most // UNITS))
        self.best: dict[tuple[int, int], Floats] = {}
        self.choice: dict[tuple[int, int], np.ndarray[tuple[int, ...], np.dtype[np.int16]]] = {}
        for length in range(1, self.n + 1):
            for s in range(self.n - length + 1):
                self._solve(s, s + length - 1)

    def units(self, size: int) -> int:
        return -(-size // self.unit)

    def _then(self, s: int, t: int, need: int, spent: int) -> Floats:
        """Seconds of s..t by memory, where `need` units have to be there and `spent` are."""
        return shifted(self.best.get((s, t), np.zeros(UNITS + 1)), need, spent)

    def _solve(self, s: int, t: int) -> None:
        costs = self.costs
        behind = costs.behind[costs.chain.starts[t]]
        found: list[Floats] = []
        name: list[int] = []
        for number, way in enumerate(self.ways[s]):
            need = self.units(max(way.forward_bytes + behind, way.backward_bytes))
            found.append(self._then(s + 1, t, need, self.spent(s, way)) + way.seconds)
            name.append(_ALL + number)
        seconds, most = 0.0, 0
        for later in range(s + 1, t + 1):
            took, room = costs.ahead[later - 1]
            most = max(most, room + costs.between(s, later - 1))
            seconds += took
            first = self._then(later, t, self.units(most + behind), self.units(costs.between(s, later)))
            found.append(first + self.best[s, later - 1] + seconds)
            name.append(_LATER + later)
        table = np.array(found)
        at = table.argmin(axis=0)
        self.best[s, t] = np.take_along_axis(table, at[None], axis=0)[0]
        self.choice[s, t] = np.array(name, dtype=np.int16)[at]

    def spent(self, s: int, way: Way) -> int:
        costs = self.costs
        return self.units(costs.bytes_of((way.saved | costs.crossing[s + 1]) - costs.crossing[s]))

    def events(self, room: int, s: int = 0, t: int | None = None, *, first: bool = True) -> list[Step]:
        """The events of blocks s..t with so many units of memory."""
        t = self.n - 1 if t is None else t
        if s > t:
            return []
        costs = self.costs
        choice = int(self.choice[s, t][room])
        if choice >= _LATER:
            later = choice - _LATER
            events = self.forward(s, later, costs.crossing[later], first=first)
            events += self.events(room - self.units(costs.between(s, later)), later, t, first=first)
            return events + self.events(room, s, later - 1, first=False)
        way = self.ways[s][choice - _ALL]
        events = self.forward(s, s + 1, way.saved | costs.crossing[s + 1] if s < t else way.saved, first=first)
        return events + self.events(room - self.spent(s, way), s + 1, t, first=first) + list(way.backward)

    def forward(self, s: int, end: int, targets: Iterable[int], *, first: bool) -> list[Step]:
        """Forward of blocks s..end - 1."""
        chain = self.costs.chain
        low, high = chain.cuts[s], chain.cuts[end]
        if first:
            return runs_of(range(low, high), again=False)
        return runs_of(chain.rematerialize(set(targets), low, high, self.costs.crossing[s]), again=True)
