"""Coop (Zhang et al., NeurIPS 2023): memory has addresses, and a window of neighbours is evicted.

The budget is one arena. Pieces lie in it in order of address; a request takes the best fitting hole. Where there is
none, a window of neighbouring pieces that is large enough is evicted: the one with the smallest sum of h = cost /
staleness, where the cost is that of a piece's evicted neighbourhood (DTR's union-find) and a hole's is 0. A piece that
cannot be evicted is in no window (*sliding window algorithm*). Cheap tensors and expensive ones are placed from
different ends of a hole (*cheap tensor partitioning*). A write in place keeps its block (*recomputable in-place*).

It is the only system here that pays for fragmentation: all others count bytes. Without addresses a window is any set,
and Coop is DTR without its size factor.

*Known limitations*: the outputs of an op lie side by side. Small pieces have no region of their own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from memmgr.policies.rules.directors import DIRECTORS
from memmgr.policies.rules.filters import FILTERS
from memmgr.policies.rules.prefetchers import off
from memmgr.policies.rules.registry import Policy
from memmgr.policies.rules.types import Action
from memmgr.policies.simulate.simulator import DoesNotFit, Run, Simulation, finished
from memmgr.policies.trace import TierLink, Trace
from memmgr.policies.trace.schedule import Do

_EXPENSIVE = ("conv", "mm", "add_n")  # parts of the names of ops: convolutions, products, long sums
_TINY_SECONDS = 1e-9

COOP = Policy("coop", FILTERS["dtr_eq"], DIRECTORS["evict"], off, offloads=False)


def coop(trace: Trace, budget_bytes: int, tier: TierLink | None = None) -> Run:
    """Recompute only; a tier is not used."""
    return finished(_Coop(trace, budget_bytes, COOP, None))


def cheapest_window(pieces: Sequence[tuple[int, float]], need_bytes: int) -> tuple[int, int] | None:
    """The window of neighbours with the smallest sum of h, among those that are large enough: (first, end), by two
    pointers.

    `pieces`: (bytes, h) each in order of address; a hole has h 0, a piece that cannot be evicted infinity.
    """
    best: tuple[float, int, int] | None = None
    low, size, h = 0, 0, 0.0
    for high, (piece_bytes, piece_h) in enumerate(pieces):
        if piece_h == float("inf"):
            low, size, h = high + 1, 0, 0.0
            continue
        size, h = size + piece_bytes, h + piece_h
        while size - pieces[low][0] >= need_bytes:
            size, h, low = size - pieces[low][0], h - pieces[low][1], low + 1
        if size >= need_bytes and (best is None or h < best[0]):
            best = (h, low, high + 1)
    return None if best is None else best[1:]


class _Coop(Simulation):
    """A simulation with places."""

    def __init__(self, trace: Trace, budget_bytes: int, policy: Policy, tier: TierLink | None) -> None:
        super().__init__(trace, budget_bytes, policy, tier)
        self.placed: list[tuple[int, int, int]] = []  # (begin, end, storage), by address
        self.begin: dict[int, int] = {}
        self.cursor = 0  # where the next output goes: the window that `room` has found
        self.expensive = False
        self.heirs: dict[int, int] = {}  # in the running op: which storage takes the block of which

    def run_op(self, k: int, do: Do) -> None:
        op = self.trace.ops[k]
        self.expensive = any(part in op.name for part in _EXPENSIVE)
        self.heirs = {new: old for old, new in op.writes if do is Do.COMPUTE and not self.trace.copy_on_write}
        super().run_op(k, do)

    def arrived(self, s: int) -> None:
        size = int(self.size[s])
        if s in self.heirs:
            self._place(s, self._lift(self.heirs[s]), size)
        elif size:
            self._place(s, self.cursor, size)
            self.cursor += size
        super().arrived(s)

    def drop(self, s: int) -> None:
        super().drop(s)
        self._lift(s)

    def _place(self, s: int, begin: int, size: int) -> None:
        insort(self.placed, (begin, begin + size, s))
        self.begin[s] = begin

    def _lift(self, s: int) -> int:
        begin = self.begin.pop(s, -1)
        if begin >= 0:
            del self.placed[bisect_left(self.placed, (begin, 0, 0))]
        return begin

    def _pieces(self) -> list[tuple[int, int, int]]:
        """(begin, end, storage) of everything, holes included: these are storage -1."""
        found, at = [], 0
        for piece in self.placed:
            if piece[0] > at:
                found.append((at, piece[0], -1))
            found.append(piece)
            at = piece[1]
        if self.budget > at:
            found.append((at, self.budget, -1))
        return found

    def room(self, need_bytes: int) -> None:
        if need_bytes <= 0:
            return
        pieces = self._pieces()
        holes = [(b - a, a) for a, b, s in pieces if s < 0 and b - a >= need_bytes]
        if not holes:
            able = self.able() & self.recomputable
            window = cheapest_window([(b - a, self._h(s, bool(s < 0 or able[s]))) for a, b, s in pieces], need_bytes)
            if window is None:
                raise DoesNotFit(f"op {self.clock.computed}: no {need_bytes} bytes side by side can be made free")
            there = pieces[window[0] : window[1]]
            for _, _, s in there:
                if s >= 0:
                    self.leave(s, Action.EVICT)
            holes = [(there[-1][1] - there[0][0], there[0][0])]
        size, begin = min(holes)
        self.cursor = begin + size - need_bytes if self.expensive else begin

    def _h(self, s: int, able: bool) -> float:
        if s < 0 or not able:
            return 0.0 if able else float("inf")
        cost = float(self.cost[s]) + self.chains.component_seconds(s)
        return cost / max(self.clock.now - float(self.accessed[s]), _TINY_SECONDS)
