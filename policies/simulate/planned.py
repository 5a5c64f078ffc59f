"""A measured pass that follows a plan, as the live manager makes it (memmgr/_plans.py, allocator/shim/plan.cpp).

A plan says what may go and what is made again together, and its planner counts it all as gone at that moment. Live, nothing
leaves before malloc asks: what no request needs stays, its op does not run again, and the peak comes up to the budget. What a
plan lets go in backward is told by uses of saves; its reads begin with a use, where there is room. If what it lets go is
not enough the policies go on from there, as live.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from memmgr.policies.rules.registry import Policy
from memmgr.policies.rules.types import Action
from memmgr.policies.trace import TierLink, Trace
from memmgr.policies.trace.live_terms import Made, bursts, decisions, in_triggers

from .remat import DoesNotFit, Rematerialization
from .runtime import RuntimeSimulation


@dataclass(frozen=True, slots=True)
class _Again:
    """An absence that begins in backward."""

    storage: int
    action: Action
    burst: int  # in which it returns; -1: none


class PlannedSimulation(RuntimeSimulation):
    """A simulation of a pass that follows a plan.

    The plan may be `of` another pass that saves the same in the same order: as live, that is all it is known by.
    """

    def __init__(
        self,
        trace: Trace,
        budget_bytes: int,
        policy: Policy,
        tier: TierLink | None,
        made: Made,
        of: Trace | None = None,
    ) -> None:
        super().__init__(trace, budget_bytes, policy, tier)
        self.leads = True
        of = of if of is not None else trace
        order = trace.saved
        index = {s: at for at, s in enumerate(of.saved)}
        if [of.storages[s].size_bytes for s in of.saved] != [trace.storages[s].size_bytes for s in order]:
            raise ValueError("the plan is one for another pass: it does not save the same")
        actions = decisions(made, index, len(order))
        numbers, rows, again = bursts(made, of, index, actions)
        self._action = {s: Action(int(action)) for s, action in zip(order, actions, strict=True)}
        self._burst = {s: int(number) for s, number in zip(order, numbers, strict=True)}  # in which it returns next
        self._bursts: dict[int, list[int]] = defaultdict(list)
        self._again_at: dict[int, list[_Again]] = defaultdict(list)  # by the storage that is used
        self._triggers: dict[int, list[int]] = defaultdict(list)  # the same
        self._carried: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by burst: (later one, bytes)
        for s, number in self._burst.items():
            if number >= 0:
                self._bursts[number].append(s)
        for used, save, action, number in again.tolist():
            self._again_at[order[used]].append(_Again(order[save], Action(action), number))
            if number >= 0:
                self._bursts[number].append(order[save])
        for used, save in in_triggers(made, of, index, actions, {}).tolist():
            self._triggers[order[used]].append(order[save])
        for number, later, nbytes in rows.tolist():
            self._carried[number].append((later, nbytes))
        self._goes = {s for s, action in self._action.items() if action != Action.KEEP}
        self._goes.update(a.storage for found in self._again_at.values() for a in found)
        self._away: set[int] = set()  # the plan lets it go, and autograd may still ask for it
        self._waiting: list[tuple[int, Action]] = []  # to be let go, but the program still has it
        self._again: list[_Again] = []  # may go, and is not back yet
        self._owed: list[int] = []  # triggered, and there was no room so far
        self._kept: dict[int, list[int]] = {}  # by the burst that reads them: what nobody saved

    # ---- what may go

    def saved(self, s: int) -> None:
        if not self.leads or s not in self._goes:
            return
        self._away.add(s)
        if self._action[s] != Action.KEEP:
            self._waiting.append((s, self._action[s]))

    def pressure(self) -> None:
        if self.leads:
            self._settle()
        else:
            super().pressure()

    def replays(self) -> None:
        if self.leads:
            self._settle()

    def _settle(self) -> None:
        """What the program has let go of may go."""
        again, self._again = self._again, []
        for a in again:
            if a.storage not in self._away:
                continue
            if not self.resident[a.storage]:
                self._again.append(a)
                continue
            self._burst[a.storage] = a.burst
            self._waiting.append((a.storage, a.action))
        waiting, self._waiting = self._waiting, []
        for s, action in waiting:
            if s not in self._away or s in self.armed or not self.resident[s]:
                continue
            if self.pins[s] or self.pinned_until[s] > self.clock.computed:
                self._waiting.append((s, action))
                continue
            if action == Action.OFFLOAD and not self.clean[s]:
                self.write(s)
            self.armed[s] = action
            self.armed_bytes += int(self.size[s])

    def release(self, s: int) -> None:
        self._away.discard(s)
        super().release(s)

    def short(self) -> None:
        self.leads = False

    def room(self, need_bytes: int) -> None:
        try:
            super().room(need_bytes)
        except DoesNotFit:
            if not self._forget():
                raise
            super().room(need_bytes)

    # ---- what comes back

    def asked(self, s: int) -> None:
        self._again += self._again_at[s]
        self._owed += self._triggers[s]
        owed, self._owed = self._owed, []
        for at, due in enumerate(owed):
            if due not in self._away or self.resident[due] or not self.clean[due]:
                continue
            if self.clock.used + int(self.size[due]) > self.budget:
                self._owed = owed[at:]  # at the next use
                break
            self.read(due)
            self.incoming.add(due)

    def prefetch(self, k: int) -> None:
        if not (self.leads and self._triggers):
            super().prefetch(k)

    def remake(self, s: int) -> None:
        if not self.leads:
            self._forget()
            return super().remake(s)
        number = self._burst.get(s, -1) if s in self._away else -1
        wanted = sorted([s, *self._gone_of(number, s)], key=lambda i: int(self._order[i]))
        later = [(to, self._gone_of(to, s), nbytes) for to, nbytes in self._carried[number]]
        try:
            if len(wanted) > 1 or later:
                try:
                    together = Rematerialization(self, s, wanted, later, may_spill=False)
                    together.make()
                except DoesNotFit:
                    self._forget()  # the others are a matter of speed
                else:
                    for to, storages in together.kept.items():
                        self._kept.setdefault(to, []).extend(storages)
                    return None
            return super().remake(s)
        finally:
            self.let_go(self._kept.pop(number, []))

    def _gone_of(self, burst: int, but: int) -> list[int]:
        return [
            s
            for s in self._bursts.get(burst, ())
            if s != but and s in self._away and self._gone(s) and self._burst[s] == burst
        ]

    def _forget(self) -> bool:
        """Lets go of what is kept for later bursts. False: there was nothing."""
        kept, self._kept = self._kept, {}
        for storages in kept.values():
            self.let_go(storages)
        return any(kept.values())
