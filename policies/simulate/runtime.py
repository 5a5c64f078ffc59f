"""A pass as the live manager makes it: what sets it apart from ranking everything when room is short.

- It ranks ahead of need, between two ops and when autograd saves or asks; malloc takes what is ranked in that order, however
  old the ranking is by then, and only then what was read ahead, and only then ranks anew (memmgr/_manager.py, vault.cpp).
- What leaves next is written meanwhile (writeback.py).
- Staleness is by the recorder's clock, which counts ops of forward and stands still in backward.
- What backward asks for is made again as remat.py says.
- Reads ahead begin with a use, and leave the room free that a request may take (memmgr/_daemon.py).
- Roots that only recipes hold are given up beyond a share of what is resident.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from memmgr.policies.rules.prefetchers import Upcoming
from memmgr.policies.rules.rank import rank
from memmgr.policies.rules.registry import Policy
from memmgr.policies.rules.types import KEPT_SHARE, Action, Bools, Floats, Ints
from memmgr.policies.rules.writeback import WATERMARKS, plan_writeback
from memmgr.policies.trace import OpKind, TierLink, Trace
from memmgr.policies.trace.schedule import Do

from .base import BACKWARD_RATIO, Simulation
from .remat import Rematerialization

_LOOK = 256  # what is read ahead is chosen among so many
_LEAST_PATIENCE, _MOST_PATIENCE = 8, 256  # moments without a ranking after one that found little


class RuntimeSimulation(Simulation):
    """A simulation of a measured pass."""

    def __init__(self, trace: Trace, budget_bytes: int, policy: Policy, tier: TierLink | None) -> None:
        super().__init__(trace, budget_bytes, policy, tier)
        self.armed: dict[int, Action] = {}  # ranked, and not gone yet: the first goes first
        self.armed_bytes = 0
        self.incoming: set[int] = set()  # read ahead of need, and not asked for yet
        self._patience = self._backoff = 0
        self._recorded = 0.0  # the recorder's clock
        self._order = np.zeros(len(trace.storages), dtype=np.int64)  # in which autograd saved them, from 1
        self._position = 0  # in that order, of the last use
        self._saves = self._saved_bytes = 0
        self._turn = len(trace.ops) if trace.backward_at is None else trace.backward_at
        uses = sum(len(op.uses) for op in trace.ops)
        self._pace = sum(op.seconds for op in trace.ops[self._turn :]) / max(1, uses)  # of backward, from use to use
        # What a request may take. What nobody reads is scratch memory, which an op asks for in pieces.
        read = {s for op in trace.ops for s in op.wanted} - set(trace.constants)
        largest = max((trace.storages[s].size_bytes for s in read), default=0)
        self._reserve = max(largest * 3 // 2, budget_bytes // 32)

    def now(self) -> float:
        return self._recorded

    # ---- between ops

    def begins(self, k: int) -> None:
        op = self.trace.ops[k]
        for s in op.uses:
            self._disarm(s)
            self.incoming.discard(s)
            self._position = int(self._order[s])
            self.accessed[s] = self.now()
        for _ in op.uses:
            self.pressure()
        if self._is_recorded(k):
            self.pressure()

    def after(self, k: int) -> None:
        op = self.trace.ops[k]
        if self._is_recorded(k):
            self._recorded += op.seconds
        self.accessed[list(op.outputs)] = self.now()
        for s in op.saves:
            self._saves += 1
            if not self._order[s]:
                self._order[s] = self._saves
                self._saved_bytes += int(self.size[s])
                self.saved(s)
            self.pressure()

    def _is_recorded(self, k: int) -> bool:
        return k < self._turn and self.trace.ops[k].kind != OpKind.VIEW

    def saved(self, s: int) -> None:
        """Autograd saves s for the first time."""

    def asked(self, s: int) -> None:
        """Autograd asks for s, which may be away."""

    def pressure(self) -> None:
        """Between two ops of the program, and with every save and use."""
        self._rank_ahead()

    def replays(self) -> None:
        """An op is about to run again."""

    def _rank_ahead(self) -> None:
        """When the room left is less than what a request may take, and too little is ranked, who leaves next is."""
        if self.clock.used + self._reserve <= self.budget or self.armed_bytes >= self._reserve:
            return
        if self._patience > 0:
            self._patience -= 1
            return
        able = self.able()
        able[list(self.armed)] = False
        index = np.flatnonzero(able)
        candidates, link, need = self.candidates(index), self.link(), 2 * self._reserve
        ranking = rank(candidates, self.policy.filter, self.policy.director, link, need, urgent_bytes=need)
        for at, action in zip(ranking.order.tolist(), ranking.action.tolist(), strict=True):
            s = int(index[at])
            self.armed[s] = Action(action)
            self.armed_bytes += int(self.size[s])
        found = ranking.released_bytes(candidates) >= self._reserve
        self._backoff = 0 if found else min(_MOST_PATIENCE, 2 * self._backoff + _LEAST_PATIENCE)
        self._patience = self._backoff
        if not link.write_bytes_per_second:
            return
        early = plan_writeback(
            candidates, ranking, link, resident_bytes=self.clock.used, budget_bytes=self.budget, watermarks=WATERMARKS
        )
        for at in early.order.tolist():
            self.write(int(index[at]))

    def _disarm(self, s: int) -> Action:
        action = self.armed.pop(s, Action.KEEP)
        if action != Action.KEEP:
            self.armed_bytes -= int(self.size[s])
        return action

    # ---- making room

    def room(self, need_bytes: int) -> None:
        if self.clock.used + need_bytes <= self.budget:
            return
        able = self.able()
        for s in [s for s in self.armed if able[s]]:
            if self.clock.used + need_bytes <= self.budget:
                return
            action = self._disarm(s)
            if action == Action.EVICT and not self.recomputable[s] and not self.clean[s]:
                continue  # what it is made of has gone since
            self.leave(s, action)
        while self.clock.used + need_bytes > self.budget:
            early = self.incoming - self.pins.keys()
            if not early:
                break
            self.drop(min(early, key=lambda s: int(self._order[s])))  # of what was read too early, what is needed last
        if self.clock.used + need_bytes > self.budget:
            self.short()
            super().room(need_bytes)

    def short(self) -> None:
        """What was ranked, and what was read too early, was not enough."""

    def able(self) -> Bools:
        able = super().able()
        able[list(self.incoming)] = False
        return able

    def drop(self, s: int) -> None:
        self.incoming.discard(s)
        self._disarm(s)
        super().drop(s)

    def release(self, s: int) -> None:
        super().release(s)
        self._disarm(s)
        if self.resident[s]:
            self._lose_roots()

    def _lose_roots(self) -> None:
        """Roots that only recipes hold cost a share of what is resident; of more, the largest are given up (design section 2),
        and what was made from them cannot be made again."""
        roots = np.flatnonzero(self.resident & ~self.held & ~self.recomputable & self.movable)
        total, most = int(self.size[roots].sum()), int(self.clock.used * KEPT_SHARE)
        for s in sorted(roots.tolist(), key=lambda s: -int(self.size[s])):
            if total <= most:
                return
            lost = None if self.pins[s] else self._made_from(s)
            if lost is not None:
                self.recomputable[lost] = self.droppable[lost] = False
                total -= int(self.size[s])
                self.drop(s)

    def _made_from(self, root: int) -> list[int] | None:
        """What can be made again only as long as `root` is there; None: some of it is gone, and wanted."""
        found: dict[int, None] = {}
        todo = [root]
        while todo:
            for k in self.chains.readers[todo.pop()]:
                for y in self.trace.ops[k].outputs:
                    if y in found or not self.recomputable[y]:
                        continue
                    found[y] = None
                    if self.resident[y] or self.clean[y]:
                        continue  # a root from then on
                    if self.held[y]:
                        return None
                    todo.append(y)
        return list(found)

    # ---- bringing back

    def gather(self, targets: Iterable[int], k: int) -> None:
        """Makes all of `targets` resident: one after the other, as a node of backward asks for what it saved."""
        asked = self.trace.ops[k].uses if k < len(self.trace.ops) else ()
        targets = tuple(dict.fromkeys((*asked, *targets)))
        there: list[int] = []
        try:
            for s in targets:
                if s in asked:
                    self.asked(s)
                if not self.resident[s]:
                    if self.clean[s]:
                        self.read(s)
                    else:
                        self.remake(s)
                self.pins[s] += 1
                there.append(s)
        finally:
            self.unpin(there)

    def remake(self, s: int) -> None:
        """Makes s again."""
        Rematerialization(self, s).make()

    def unpin(self, storages: Iterable[int]) -> None:
        """Each of them is pinned once less."""
        for s in storages:
            self.pins[s] -= 1
            if not self.pins[s]:
                del self.pins[s]

    def let_go(self, storages: Iterable[int]) -> None:
        """The same; what is pinned no more and nobody saved goes."""
        for s in storages:
            self.unpin((s,))
            if self.resident[s] and not self.held[s] and not self.pins[s]:
                self.drop(s)

    def prefetch(self, k: int) -> None:
        """With a use in backward, what was saved last first; the room that a request may take stays free."""
        if self.tier is None or k < self._turn or not self.trace.ops[k].uses:
            return
        away = np.flatnonzero(self.clean & ~self.resident & self.held)
        away = away[np.argsort(-self._order[away], kind="stable")][:_LOOK]
        if not len(away):
            return
        link, room = self.link(), self.budget - self._reserve
        upcoming = Upcoming(self.size[away], np.maximum.accumulate(self.distance(away)))
        chosen = self.policy.prefetcher(upcoming, link, room - self.clock.used, self._pace, link.queued_read_bytes)
        for s in away[chosen].tolist():
            if self.clock.used + int(self.size[s]) > room:
                break
            self.step(Do.RELOAD, s)
            self.arrived(s)
            self.incoming.add(s)

    # ---- what the policies see

    def distance(self, index: Ints) -> Ints:
        """Saves between what is used next and these."""
        return np.maximum(0, (self._position or self._saves) - self._order[index])

    def until_use(self, index: Ints) -> Floats:
        turn = self.until_turn()
        if not turn:
            return np.asarray(self.distance(index) * self._pace, dtype=np.float64)
        stale = np.maximum(self.now() - self.accessed[index], 0.0)
        return np.asarray(turn + BACKWARD_RATIO * (turn + stale), dtype=np.float64)

    def promised(self) -> tuple[Ints, Floats, float]:
        """As live: what is away is not promised to anybody, and the program asks for room as fast as it has saved so far."""
        demand = max(1.0, self._saved_bytes / max(self.program, 1e-6)) if self.until_turn() else np.inf
        return np.zeros(0, dtype=np.int64), np.zeros(0), demand
