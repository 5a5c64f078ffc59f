"""Finds what to run again: shaving the profile down to the budget, then trading what was chosen for something cheaper."""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left, bisect_right

import numpy as np

from .planner_timeline import Timeline


class Search:
    """Moves on one timeline under one budget. All randomness comes from `seed`, all limits are counts: no clock.

    Attributes:
        work: steps done so far (storages and events looked at); what an effort is measured in.
    """

    def __init__(self, timeline: Timeline, budget_bytes: int, *, smallest_bytes: int = 1, seed: int = 0) -> None:
        self.timeline = timeline
        self.budget = budget_bytes
        self.work = 0
        self.random = random.Random(seed)
        p = timeline.problem
        self.droppable = [s for s, size in enumerate(p.size) if size >= smallest_bytes and p.again[s]]

    # ---- what a recompute takes ----------------------------------------------------------------------------------

    def closure(self, key: int, peak_at: int) -> tuple[float, list[int]] | None:
        """(seconds, keys) of what has to run in `key`'s stage so that its op can run again at `key`; itself included.

        An input that is not kept until then is kept longer where that fits under the budget and frees nothing at
        position `peak_at`, else it is made again too. None: something is gone that cannot be made again.
        """
        t, p = self.timeline, self.timeline.problem
        stage = key - key % t.stride + t.first
        keys = [key]
        seconds = 0.0
        for q in keys:  # grows
            op = q - stage
            seconds += p.cost[op]
            for s in p.inputs[op]:
                if t.resident(s, q):
                    continue
                again = stage + p.maker[s]
                if again in keys:
                    continue
                end = t.reach(s, q)
                # Overwritten in place since then: it cannot be kept, whatever the room.
                lost = end <= t.gone[s] < q and t.made[s][bisect_left(t.made[s], q) - 1] < t.gone[s]
                if not lost:
                    low, high = bisect_right(t.keys, end), bisect_left(t.keys, q)
                    fits = high <= low or int(t.profile[low:high].max()) + p.size[s] <= self.budget
                    if fits and not low <= peak_at < high:
                        continue
                    if not p.again[s] and fits:
                        continue
                if not p.again[s]:
                    return None
                keys.append(again)
        return seconds, keys

    def _apply(self, keys: list[int]) -> list[int]:
        added = []
        for q in sorted(keys):
            if not self.timeline.has(q):
                self.timeline.add(q)
                added.append(q)
        return added

    # ---- shaving -------------------------------------------------------------------------------------------------

    def _gaps(self, at: int, sharpness: float, noise: float) -> list[list[float]]:
        """[seconds per byte, storage, next use, weight] of what is resident at event `at` and not used by it."""
        t, p = self.timeline, self.timeline.problem
        keys, stride, first = t.keys, t.stride, t.first
        over = np.maximum(t.profile - self.budget, 0).astype(np.float64)
        over /= over.max()
        if sharpness != 1.0:
            over **= sharpness
        total = np.concatenate(([0.0], np.cumsum(over))).tolist()
        found = []
        self.work += len(self.droppable)
        for s in self.droppable:
            uses = t.uses[s]
            a = bisect_left(uses, at)
            if a == len(uses) or uses[a] == at or t.pin[s] >= at:
                continue
            made, following = t.made[s], uses[a]
            j = bisect_right(made, at)
            if j == 0 or made[j - 1] == at or (j < len(made) and made[j] < following):
                continue
            if following - following % stride + first + p.maker[s] <= at:
                continue
            before = made[j - 1]
            if a and uses[a - 1] > before:
                before = uses[a - 1]
            weight = p.size[s] * (total[bisect_left(keys, following)] - total[bisect_right(keys, before)])
            if noise:
                weight *= 1.0 + noise * self.random.random()
            found.append([p.cost[p.maker[s]] / weight, float(s), float(following), weight])
        return found

    def shave(self, *, sharpness: float = 1.0, noise: float = 0.0, limit_seconds: float = float("inf")) -> bool:
        """Drops what is cheapest per byte wherever the profile is highest, until it is under the budget.

        Args:
            sharpness: how much more the highest excess counts than a small one, in the worth of a gap.
            noise: random share added to each gap's worth.
            limit_seconds: gives up once so much is run again.

        Returns:
            Whether the budget is met.
        """
        t, p = self.timeline, self.timeline.problem
        stride, first = t.stride, t.first
        while True:
            x = int(t.profile.argmax())
            if t.profile[x] <= self.budget:
                return True
            at = t.keys[x]
            heap = [tuple(row) for row in self._gaps(at, sharpness, noise)]
            heapq.heapify(heap)
            moved = False
            while heap:
                x = bisect_left(t.keys, at)
                height = int(t.profile[x])
                if height <= self.budget:
                    break
                price, s_, _, weight = heap[0]
                s = int(s_)
                self.work += 1
                uses = t.uses[s]
                a = bisect_left(uses, at)
                if a == len(uses) or uses[a] == at or t.reach(s, at) < at:
                    heapq.heappop(heap)
                    continue
                key = uses[a] - uses[a] % stride + first + p.maker[s]
                if key <= at or t.has(key):
                    heapq.heappop(heap)
                    continue
                closure = self.closure(key, x)
                if closure is None:
                    heapq.heappop(heap)
                    continue
                now = closure[0] / weight
                if now > price * 1.0001 and len(heap) > 1:
                    heapq.heapreplace(heap, (now, s_, 0.0, weight))
                    continue
                heapq.heappop(heap)
                added = self._apply(closure[1])
                if int(t.profile[bisect_left(t.keys, at)]) >= height:
                    for q in reversed(added):
                        t.remove(q)
                else:
                    moved = True
                    if t.extra_seconds > limit_seconds:
                        return False
            if not moved:
                return False

    # ---- pruning -------------------------------------------------------------------------------------------------

    def _wanted(self, key: int) -> bool:
        """Whether anything reads what the event makes."""
        t = self.timeline
        for s in t._makes(key % t.stride):
            made = t.made[s]
            j = bisect_left(made, key)
            if t.reach(s, made[j + 1] if j + 1 < len(made) else 1 << 62) > key:
                return True
        return False

    def take_out(self, key: int) -> None:
        """Removes an event and the recomputes of its stage that only it wanted."""
        t, p = self.timeline, self.timeline.problem
        base = key - key % t.stride
        stack = [key]
        while stack:
            q = stack.pop()
            t.remove(q)
            op = q - base - t.first
            if op < 0:
                continue
            for s in p.inputs[op]:
                again = base + t.first + p.maker[s]
                if again not in stack and t.has(again) and again != t.own[base // t.stride] and not self._wanted(again):
                    stack.append(again)

    def hopeless(self, key: int) -> bool:
        """Whether taking the event out cannot fit, seen without doing it."""
        t, p = self.timeline, self.timeline.problem
        x = bisect_left(t.keys, key)
        op = key % t.stride - t.first
        freed = sum(p.size[s] for s in p.inputs[op]) if op >= 0 else 0
        for s in t._makes(key % t.stride):
            made, uses = t.made[s], t.uses[s]
            j = bisect_left(made, key)
            start = made[j - 1]
            b = bisect_left(uses, made[j + 1]) if j + 1 < len(made) else len(uses)
            if not (b and uses[b - 1] > key):
                continue
            if start < t.gone[s] < uses[b - 1]:
                return True
            a = bisect_left(uses, key)
            end = uses[a - 1] if a and uses[a - 1] > start else start
            low = bisect_right(t.keys, end)
            if low < x and int(t.profile[low:x].max()) + p.size[s] - freed > self.budget:
                return True
        return False

    def prune(self, keys: list[int]) -> float:
        """Takes out each of `keys` that the budget does not need; returns the seconds saved."""
        t = self.timeline
        before = t.extra_seconds
        for q in keys:
            self.work += 1
            if not t.has(q) or self.hopeless(q):
                continue
            outer, t.journal = t.journal, []
            self.take_out(q)
            self.work += 5
            if t.peak > self.budget:
                t.undo()
                t.journal = outer
            else:
                done, t.journal = t.journal or [], outer
                if outer is not None:
                    outer.extend(done)
        return before - t.extra_seconds

    def dearest_first(self) -> list[int]:
        """All added events, by seconds per byte, dearest first."""
        t, p = self.timeline, self.timeline.problem

        def worth(q: int) -> float:
            slot = q % t.stride
            size = sum(p.size[s] for s in t._makes(slot))
            return -(p.cost[slot - t.first] if slot >= t.first else 0.0) / max(size, 1)

        return sorted(t.extras(), key=worth)

    def settle(self, rounds: int = 3) -> None:
        """Prunes until nothing more can go."""
        for _ in range(rounds):
            if self.prune(self.dearest_first()) == 0.0:
                return
