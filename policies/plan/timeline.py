"""The planner's model of a pass: when each op runs, and how many bytes are resident at each moment.

A plan is a sequence of *events*: every op of the program once, in order (*stage* t ends with op t), before it in its stage
the ops that are run again and the storages that are read back. The sequence alone decides which storages are resident:
a storage stays from the event that makes it to the last event that reads it before it is made anew. So dropping a
storage between two uses is adding an event, keeping it is taking one out, and both are local: `Timeline` keeps the
profile of resident bytes up to date in time proportional to the storage's uses. This is Checkmate's space (R[t, i],
S[t, i]) with the retention intervals of Moccasin as its only state.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator

import numpy as np

from memmgr.policies.rules.types import Ints
from memmgr.policies.trace.columns import Problem

_NEVER = 1 << 62


class Timeline:
    """Events in order and the bytes resident at each.

    An event's key is `row * stride + slot`; slot s < number of storages reads storage s back, slot `first + i` runs op i.
    Keys sort as events run. A stage has `rows` rows, and all happens in the last: reads back first, then recomputes in the
    program's order, then the stage's own op. Where another order needs less room, `split` moves events to rows before.

    Attributes:
        prices: seconds that reading a storage back counts for; only these storages may be read back.
        extra_seconds: seconds of the ops that run again, and the prices of the storages that are read back.
        changes: work of adding and removing events so far, in steps of 1 to 2 us: 8 for each, and more if many events
            had to move.
    """

    def __init__(self, problem: Problem, prices: dict[int, float] | None = None) -> None:
        p = self.problem = problem
        n, m = p.n_ops, len(p.size)
        self.first = m
        self.stride = m + n + 1
        self.rows = rows = 256
        self.prices = prices or {}
        self.changes = 0
        self.extra_seconds = 0.0
        own = self.own = [(t * rows + rows - 1) * self.stride + m + t for t in range(n + 1)]
        self.keys: list[int] = list(own)
        self.made: list[list[int]] = [[own[k]] for k in p.maker]
        self.uses: list[list[int]] = [[] for _ in range(m)]
        self.pin = [own[t] if t >= 0 else -1 for t in p.pinned]
        # The tier's copy ends when the program releases the storage. After that only its op can restore it.
        self.let_go = [own[k] + 1 if k >= maker else _NEVER for k, maker in zip(p.let_go, p.maker, strict=True)]
        self.gone = [min(own[k] if k >= 0 else _NEVER, end) for k, end in zip(p.written, self.let_go, strict=True)]
        for k, inputs in enumerate(p.inputs):
            for s in inputs:
                self.uses[s].append(own[k])
        change = np.zeros(n + 2, dtype=np.int64)
        held = set(p.held)
        for s, uses in enumerate(self.uses):
            if s in held:
                uses.append(own[n])
            if p.kept[s] >= 0 and p.written[s] < 0 and own[p.kept[s]] > (uses[-1] if uses else own[p.maker[s]]):
                uses.append(own[p.kept[s]])
            pin = self.pin[s]  # counts as a use: a gap that begins before it begins with it
            if pin > own[p.maker[s]] and pin not in uses[bisect_left(uses, pin) :][:1]:
                insort(uses, pin)
            last = self.stage(uses[-1]) if uses else p.maker[s]
            change[p.maker[s]] += p.size[s]
            change[last + 1] -= p.size[s]
        self._profile = np.zeros(2 * n + 16, dtype=np.int64)
        self._profile[: n + 1] = np.cumsum(change)[: n + 1]
        self._profile[:n] -= np.array(p.handed, dtype=np.int64)
        self._n = n + 1
        self.journal: list[tuple[str, int, int]] | None = None

    @property
    def profile(self) -> Ints:
        """Resident bytes while each event of `keys` runs (a view: changes with the timeline)."""
        return self._profile[: self._n]

    @property
    def peak(self) -> int:
        """Most bytes resident at any event."""
        return int(self._profile[: self._n].max())

    def summits(self, most: int) -> list[int]:
        """Up to `most` of the program's ops before or in which the profile has a summit, highest first."""
        n = self.problem.n_ops
        height = [0] * (n + 2)
        for key, level in zip(self.keys, self.profile.tolist(), strict=True):
            stage = self.stage(key)
            height[stage] = max(height[stage], level)
        found = [t for t in range(n) if height[t - 1] <= height[t] > height[t + 1] or t + 1 == n]
        return sorted(found, key=lambda t: -height[t])[:most]

    def stage(self, key: int) -> int:
        """The op before whose end, and after whose predecessor's, the event happens."""
        return key // (self.stride * self.rows)

    def op(self, key: int) -> int:
        """The op that the event runs; negative: it reads a storage back."""
        return key % self.stride - self.first

    def key(self, stage: int, op: int) -> int:
        """The key of op `op` in the last row of stage `stage`."""
        return (stage * self.rows + self.rows - 1) * self.stride + self.first + op

    def restore(self, s: int, key: int) -> int:
        """The event in `key`'s row that brings storage s back: by reading where it has a price and a copy, else by its op."""
        row = key - key % self.stride
        return row + s if s in self.prices and key < self.let_go[s] else row + self.first + self.problem.maker[s]

    def can_restore(self, s: int, key: int = 0) -> bool:
        """Tells if a dropped storage s can be restored at `key`."""
        return self.problem.again[s] or (s in self.prices and key < self.let_go[s])

    def has(self, key: int) -> bool:
        """Tells if the event exists."""
        x = bisect_left(self.keys, key)
        return x < len(self.keys) and self.keys[x] == key

    def extras(self) -> list[int]:
        """Keys of all events that are not the program's own, in order."""
        stride, first, whole = self.stride, self.first, self.stride * self.rows
        return [q for q in self.keys if q % stride - first != q // whole]

    def split(self, key: int) -> bool:
        """Moves the events of `key`'s stage up to `key` one row up, so that ops after it can run again in order.
        Nothing else changes. Returns if there was a row left.
        """
        low = key - key % (self.stride * self.rows)
        a, b = bisect_left(self.keys, low), bisect_right(self.keys, key)
        moved = self.keys[a:b]
        if not moved or moved[0] - self.stride < low or key == self.own[self.stage(key)]:
            return False
        self._move(moved, -self.stride)
        if self.journal is not None:
            self.journal.append(("split", key, 0))
        return True

    def _move(self, moved: list[int], by: int) -> None:
        """Renames events; their order stays."""
        for q in moved:
            x = bisect_left(self.keys, q)
            self.keys[x] = q + by
            for s in self._makes(q % self.stride):
                made = self.made[s]
                made[bisect_left(made, q)] = q + by
            op = self.op(q)
            if op >= 0:
                for s in self.problem.inputs[op]:
                    uses = self.uses[s]
                    uses[bisect_left(uses, q)] = q + by

    def _makes(self, slot: int) -> tuple[int, ...]:
        if slot < self.first:
            return (slot,)
        op = slot - self.first
        return self.problem.outputs[op] if op < self.problem.n_ops else ()

    def reach(self, s: int, key: int) -> int:
        """The last event up to which storage s stays resident after its last making before `key` (its making at least)."""
        made, uses = self.made[s], self.uses[s]
        j = bisect_left(made, key)
        start = made[j - 1]
        b = bisect_left(uses, made[j]) if j < len(made) else len(uses)
        return uses[b - 1] if b and uses[b - 1] > start else start

    def resident(self, s: int, key: int) -> bool:
        """Tells if storage s can be read at `key` without cost: it is kept past it, or was made in the same stage."""
        made, uses = self.made[s], self.uses[s]
        j = bisect_left(made, key)
        start = made[j - 1]
        gone = self.gone[s]
        if start < gone < key:
            return False
        if start // self.stride == key // self.stride:
            return True
        b = bisect_left(uses, made[j]) if j < len(made) else len(uses)
        return b > 0 and uses[b - 1] >= key

    def add(self, key: int) -> None:
        """Runs the event's op again there, or reads its storage back."""
        p, size, keys = self.problem, self.problem.size, self.keys
        slot = key % self.stride
        x = bisect_left(keys, key)
        if self._n + 1 >= len(self._profile):
            self._profile = np.concatenate([self._profile, np.zeros_like(self._profile)])
        profile = self._profile
        # Bytes resident between the events before and after: the latter's profile without its own outputs.
        after = keys[x]
        through = int(profile[x])
        for s in self._makes(after % self.stride):
            through -= size[s]
        op = after % self.stride - self.first
        if op == self.stage(after) and op < p.n_ops:
            through += p.handed[op]
        profile[x + 1 : self._n + 1] = profile[x : self._n].copy()
        profile[x] = through
        keys.insert(x, key)
        self._n += 1
        for s in self._makes(slot):
            made, uses = self.made[s], self.uses[s]
            end = self.reach(s, key)
            j = bisect_left(made, key)
            start = made[j - 1]
            made.insert(j, key)
            if end > key:
                a = bisect_left(uses, key)
                before = uses[a - 1] if a and uses[a - 1] > start else start
                profile[bisect_right(keys, before) : x] -= size[s]
            else:
                profile[x] += size[s]
        if slot >= self.first:
            for s in p.inputs[slot - self.first]:
                end = self.reach(s, key)
                uses = self.uses[s]
                uses.insert(bisect_left(uses, key), key)
                if key > end:
                    profile[bisect_right(keys, end) : x + 1] += size[s]
            self.extra_seconds += p.cost[slot - self.first]
        else:
            self.extra_seconds += self.prices[slot]
        self.changes += 8 + 3 * (self._n - x >> 12)
        if self.journal is not None:
            self.journal.append(("add", key, 0))

    def remove(self, key: int) -> None:
        """Takes back `add(key)`; storages are then kept from where they were made before."""
        p, size, keys, profile = self.problem, self.problem.size, self.keys, self._profile
        slot = key % self.stride
        x = bisect_left(keys, key)
        if slot >= self.first:
            for s in p.inputs[slot - self.first]:
                uses = self.uses[s]
                uses.pop(bisect_left(uses, key))
                end = self.reach(s, key)
                if key > end:
                    profile[bisect_right(keys, end) : x + 1] -= size[s]
            self.extra_seconds -= p.cost[slot - self.first]
        else:
            self.extra_seconds -= self.prices[slot]
        self.changes += 8 + 3 * (self._n - x >> 12)
        for s in self._makes(slot):
            made, uses = self.made[s], self.uses[s]
            j = bisect_left(made, key)
            made.pop(j)
            start = made[j - 1]
            end = self.reach(s, key)
            if end > key:
                a = bisect_left(uses, key)
                before = uses[a - 1] if a and uses[a - 1] > start else start
                profile[bisect_right(keys, before) : x] += size[s]
            else:
                profile[x] -= size[s]
        keys.pop(x)
        profile[x : self._n - 1] = profile[x + 1 : self._n].copy()
        self._n -= 1
        if self.journal is not None:
            self.journal.append(("remove", key, 0))

    def mark(self) -> None:
        """Starts to note changes, for `undo`."""
        self.journal = []

    def undo(self) -> None:
        """Takes back all changes since `mark`."""
        journal, self.journal = self.journal or [], None
        for what, key, s in reversed(journal):
            if what == "add":
                self.remove(key)
            elif what == "remove":
                self.add(key)
            elif what == "hold":
                self.release(s, key)
            elif what == "release":
                self.hold(s, key)
            else:
                low = key - key % (self.stride * self.rows)
                a, b = bisect_left(self.keys, low), bisect_right(self.keys, key - self.stride)
                self._move(self.keys[a:b][::-1], self.stride)

    def hold(self, s: int, key: int) -> None:
        """Keeps storage s resident up to the event `key` (a copy of it is being written until then)."""
        uses, end = self.uses[s], self.reach(s, key + 1)
        uses.insert(bisect_left(uses, key), key)
        if key > end:
            keys = self.keys
            self._profile[bisect_right(keys, end) : bisect_right(keys, key)] += self.problem.size[s]
        if self.journal is not None:
            self.journal.append(("hold", key, s))

    def release(self, s: int, key: int) -> None:
        """Takes back `hold(s, key)`."""
        uses = self.uses[s]
        uses.pop(bisect_left(uses, key))
        end = self.reach(s, key + 1)
        if key > end:
            keys = self.keys
            self._profile[bisect_right(keys, end) : bisect_right(keys, key)] -= self.problem.size[s]
        if self.journal is not None:
            self.journal.append(("release", key, s))

    def intervals(self) -> Iterator[tuple[int, int, int]]:
        """(storage, event that makes it, last event that wants it) for each time that a storage is made."""
        for s, made in enumerate(self.made):
            for j, start in enumerate(made):
                yield s, start, self.reach(s, made[j + 1] if j + 1 < len(made) else _NEVER)

    def thin(self, order: Iterable[int], budget_bytes: int) -> int:
        """Takes out those events of `order` whose outputs can be kept instead, all in one go. Returns how many.

        For timelines of very many events, where taking out one takes long. Other events that become superfluous are not
        looked for, so `remove` may find more. Cannot be undone.
        """
        size, keys, profile = self.problem.size, self.keys, self.profile.copy()
        removed: set[int] = set()
        for key in order:
            slot, x = key % self.stride, bisect_left(keys, key)
            grown: list[tuple[int, int, int]] = []
            fits = True
            for s in self._makes(slot):
                made, uses = self.made[s], self.uses[s]
                j = bisect_left(made, key)
                b = bisect_left(uses, made[j + 1]) if j + 1 < len(made) else len(uses)
                if not b or uses[b - 1] <= key:
                    continue  # no event reads it
                a, start = bisect_left(uses, key), made[j - 1]
                low = bisect_right(keys, uses[a - 1] if a and uses[a - 1] > start else start)
                fits = not start < self.gone[s] < uses[b - 1]
                fits &= low >= x or int(profile[low:x].max()) + size[s] <= budget_bytes
                if not fits:
                    break
                profile[low:x] += size[s]
                grown.append((low, x, s))
            if not fits:
                for low, x, s in grown:
                    profile[low:x] -= size[s]
                continue
            removed.add(key)
            for s in self._makes(slot):
                self.made[s].pop(bisect_left(self.made[s], key))
            if slot >= self.first:
                for s in self.problem.inputs[slot - self.first]:
                    self.uses[s].pop(bisect_left(self.uses[s], key))
                self.extra_seconds -= self.problem.cost[slot - self.first]
            else:
                self.extra_seconds -= self.prices[slot]
        self.keys = [q for q in keys if q not in removed]
        self._n = len(self.keys)
        self._profile[: self._n] = self._counted()
        self.changes += len(keys) // 4
        return len(removed)

    def _counted(self) -> Ints:
        """The profile, counted anew."""
        p = self.problem
        change = np.zeros(self._n + 1, dtype=np.int64)
        for s, start, end in self.intervals():
            assert not start < self.gone[s] < end, f"storage {s} is kept past {self.gone[s]}"
            change[bisect_left(self.keys, start)] += p.size[s]
            change[bisect_right(self.keys, end)] -= p.size[s]
        profile = np.cumsum(change)[: self._n]
        for k in range(p.n_ops):
            profile[bisect_left(self.keys, self.own[k])] -= p.handed[k]
        return profile

    def check(self) -> None:
        """Raises AssertionError if the profile differs from the events, or an event reads a storage that is not
        resident.
        """
        assert (self._counted() == self.profile).all(), "the profile is not that of the events"
