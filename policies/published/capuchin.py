"""Capuchin (Peng et al., ASPLOS 2020), as published: decide from one measured pass which tensors are swapped and which
are recomputed.

- Candidates: tensors with more than one access that are alive at the peak.
- Swap: `SwapTime = bytes / bandwidth`; free time `FT = (back_access - SwapTime) - (evicted_access + SwapTime)`. The longest
  free time first, as long as it is not negative: such a swap is hidden.
- The link is exclusive: swaps in follow one another, so one starts at the latest when the next (in order of use, backwards)
  does. The in-trigger is the last op that starts before that, but not inside the peak window (where memory passes the
  budget): there the swap in would evict another tensor.
- If that is not enough, the exposed time of the next best swap (-FT, or the time that it adds to the waits of the
  exclusive link) is compared with the recompute time of the candidate with the most memory saving per second (MSPS).
  The cheaper one is taken. Recompute times are updated as sources are chosen, too.
- Feedback: a swap in that was waited for gets its trigger moved earlier by 5 % of its swap time in the next pass.
- A tensor that is absent at run time is swapped in on demand, least recently used first (its passive mode).

Known limitations: all of the above counts a tensor's bytes once, at the peak; ranges inside which memory is short twice are
not seen. Without a link only MSPS is left.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from dataclasses import replace

import numpy as np

from memmgr.policies.rules.directors import DIRECTORS
from memmgr.policies.rules.filters import FILTERS
from memmgr.policies.rules.prefetchers import off
from memmgr.policies.rules.registry import Policy
from memmgr.policies.rules.types import Action
from memmgr.policies.simulate.decided import ON_DEMAND, Accesses, Decision, run_decisions
from memmgr.policies.simulate.simulator import Run
from memmgr.policies.trace import OpKind, TierLink, Trace

FEEDBACK_SHARE = 0.05
PASSES = 20
"""Passes of feedback at most; it ends as soon as no swap is late."""


def capuchin(trace: Trace, budget_bytes: int, tier: TierLink | None = None) -> Run:
    """Guided execution after feedback: the best of the passes. `tier`: where swaps go; None: recompute only."""
    swap = tier is not None
    net = Policy(
        "capuchin", FILTERS["lru" if swap else "msps"], DIRECTORS["offload" if swap else "evict"], off
    )  # fmt: skip
    accesses = Accesses.of(trace)
    chosen = choose(trace, accesses, budget_bytes, tier)
    earlier: dict[int, float] = {}
    best: Run | None = None
    for _ in range(PASSES if swap else 1):
        decisions = triggers(trace, accesses, budget_bytes, tier, chosen, earlier)
        run, late = run_decisions(trace, budget_bytes, net, tier, decisions)
        if best is None or (run.feasible, -run.seconds) > (best.feasible, -best.seconds):
            best = run
        moved = {d.storage for d in decisions if d.action == Action.OFFLOAD} & set(late)
        if not moved or tier is None:
            break
        for s in moved:
            earlier[s] = earlier.get(s, 0.0) + FEEDBACK_SHARE * _swap_seconds(trace, s, tier.read_bytes_per_second)
    assert best is not None
    return best


def choose(trace: Trace, accesses: Accesses, budget_bytes: int, tier: TierLink | None) -> list[Decision]:
    """Which tensors are evicted, and how, until the rest fits the budget at the peak. Triggers are not set yet."""
    peak, at = trace.unmanaged_peak
    missing = peak - budget_bytes
    around = {}
    for s, storage in enumerate(trace.storages):
        if storage.maker < at < storage.released and s not in trace.constants and storage.size_bytes > 0:
            pair = accesses.around(s, at)
            if pair is not None and pair[0] < at:
                around[s] = pair
    swaps: list[tuple[float, int]] = []
    if tier is not None and tier.write_bytes_per_second > 0 and tier.read_bytes_per_second > 0:
        swaps = [(-_free_seconds(trace, accesses, s, around[s], tier), s) for s in around]
    heapq.heapify(swaps)
    recompute = _Recompute(trace, accesses, around)
    lane = _Swaps(accesses, tier, at) if tier is not None else None
    decisions: list[Decision] = []
    while missing > 0:
        while swaps and swaps[0][1] in recompute.chosen:
            heapq.heappop(swaps)
        best = recompute.best()
        s = swaps[0][1] if swaps else -1
        exposed = lane.exposed_with(trace.storages[s].size_bytes, *around[s]) if swaps and lane else 0.0
        if swaps and (best is None or max(0.0, swaps[0][0], exposed) <= best[0]):
            heapq.heappop(swaps)
            action = Action.OFFLOAD
            if lane is not None:
                lane.take(trace.storages[s].size_bytes, *around[s])
        elif best is not None:
            s, action = best[1], Action.EVICT
        else:
            break
        recompute.take(s, evict=action == Action.EVICT)
        decisions.append(Decision(s, action, *around[s]))
        missing -= trace.storages[s].size_bytes
    return decisions


def triggers(
    trace: Trace, accesses: Accesses, budget_bytes: int, tier: TierLink | None, chosen: list[Decision], earlier: dict[int, float]
) -> list[Decision]:  # fmt: skip
    """Sets the in-triggers: last use first, each swap in ending when the one after it starts."""
    if tier is None:
        return chosen
    start = accesses.start
    over = [k for k, used in enumerate(accesses.used_bytes) if used > budget_bytes]
    window_end = over[-1] if over else -1
    result = [d for d in chosen if d.action != Action.OFFLOAD]
    link_from = float("inf")
    for d in sorted((d for d in chosen if d.action == Action.OFFLOAD), key=lambda d: -d.back_access):
        begin = min(link_from, start[d.back_access]) - _swap_seconds(trace, d.storage, tier.read_bytes_per_second)
        link_from = begin
        begin -= earlier.get(d.storage, 0.0)
        trigger = max(bisect_right(start, begin) - 1, window_end + 1, d.evicted_access + 1)
        result.append(replace(d, trigger=trigger if trigger < d.back_access else ON_DEMAND))
    return result


def _swap_seconds(trace: Trace, s: int, rate: float) -> float:
    return trace.storages[s].size_bytes / rate


def _free_seconds(trace: Trace, accesses: Accesses, s: int, around: tuple[int, int], tier: TierLink) -> float:
    evicted, back = around
    return (accesses.start[back] - _swap_seconds(trace, s, tier.read_bytes_per_second)) - (
        accesses.start[evicted + 1] + _swap_seconds(trace, s, tier.write_bytes_per_second)
    )


class _Swaps:
    """The exclusive link: how long compute waits for the swaps chosen so far, out before the peak and in after it."""

    def __init__(self, accesses: Accesses, tier: TierLink, at: int) -> None:
        self.start, self.tier, self.peak_seconds = accesses.start, tier, accesses.start[at]
        self.room: list[list[tuple[float, float]]] = [
            [],
            [],
        ]  # per direction, sorted: (seconds from the peak, swap seconds)
        self.waits = 0.0

    def _rows(self, size: int, evicted: int, back: int) -> tuple[tuple[float, float], tuple[float, float]]:
        return (
            (self.peak_seconds - self.start[evicted + 1], size / self.tier.write_bytes_per_second),
            (self.start[back] - self.peak_seconds, size / self.tier.read_bytes_per_second),
        )

    def _total(self, extra: tuple[tuple[float, float], tuple[float, float]] | None) -> float:
        """The largest excess of copy time over the time that there is. The swaps nearest the peak share the least time."""
        total = 0.0
        for direction in (0, 1):
            rows = np.array(self.room[direction] + ([extra[direction]] if extra else []), dtype=np.float64).reshape(
                -1, 2
            )
            rows = rows[np.argsort(rows[:, 0], kind="stable")]
            total += max(0.0, float((rows[:, 1].cumsum() - rows[:, 0]).max(initial=0.0)))
        return total

    def exposed_with(self, size: int, evicted: int, back: int) -> float:
        """Wait that one more swap adds."""
        return self._total(self._rows(size, evicted, back)) - self.waits

    def take(self, size: int, evicted: int, back: int) -> None:
        for rows, row in zip(self.room, self._rows(size, evicted, back), strict=True):
            rows.append(row)
        self.waits = self._total(None)


class _Recompute:
    """Candidates for recomputing by MSPS. Times only grow as sources are chosen, so the top of the heap is re-evaluated
    until it stays on top."""

    def __init__(self, trace: Trace, accesses: Accesses, around: dict[int, tuple[int, int]]) -> None:
        self.trace, self.around = trace, around
        self.chosen: set[int] = set()  # recomputed or swapped
        self.evicted: set[int] = set()
        self.heap = [
            (self._seconds(s) / trace.storages[s].size_bytes, s)
            for s in around
            if trace.ops[trace.storages[s].maker].kind == OpKind.COMPUTE
        ]
        heapq.heapify(self.heap)

    def _seconds(self, s: int) -> float:
        """Seconds of its own op and of all sources that are not alive at its back access."""
        back = self.around[s][1]
        storages, ops = self.trace.storages, self.trace.ops
        total, seen, todo = 0.0, {storages[s].maker}, [storages[s].maker]
        while todo:
            k = todo.pop()
            total += ops[k].seconds
            for i in ops[k].inputs:
                gone = storages[i].released <= back or i in self.evicted
                if gone and ops[storages[i].maker].kind == OpKind.COMPUTE and storages[i].maker not in seen:
                    seen.add(storages[i].maker)
                    todo.append(storages[i].maker)
        return total

    def best(self) -> tuple[float, int] | None:
        """(recompute time, storage) of the highest MSPS; None if there is none left."""
        while self.heap:
            _, s = self.heap[0]
            if s in self.chosen:
                heapq.heappop(self.heap)
                continue
            seconds = self._seconds(s)
            size = self.trace.storages[s].size_bytes
            heapq.heapreplace(self.heap, (seconds / size, s))
            if self.heap[0][1] == s:
                return seconds, s
        return None

    def take(self, s: int, *, evict: bool) -> None:
        self.chosen.add(s)
        if evict:
            self.evicted.add(s)
