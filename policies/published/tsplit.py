"""TSPLIT (Nie, Miao, Yang, Cui, ICDE 2022): a model-guided planner that goes from bottleneck to bottleneck.

The ops are looked at in order. Where one does not fit, the tensor and the eviction method (swap, or drop and make
again) with the least time for each byte, delta T / delta M, are taken, until it fits. A swap costs the part of its
copies that the ops in between, and the copies chosen before, do not hide. Making again costs the ops that lead from
resident tensors to the tensor.

The system is named after the split of a tensor and its op into parts. That would change the bits, so here a tensor is
one part. The plan is made for the budget, and for a little less if it needs more by the rules.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from memmgr.policies.simulate.decided import Accesses
from memmgr.policies.simulate.simulator import Run
from memmgr.policies.trace import TierLink, Trace
from memmgr.policies.trace.schedule import Step

from .chain import Chain
from .copies import Swap, around_shortage, with_copies
from .runs import fastest, judged, runs_of

TIGHTER = (1.0, 0.97, 0.93, 0.88, 0.8, 0.7)


def tsplit(trace: Trace, budget_bytes: int, tier: TierLink | None = None) -> Run:
    """With a tier or without one."""
    runs: list[Run] = []
    for share in TIGHTER:
        plan = _Evictions(trace, int(share * budget_bytes), tier)
        plan.make()
        runs.append(judged("tsplit", trace, budget_bytes, tier, plan.events()))
        if runs[-1].feasible:
            break
    return fastest(runs)


@dataclass
class _Evictions:
    """Which tensors are evicted between which uses."""

    trace: Trace
    budget: int
    tier: TierLink | None
    swapped: list[tuple[Swap, int]] = field(default_factory=list)  # and the bottleneck that each is for
    dropped: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))  # by the op that wants them again
    away: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))  # between these uses

    def __post_init__(self) -> None:
        self.chain = Chain(self.trace)
        self.accesses = Accesses.of(self.trace)
        self.used = list(self.accesses.used_bytes)

    def make(self) -> None:
        """From the first op that does not fit to the last."""
        for k in range(len(self.trace.ops)):
            if self.used[k] <= self.budget:
                continue
            found = []
            for s, uses in enumerate(self.accesses.ops):
                pair = self.accesses.around(s, k) if uses[0] < k < uses[-1] else None
                if pair is None or pair[0] == k or s in self.trace.constants or not self.trace.storages[s].size_bytes:
                    continue
                if pair not in self.away[s]:
                    found.append((*self._cheaper(s, *pair, k), s, pair))
            found.sort(key=lambda one: (one[0] / self.trace.storages[one[2]].size_bytes, one[2]))
            for seconds, swap, s, pair in found:
                if self.used[k] <= self.budget:
                    break
                if seconds < float("inf"):
                    self._take(s, *pair, at=k if swap else None)

    def _cheaper(self, s: int, out: int, back: int, at: int) -> tuple[float, bool]:
        """(seconds, whether it is swapped)."""
        again = float("inf")
        maker = self.trace.storages[s].maker
        if self.chain.again[maker]:
            ops = self.chain.rematerialize({s}, 0, back, self._there(s, back, maker))
            again = sum(self.trace.ops[k].seconds for k in ops)
        if self.tier is None or min(self.tier.write_bytes_per_second, self.tier.read_bytes_per_second) <= 0:
            return again, False
        size, start = self.trace.storages[s].size_bytes, self.accesses.start
        write, read = size / self.tier.write_bytes_per_second, size / self.tier.read_bytes_per_second
        for other, moment in self.swapped:  # whose copies are in the way: those with overlapping times
            bytes_ = self.trace.storages[other.storage].size_bytes
            write += bytes_ / self.tier.write_bytes_per_second if other.out < at and out < moment else 0.0
            read += bytes_ / self.tier.read_bytes_per_second if moment < back and at < other.back else 0.0
        waits = max(0.0, write - (start[at] - start[out + 1])) + max(0.0, read - (start[back] - start[at]))
        return (waits, True) if waits <= again else (again, False)

    def _there(self, target: int, back: int, maker: int) -> set[int]:
        """The sources of `target` that are resident when it is made again."""
        found: set[int] = set()
        todo, seen = [maker], {maker}
        while todo:
            for s in self.trace.ops[todo.pop()].inputs:
                gone = any(a < back < b or (a < back == b) for a, b in self.away[s])
                if self.accesses.ops[s][-1] >= back and not gone:
                    found.add(s)
                elif (k := self.trace.storages[s].maker) not in seen:
                    seen.add(k)
                    todo.append(k)
        return found - {target}

    def _take(self, s: int, out: int, back: int, *, at: int | None) -> None:
        self.away[s].append((out, back))
        if at is not None:
            self.swapped.append((Swap(s, out, back), at))
        else:
            self.dropped[back].add(s)
        for k in range(out + 1, back):
            self.used[k] -= self.trace.storages[s].size_bytes

    def events(self) -> list[Step]:
        """The pass with its recomputations and copies."""
        events: list[Step] = []
        at: list[int] = []  # the event of each op
        for k in range(len(self.trace.ops)):
            ops: set[int] = set()
            for s in sorted(self.dropped.get(k, ())):
                ops.update(self.chain.rematerialize({s}, 0, k, self._there(s, k, self.trace.storages[s].maker)))
            events += runs_of(sorted(ops), again=True)
            at.append(len(events))
            events += runs_of([k], again=False)
        if self.tier is None:
            return events
        swaps = around_shortage((swap for swap, _ in self.swapped), self.accesses.used_bytes, self.budget)
        moved = [
            Swap(w.storage, at[w.out], at[w.back], by=None if w.by is None else at[w.by], not_before=at[w.not_before])
            for w in swaps
        ]
        return with_copies(self.trace, events, moved, self.tier)
