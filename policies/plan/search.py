"""Finds which ops run again: shaves the profile down to the budget, then trades chosen recomputations for cheaper ones."""

from __future__ import annotations

import heapq
import itertools
import random
from bisect import bisect_left, bisect_right

import numpy as np

from .timeline import Timeline

_NO_LIMIT = 1 << 62
_FURTHER = 2.0  # a candidate this much more expensive than its rival is not evaluated to the end: it waits for its turn
_SETTLE = 10  # steps for removing needless recomputations of a timeline, as a multiple of those of finding it
_MANY = 4_000  # events beyond the program's own: above this number they are taken out by the batch first
# Trading continues from a timeline that is worse than the best by up to this share, and returns to the best after so
# many turns without an improvement. Without that most passes end where no single trade helps.
_WANDER, _TURNS = 0.01, 30


class Search:
    """Moves on one timeline under one budget. All randomness comes from `seed`, all limits are counts: no clock.

    Attributes:
        budget: bytes.
        bias: factor on the price of dropping a storage; 1 where there is none.
        droppable: the storages that may be dropped.
    """

    def __init__(
        self,
        timeline: Timeline,
        budget_bytes: int,
        *,
        seed: int = 0,
        bias: dict[int, float] | None = None,
    ) -> None:
        self.timeline = timeline
        self.budget = budget_bytes
        self._looked = 0
        self.random = random.Random(seed)
        self.bias = bias or {}
        p = timeline.problem
        self.droppable = [s for s, size in enumerate(p.size) if size > 0 and timeline.can_restore(s)]
        self._cost = [timeline.prices.get(s, p.cost[k]) for s, k in enumerate(p.maker)]

    @property
    def work(self) -> int:
        """Steps done so far, 1 to 2 us each: the unit of an effort."""
        return self._looked + self.timeline.changes

    # ---- cost of a recomputation -------------------------------------------------------------------------------

    def closure(self, key: int, peak_at: int, most_seconds: float = float("inf")) -> tuple[float, list[int]] | None:
        """(seconds, keys) of the ops that must run in `key`'s stage before its op can run again; itself included.

        An input that is not kept until then is kept longer where that fits under the budget and frees nothing at
        position `peak_at`, else it is made again too. None: an input is freed and cannot be made again. Above
        `most_seconds` the search ends: the seconds found by then are too few.
        """
        t, p = self.timeline, self.timeline.problem
        events, profile, pin, gone, stride = t.keys, t.profile, t.pin, t.gone, t.stride
        row = key - key % stride
        keys, seen = [key], {key}
        seconds = 0.0
        for q in keys:  # grows while it runs; all keys are of one row, so storages made in it are resident
            op = q - row - t.first
            if op < 0:
                seconds += t.prices[q - row]
                continue
            seconds += p.cost[op]
            if seconds > most_seconds:
                break
            high = -1
            for s in p.inputs[op]:
                if pin[s] >= q:
                    continue
                made, uses = t.made[s], t.uses[s]
                j = bisect_left(made, q)
                start = made[j - 1]
                b = bisect_left(uses, made[j]) if j < len(made) else len(uses)
                end = uses[b - 1] if b and uses[b - 1] > start else start
                lost = start < gone[s] < q  # overwritten in place since: it cannot be kept until then
                if not lost and (start >= row or end >= q):
                    continue
                back = t.restore(s, q)
                if back in seen:
                    continue
                if not lost:
                    if not t.can_restore(s, q):
                        continue
                    low = bisect_right(events, end)
                    if high < 0:
                        high = bisect_left(events, q)
                    if not low <= peak_at < high and (
                        high <= low or int(profile[low:high].max()) + p.size[s] <= self.budget
                    ):
                        continue
                elif not t.can_restore(s, q):
                    return None
                seen.add(back)
                keys.append(back)
        self._looked += len(keys)
        return seconds, keys

    def _apply(self, keys: list[int]) -> list[int]:
        added = []
        for q in sorted(keys):
            if not self.timeline.has(q):
                self.timeline.add(q)
                added.append(q)
        return added

    # ---- shaving -------------------------------------------------------------------------------------------------

    def _gaps(
        self, at: int, sharpness: float, noise: float, splitting: bool, most: int = _NO_LIMIT
    ) -> list[tuple[float, int, float]]:
        """(seconds per byte, storage, weight) of the storages that are resident at event `at` and that it does not use."""
        t, p = self.timeline, self.timeline.problem
        keys, cost = t.keys, self._cost
        over = np.maximum(t.profile - self.budget, 0).astype(np.float64)
        over /= over.max()
        if sharpness != 1.0:
            over **= sharpness
        total = np.concatenate(([0.0], np.cumsum(over))).tolist()
        found = []
        self._looked += len(self.droppable) // 4
        for s in self.droppable:
            uses = t.uses[s]
            a = bisect_left(uses, at)
            if a == len(uses) or uses[a] == at or t.pin[s] >= at:
                continue
            made, following = t.made[s], uses[a]
            j = bisect_right(made, at)
            if j == 0 or made[j - 1] == at or (j < len(made) and made[j] < following):
                continue
            if not splitting and t.restore(s, following) <= at:
                continue
            before = made[j - 1]
            if a and uses[a - 1] > before:
                before = uses[a - 1]
            weight = min(p.size[s], most) * (total[bisect_left(keys, following)] - total[bisect_right(keys, before)])
            if self.bias:
                weight /= self.bias.get(s, 1.0)
            if noise:
                weight *= 1.0 + noise * self.random.random()
            found.append((cost[s] / weight, s, weight))
        return found

    def shave(
        self,
        *,
        sharpness: float = 1.0,
        noise: float = 0.0,
        limit_seconds: float = float("inf"),
        limit_work: int = _NO_LIMIT,
        splitting: bool = False,
        fitting: bool = False,
    ) -> bool:
        """Drops the storage that is cheapest per byte wherever the profile is highest, until it is under the budget.

        Args:
            sharpness: how much more the highest excess counts than a small one, in the worth of a gap.
            noise: random share added to each gap's worth.
            limit_seconds: gives up once so much is run again.
            limit_work: gives up after so many steps; within one peak, after four times as many.
            splitting: may recompute in another order than the program's.
            fitting: bytes beyond the excess over the budget count for nothing.

        Returns:
            Whether the budget is met.
        """
        t = self.timeline
        until = self.work + limit_work
        while True:
            x = int(t.profile.argmax())
            if t.profile[x] <= self.budget:
                return True
            most = int(t.profile[x]) - self.budget if fitting else _NO_LIMIT
            heap = self._gaps(t.keys[x], sharpness, noise, splitting, most)
            heapq.heapify(heap)
            lower = self._lower(t.keys[x], heap, until=until + 3 * limit_work)
            if not lower or t.extra_seconds > limit_seconds or self.work > until:
                return False

    def _lower(
        self, at: int, heap: list[tuple[float, int, float]], ceiling: int = _NO_LIMIT, until: int = _NO_LIMIT
    ) -> bool:
        """Drops from the cheapest on until event `at` fits; whether anything was won. No peak goes above `ceiling`.

        Gives up when `work` is at `until`.
        """
        t = self.timeline
        won = False
        while heap and self.work < until:
            x = bisect_left(t.keys, at)
            height = int(t.profile[x])
            if height <= self.budget:
                return True
            price, s, weight = heap[0]
            self._looked += 2
            uses = t.uses[s]
            a = bisect_left(uses, at)
            if a == len(uses) or uses[a] == at or t.reach(s, at) < at or not t.can_restore(s, uses[a]):
                heapq.heappop(heap)
                continue
            key = t.restore(s, uses[a])
            if key <= at:
                if not t.split(at):
                    heapq.heappop(heap)
                    continue
                at -= t.stride
            rival = min((one[0] for one in heap[1:3]), default=float("inf"))
            closure = None if t.has(key) else self.closure(key, x, _FURTHER * max(price, rival) * weight)
            if closure is None:
                heapq.heappop(heap)
                continue
            now = closure[0] / weight
            if now > price * 1.0001 and len(heap) > 1:
                heapq.heapreplace(heap, (now, s, weight))
                continue
            heapq.heappop(heap)
            added = self._apply(closure[1])
            if int(t.profile[bisect_left(t.keys, at)]) < height and (ceiling == _NO_LIMIT or t.peak <= ceiling):
                won = True
            else:
                for q in reversed(added):
                    t.remove(q)
        return won

    def squeeze(self, *, sharpness: float, limit_work: int) -> bool:
        """`shave` for budgets near the floor: a decision that led into a dead end is taken back and costs more later.

        A dropped storage must not raise the peak. Where no storage can be dropped at the highest event, the storages
        that its stage recomputes are kept instead, at four times the price next time.
        """
        t, p = self.timeline, self.timeline.problem
        until = self.work + limit_work
        while self.work < until:
            x = int(t.profile.argmax())
            if t.profile[x] <= self.budget:
                return True
            at = t.keys[x]
            heap = self._gaps(at, sharpness, 0.0, True)
            heapq.heapify(heap)
            if self._lower(at, heap, int(t.profile[x]), until + limit_work):
                continue
            stage = t.stage(at)
            low = bisect_left(t.keys, stage * t.rows * t.stride)
            high = bisect_left(t.keys, t.own[stage])
            if low == high:
                return False
            extras = t.keys[low:high]
            read = {s for q in (*extras, t.own[stage]) if 0 <= t.op(q) < p.n_ops for s in p.inputs[t.op(q)]}
            for q in extras:
                for s in t._makes(q % t.stride):
                    if s in read:
                        self.bias[s] = 2.0 * self.bias.get(s, 1.0)
            for q in reversed(extras):
                if t.has(q):
                    self.take_out(q)
            self._looked += 50
        return False

    # ---- pruning -------------------------------------------------------------------------------------------------

    def _wanted(self, key: int) -> bool:
        """Tells if any event reads an output of this event."""
        t = self.timeline
        for s in t._makes(key % t.stride):
            made = t.made[s]
            j = bisect_left(made, key)
            if t.reach(s, made[j + 1] if j + 1 < len(made) else 1 << 62) > key:
                return True
        return False

    def _alone(self, key: int) -> bool:
        """Tells if an earlier value is dropped before this event and a later event reads an output of it."""
        t = self.timeline
        for s in t._makes(key % t.stride):
            made = t.made[s]
            j = bisect_left(made, key)
            end = t.reach(s, made[j + 1] if j + 1 < len(made) else 1 << 62)
            if end > key and made[j - 1] < t.gone[s] < end:
                return True
        return False

    def take_out(self, key: int) -> None:
        """Removes an event and the recomputes of its stage that only it wanted; not where nothing can be kept in its stead."""
        t, p = self.timeline, self.timeline.problem
        if self._alone(key):
            return
        base = key - key % t.stride
        stack = [key]
        while stack:
            q = stack.pop()
            t.remove(q)
            op = q - base - t.first
            if op < 0:
                continue
            for s in p.inputs[op]:
                for back in (base + s, base + t.first + p.maker[s]):
                    if back not in stack and back != t.own[t.stage(base)] and t.has(back) and not self._wanted(back):
                        stack.append(back)

    def hopeless(self, key: int) -> bool:
        """Tells from the events before its row that taking the event out cannot fit, without doing it."""
        t, p, keys = self.timeline, self.timeline.problem, self.timeline.keys
        row = key - key % t.stride
        changes = []  # (position from which on, bytes more)

        def after(uses: list[int], start: int, key: int) -> int:
            a = bisect_left(uses, key)
            return bisect_right(keys, max(start, uses[a - 1]) if a else start)

        for s in t._makes(key - row):
            made, uses = t.made[s], t.uses[s]
            j = bisect_left(made, key)
            start = made[j - 1]
            b = bisect_left(uses, made[j + 1]) if j + 1 < len(made) else len(uses)
            if not (b and uses[b - 1] > key):
                continue
            if start < t.gone[s] < uses[b - 1]:
                return True
            changes.append((after(uses, start, key), p.size[s]))
        if not changes:
            return False
        # Inputs that the row makes for it go with it, as if for it alone; earlier inputs stay for a shorter time.
        todo, read = [key], set()
        for q in todo:  # grows
            for s in p.inputs[q - row - t.first] if q - row >= t.first else ():
                if s in read or t.pin[s] >= q:
                    continue
                read.add(s)
                made, uses = t.made[s], t.uses[s]
                j = bisect_left(made, q)
                start = made[j - 1]
                if start >= row:
                    todo.append(start)
                    continue
                b = bisect_left(uses, made[j]) if j < len(made) else len(uses)
                if uses[b - 1] < row + t.stride:
                    changes.append((after(uses, start, row), -p.size[s]))
        changes.sort()
        end, more = bisect_left(keys, row), 0
        for (low, size), (high, _) in itertools.pairwise([*changes, (end, 0)]):
            more += size
            if more > 0 and low < min(high, end) and int(t.profile[low : min(high, end)].max()) + more > self.budget:
                return True
        return False

    def prune(self, keys: list[int], until: int = _NO_LIMIT) -> float:
        """Takes out each of `keys` that the budget does not need, until `work` is at `until`; returns the seconds saved."""
        t = self.timeline
        before = t.extra_seconds
        for q in keys:
            if self.work > until:
                break
            self._looked += 2
            if not t.has(q) or self.hopeless(q):
                continue
            outer, t.journal = t.journal, []
            self.take_out(q)
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
            return -(p.cost[slot - t.first] if slot >= t.first else t.prices[slot]) / max(size, 1)

        return sorted(t.extras(), key=worth)

    def settle(self, effort: int, rounds: int = 3) -> None:
        """Prunes until nothing more can go, or `_SETTLE` times `effort` steps are done."""
        until, t = self.work + _SETTLE * effort, self.timeline
        while len(t.keys) > t.problem.n_ops + _MANY and t.thin(self.dearest_first(), self.budget):
            pass
        for _ in range(rounds):
            if self.prune(self.dearest_first(), until) == 0.0:
                return

    # ---- trading -------------------------------------------------------------------------------------------------

    def improve(self, work: int, enough_seconds: float = 0.0) -> None:
        """Takes some recomputes out and lets shaving, with noise, find others, until `work` more steps are done or no more than
        `enough_seconds` run again. The bias counts in every other turn, by chance.

        A timeline that is a little worse is continued for some turns (record-to-record travel: Dueck, J. Comp. Phys.
        104, 1993); at the end the best one is restored. The timeline has to meet the budget, and does afterwards.
        """
        t = self.timeline
        until = self.work + work
        best, since = t.extra_seconds, 0
        biases: tuple[dict[int, float], ...] = ({}, self.bias)
        way: list[tuple[str, int, int]] = []  # changes since the best
        while self.work < until and best > enough_seconds:
            t.mark()
            self.bias = self.random.choice(biases)
            self._ruin()
            kept = self.shave(
                sharpness=self.random.choice((0.0, 0.5, 1.0, 3.0)),
                noise=self.random.choice((0.2, 1.0, 3.0)),
                limit_seconds=best * 1.1,
                limit_work=until - self.work,
                fitting=self.random.random() < 0.5,
            )
            if kept:
                extras = t.extras()
                self.prune(extras if len(extras) < 60 else self.random.sample(extras, 60))
            self._looked += 20
            since += 1
            if not kept or t.extra_seconds > best * (1 + _WANDER):
                t.undo()
            elif t.extra_seconds < best * (1 - 1e-12):
                best, since, way = t.extra_seconds, 0, []
            else:
                way += t.journal or []
            if way and (since >= _TURNS or self.work >= until):
                t.journal, way, since = way, [], 0
                t.undo()
            t.journal = None
        self.bias = biases[1]

    def _ruin(self) -> None:
        t = self.timeline
        extras = t.extras()
        count = min(len(extras), self.random.choice((1, 2, 4, 8, 16, 32)))
        if self.random.random() < 0.5:
            at = self.random.randrange(len(extras))
            chosen = extras[max(0, at - count // 2) : at - count // 2 + count]
        else:  # the same op, or its neighbours in the program, wherever they run again
            middle = self.random.choice(extras) % t.stride
            chosen = sorted(extras, key=lambda q: abs(q % t.stride - middle))[:count]
        for q in sorted(chosen, reverse=True):  # readers before the events that they read
            if t.has(q):
                self.take_out(q)
