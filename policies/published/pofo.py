"""POFO (Beaumont, Eyraud-Dubois, Shilova, *Efficient combination of rematerialization and offloading for training DNNs*, NeurIPS
2021): a dynamic program over a chain in which each block is kept, offloaded, or made again.

Going through forward once, the next block is saved whole and kept, or saved whole and offloaded; or a stretch of blocks runs from
its input, kept or offloaded, and is made again in backward by rotor's table with the memory that is left. An offloaded
block is written while later blocks run, and read back while the blocks before it in backward run.

*Known limitations*: the paper's program has the time for which the link lags behind in its state. Here a second of the link has a
price, and the prices and memories are searched: each answer is timed by the rules, and the fastest that fits is taken.
"""

from __future__ import annotations

import numpy as np

from memmgr.policies.rules.types import Floats
from memmgr.policies.simulate.simulator import Run
from memmgr.policies.trace import TierLink, Trace
from memmgr.policies.trace.schedule import Step

from .copies import Swap, with_copies
from .rotor import UNITS, Costs, Table, Way, answers, blocks, shifted
from .runs import fastest, judged, largest_that_fits, refused

MOST_BLOCKS = 30
PRICES = (0.01, 0.05, 0.07, 0.1, 0.13, 0.17, 0.22, 0.3, 0.5, 1.0)
"""Seconds of the pass for a second of the link: 0 where every copy hides, 1 where none does."""


def pofo(trace: Trace, budget_bytes: int, tier: TierLink | None = None) -> Run:
    """With a tier; without one it is rotor."""
    if tier is None:
        return refused("pofo", trace, budget_bytes, "without a tier it is rotor")
    costs = Costs(blocks(trace, MOST_BLOCKS))
    ways = [costs.all_of(i) for i in range(len(costs.chain))]
    table = Table(costs, [[way] for way in ways])
    link = 1.0 / tier.write_bytes_per_second + 1.0 / tier.read_bytes_per_second
    found = []
    for price in PRICES:
        forward = _Forward(costs, ways, table, price * link)
        rooms = answers(forward.best[0])

        def run(i: int, forward: _Forward = forward, rooms: list[int] = rooms) -> Run:
            return judged("pofo", trace, budget_bytes, tier, forward.events(rooms[i], tier))

        if rooms:
            found.append(largest_that_fits(len(rooms), run))
    return fastest(found) if found else refused("pofo", trace, budget_bytes, "no schedule was found")


class _Forward:
    """The table over the position of forward and the memory left."""

    def __init__(self, costs: Costs, ways: list[Way], table: Table, price: float) -> None:
        self.costs, self.ways, self.table, self.n = costs, ways, table, len(ways)
        self.best: list[Floats] = [np.zeros(UNITS + 1) for _ in range(self.n + 1)]
        self.choice: list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]] = []
        self.names: list[list[tuple[int, bool, bool]]] = []  # (the block after the stretch, saved whole, offloaded)
        for s in range(self.n - 1, -1, -1):
            self._solve(s, price)
        self.choice.reverse()
        self.names.reverse()

    def _kept(self, s: int, end: int, whole: bool) -> set[int]:
        """Storages of a stretch that stay for its backward, in addition to the input of the block after it."""
        costs = self.costs
        if whole:
            return set(self.ways[s].saved - costs.crossing[s])
        before = costs.chain.cuts[max(s - 1, 0)]
        return {i for i in costs.crossing[s] if costs.trace.storages[i].maker >= before}

    def _solve(self, s: int, price: float) -> None:
        costs, table = self.costs, self.table
        price *= 1.0 + s / self.n  # the first blocks have the longest time for their copies
        found: list[Floats] = []
        names: list[tuple[int, bool, bool]] = []
        way = self.ways[s]
        behind = costs.behind[costs.chain.starts[self.n - 1]]
        need = table.units(max(way.forward_bytes + behind, way.backward_bytes))
        spent = table.spent(s, way)
        size = costs.bytes_of(self._kept(s, s + 1, True))
        for offloaded in (False, True):
            gone = table.units(costs.between(s, s + 1)) if offloaded else spent
            found.append(shifted(self.best[s + 1], need, gone) + way.seconds + size * price * offloaded)
            names.append((s + 1, True, offloaded))
        seconds, most = 0.0, 0
        for end in range(s + 1, self.n):
            took, room = costs.ahead[end - 1]
            most = max(most, room + costs.between(s, end - 1))
            seconds += took
            own = self.table.best[s, end - 1] + seconds
            size = costs.bytes_of(self._kept(s, end, False))
            for offloaded in (False, True) if s else (False,):
                gone = costs.between(s, end) - (size if offloaded else 0)
                rest = shifted(self.best[end], table.units(most), table.units(max(gone, 0)))
                found.append(rest + own + size * price * offloaded)
                names.append((end, False, offloaded))
        rows = np.array(found)
        at = rows.argmin(axis=0)
        self.best[s] = np.take_along_axis(rows, at[None], axis=0)[0]
        self.choice.append(at)
        self.names.append(names)

    def events(self, room: int, tier: TierLink) -> list[Step]:
        """Forward stretch by stretch, then their backward, with the copies beside them."""
        table = self.table
        stretches: list[tuple[int, int, bool, int]] = []
        events: list[Step] = []
        written: dict[int, int] = {}  # offloaded storages, and the event after which each is written
        wanted: dict[int, int] = {}
        s = 0
        while s < self.n:
            end, whole, offloaded = self.names[s][int(self.choice[s][room])]
            stretches.append((s, end, whole, room))
            events += table.forward(s, end, (), first=True)
            kept = self._kept(s, end, whole) if offloaded else set()
            written |= dict.fromkeys(kept, len(events) - 1)
            spent = table.spent(s, self.ways[s])
            if offloaded or not whole:
                away = 0 if whole else self.costs.bytes_of(kept)
                spent = table.units(max(self.costs.between(s, end) - away, 0))
            s, room = end, room - spent
        for s, end, whole, room in reversed(stretches):
            back = list(self.ways[s].backward) if whole else table.events(room, s, end - 1, first=False)
            for i, step in enumerate(back, len(events)):
                for read in self.costs.trace.ops[step.target].inputs:
                    wanted.setdefault(read, i)
            events += back
        swaps = [Swap(s, out, wanted[s]) for s, out in written.items() if s in wanted]
        return with_copies(self.costs.trace, events, swaps, tier)
