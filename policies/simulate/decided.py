"""Runs decisions that were made before the pass (Capuchin, TACO), with a dynamic policy as the net beneath them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memmgr.policies.rules.registry import Policy
from memmgr.policies.rules.types import Action
from memmgr.policies.trace import TierLink, Trace

from .simulator import Run, Simulation, finished

ON_DEMAND = -1


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about one storage."""

    storage: int
    action: Action  # EVICT or OFFLOAD
    evicted_access: int  # the op after which it is evicted: its last access before the peak
    back_access: int  # the op that reads it next
    trigger: int = ON_DEMAND  # the op before which it begins to be restored; `ON_DEMAND`: at `back_access`


@dataclass(frozen=True, slots=True)
class Accesses:
    """The accesses of the unmanaged pass and their times: the input of a planner."""

    start: list[float]  # seconds at which each op starts; one more entry: the end
    ops: list[list[int]]  # per storage, the ops that access it, its maker first
    used_bytes: list[int]  # resident after each op has made its outputs

    @classmethod
    def of(cls, trace: Trace) -> Accesses:
        """From a trace."""
        start, ops, used = [0.0], [[s.maker] for s in trace.storages], []
        live = 0
        for k, op in enumerate(trace.ops):
            start.append(start[-1] + op.seconds)
            for s in op.inputs:
                ops[s].append(k)
            live += sum(trace.storages[s].size_bytes for s in op.outputs) - trace.handed_bytes[k]
            used.append(live)
            live -= sum(trace.storages[s].size_bytes for s in trace.released_before[k + 1]) - trace.handed_bytes[k]
        return cls(start, ops, used)

    def around(self, storage: int, at: int) -> tuple[int, int] | None:
        """(last access up to op `at`, first one after it); None if there are not both."""
        before = [k for k in self.ops[storage] if k <= at]
        after = [k for k in self.ops[storage] if k > at]
        return (before[-1], after[0]) if before and after else None


def run_decisions(
    trace: Trace, budget_bytes: int, policy: Policy, tier: TierLink | None, decisions: Sequence[Decision]
) -> tuple[Run, list[int]]:
    """One pass; also the storages that were waited for on their way back."""
    run = _Decided(trace, budget_bytes, policy, tier, decisions)
    return finished(run), run.late


class _Decided(Simulation):
    """A simulation with decisions. A copy is written behind the ops; its storage leaves when it is whole, or earlier, with
    a wait, if room is short."""

    def __init__(
        self, trace: Trace, budget_bytes: int, policy: Policy, tier: TierLink | None, decisions: Iterable[Decision]
    ) -> None:
        super().__init__(trace, budget_bytes, policy, tier)
        self.leaving: dict[int, list[Decision]] = defaultdict(list)
        self.coming: dict[int, list[int]] = defaultdict(list)
        for d in decisions:
            self.leaving[d.evicted_access].append(d)
            if d.trigger != ON_DEMAND:
                self.coming[d.trigger].append(d.storage)
        self.written: list[int] = []  # being written, to leave afterwards
        self.late: list[int] = []
        self.due: list[int] = []  # triggered, but there was no room yet

    def after(self, k: int) -> None:
        for d in self.leaving[k]:
            s = d.storage
            if not self.resident[s] or self.pinned_until[s] > k + 1:
                continue
            if d.action == Action.OFFLOAD:
                self.write(s)
                self.written.append(s)
            else:
                self.drop(s)

    def before(self, k: int) -> None:
        self._leave(wait=False)
        self.due += self.coming[k]
        self.due = [s for s in self.due if self.clean[s] and not self.resident[s]]
        while self.due and self.clock.used + int(self.size[self.due[0]]) <= self.budget:
            self.read(self.due.pop(0))
        for s in self.trace.ops[k].inputs:
            if self.clean[s] and (not self.resident[s] or self.clock.ready_at.get(s, 0.0) > self.clock.now):
                self.late.append(s)

    def room(self, need_bytes: int) -> None:
        if self.clock.used + need_bytes > self.budget:
            self._leave(wait=False)
        while self.written and self.clock.used + need_bytes > self.budget:
            if not self._leave(wait=True):
                break
        super().room(need_bytes)

    def _leave(self, wait: bool) -> bool:
        """Frees storages whose writes have ended; with `wait`, also the oldest one that is being written. Returns if
        any was freed.
        """
        for at, s in enumerate(self.written):
            if self.pins[s]:
                continue
            if wait or self.clock.copied_at.get(s, 0.0) <= self.clock.now or not self.resident[s]:
                del self.written[at]
                if self.resident[s]:
                    self.drop(s)
                return True if wait else self._leave(wait) or True
        return False
