"""Which storages are resident, which ops will run again, and the time that one more eviction would add. Exact, not by
union-find.

The picture behind it: in training a tensor that is dropped is needed about once more, in backward, and the
intermediates made on the way to it serve its neighbours, too. So the price of a set of evictions is *not* the sum of
the members' chains but the time of the ops that will run again at all, each once:

    again(E) = the ops that make evicted storages which will be read, and, as long as an input of such an op is not
               resident either, the op that makes that input.

The price of evicting one more storage is the time that it adds to `again`: often just its own op, nothing at all if its
op runs again anyway (a dropout's mask beside its output), a whole chain where it is the last resident thing that the
chain could start from. DTR's e* and its union-find form h_eq count the chain again for every member, which overstates
the price of evicting whole segments, the cheapest thing there is to do.

`again` is kept by counting references, as ops only ever depend on older ones.

Two effects are not part of that. *Each once* holds only for storages that fit together when they are made again
(`repeat_seconds`). A gradient can only be made again from tensors that backward frees, so its price is the time of the
whole chain to it, not of its own op (`way_seconds`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from memmgr.policies.rules.types import Bools, Floats, Ints

_WALK = 128
"""A chain is followed over so many ops. A longer one is expensive in any case, and every decision would pay for the
walk.
"""

_UNWANTED = 1e-4
"""The price of a storage that no op will read, as a share of its op's time: it is lost only if a neighbour is evicted
as well. Small enough that all unwanted storages are evicted before wanted ones; it orders the unwanted among
themselves.
"""

_DOUBT = 0.001
"""The price of a storage that the program holds but will probably not read: it may do so all the same (a loss that is
printed).
"""


@dataclass
class Ledger:
    """Storages and ops so far, with the bookkeeping described above.

    Attributes:
        size: bytes of each storage.
        maker: the op of each storage.
        fixed: cannot be made again (constants): never a victim.
        fixtures: these, by number.
        resident: has its bytes.
        held: the program has a reference.
        wanted: the program will (probably) read it again.
        seconds, inputs, outputs: of each op.
        runs_again: the op is in `again`.
        way_seconds: of each op that reads storages which are freed soon (gradients): time of the longest chain of such
            ops to it.
        used_bytes: resident in all.
        later_bytes: bytes that the program holds of each storage, 0 once it has released it.
    """

    size: list[int] = field(default_factory=list)
    maker: list[int] = field(default_factory=list)
    fixed: list[bool] = field(default_factory=list)
    fixtures: list[int] = field(default_factory=list)
    resident: list[bool] = field(default_factory=list)
    held: list[bool] = field(default_factory=list)
    wanted: list[bool] = field(default_factory=list)
    readers: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    inputs: list[tuple[int, ...]] = field(default_factory=list)
    outputs: list[tuple[int, ...]] = field(default_factory=list)
    runs_again: list[bool] = field(default_factory=list)
    way_seconds: list[float] = field(default_factory=list)
    used_bytes: int = 0
    _asked: list[int] = field(default_factory=list)  # ops of `again` that read the storage
    _useful_readers: list[int] = field(default_factory=list)  # ops that could have to run again, and read the storage
    _useful_outputs: list[int] = field(default_factory=list)  # storages that could be wanted again, of the op
    _stale: set[int] = field(default_factory=set)  # resident storages whose price may have changed
    _price: Floats = field(default_factory=lambda: np.zeros(64))
    _bytes: Floats = field(default_factory=lambda: np.zeros(64))
    _victim: Bools = field(default_factory=lambda: np.zeros(64, dtype=np.bool_))
    later_bytes: Floats = field(default_factory=lambda: np.zeros(64))
    _node: dict[int, int] = field(default_factory=dict)  # evicted storage: its node in the union-find of segments
    _parent: list[int] = field(default_factory=list)
    _segment_seconds: list[float] = field(default_factory=list)  # of roots
    _segment_bytes: list[int] = field(default_factory=list)  # of each segment: bytes that the program holds
    _segment_count: list[int] = field(default_factory=list)  # of the same

    # ---- events of the program

    def new_op(
        self,
        seconds: float,
        inputs: tuple[int, ...],
        sizes: Sequence[int],
        *,
        fixed: bool = False,
        passing: bool = False,
    ) -> int:
        """One more op, and the storages that it will make; none is resident yet. Returns its number."""
        k = len(self.seconds)
        self.seconds.append(seconds)
        self.inputs.append(inputs)
        self.outputs.append(tuple(range(len(self.size), len(self.size) + len(sizes))))
        self.runs_again.append(False)
        way = max((self.way_seconds[self.maker[s]] for s in inputs), default=0.0)
        self.way_seconds.append(seconds + way if passing else 0.0)
        for size in sizes:
            self.size.append(size)
            self.maker.append(k)
            self.fixed.append(fixed)
            self.resident.append(False)
            self.held.append(True)
            self.wanted.append(True)
            self.readers.append([])
            self._asked.append(0)
            self._useful_readers.append(0)
        self._useful_outputs.append(len(sizes))
        if len(self.size) > len(self._price):
            for name in ("_price", "_bytes", "_victim", "later_bytes"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros(len(self.size), dtype=column.dtype)]))
        if fixed:
            self.fixtures += self.outputs[k]
        for s in self.outputs[k]:
            self._bytes[s] = self.size[s]
            self.later_bytes[s] = self.size[s]
        return k

    def read_by(self, s: int, k: int) -> None:
        """Op k, which is no view, has read s (resident): making k's outputs again will need it."""
        self.readers[s].append(k)
        self._useful_readers[s] += 1

    def release(self, s: int) -> list[int]:
        """Records that the program released s. Returns the storages that neither the program nor a recomputation can
        need again.
        """
        self.held[s] = False
        if s in self._node:
            root = self._find(self._node[s])
            self._segment_bytes[root] -= self.size[s]
            self._segment_count[root] -= 1
        self.later_bytes[s] = 0.0
        self.want(s, False)
        dead, todo = [], [s]
        while todo:
            y = todo.pop()
            if self.held[y] or self._useful_readers[y]:
                continue
            dead.append(y)
            k = self.maker[y]
            if y in self._node:
                self._segment_seconds[self._find(self._node.pop(y))] -= self._share_seconds(y)
            self._useful_outputs[k] -= 1
            if self._useful_outputs[k] == 0:
                for i in self.inputs[k]:
                    self._useful_readers[i] -= 1
                    if self._useful_readers[i] == 0:
                        todo.append(i)
        return dead

    def want(self, s: int, wanted: bool) -> None:
        """The program will read s again, or not."""
        if self.wanted[s] == wanted:
            return
        self.wanted[s] = wanted
        if self.resident[s]:
            self._stale.add(s)
        elif wanted:
            self._add(self.maker[s])
        else:
            self._remove_if_idle(self.maker[s])

    # ---- actions of the policy

    def evict(self, s: int) -> None:
        """Drops the bytes of s."""
        self.resident[s] = False
        self.used_bytes -= self.size[s]
        self._victim[s] = False
        if self.fixed[s]:
            return
        if self.held[s] or self._useful_readers[s]:
            self._join(s)
        if self.wanted[s] or self._asked[s]:
            self._add(self.maker[s])
        self._disturb_readers(s)

    def restore(self, s: int) -> None:
        """s has its bytes (again). Call `settle` for its op when all its outputs have."""
        self.resident[s] = True
        if s in self._node:
            root = self._find(self._node.pop(s))
            self._segment_seconds[root] -= self._share_seconds(s)
            self._segment_bytes[root] -= self.size[s] if self.held[s] else 0
            self._segment_count[root] -= int(self.held[s])
        self.used_bytes += self.size[s]
        self._victim[s] = not self.fixed[s] and self.size[s] > 0
        self._stale.add(s)
        self._disturb_readers(s)

    def settle(self, k: int) -> None:
        """Op k has just run again."""
        self._remove_if_idle(k)

    # ---- prices

    def victims(self) -> Ints:
        """Storages that can be evicted: resident, not empty, can be made again."""
        return np.flatnonzero(self._victim[: len(self.size)])

    def prices(self, storages: Ints) -> Floats:
        """Seconds that evicting each of `storages` (resident) adds to `again`."""
        for s in self._stale:
            if self.resident[s]:
                self._price[s] = self._added_seconds(s)
        self._stale.clear()
        return self._price[storages]

    def sizes(self, storages: Ints) -> Floats:
        """Bytes of each."""
        return self._bytes[storages]

    def _added_seconds(self, s: int) -> float:
        maker = self.maker[s]
        share = 1.0
        if not (self.wanted[s] or self._asked[s]):
            if not self.held[s]:
                return _UNWANTED * self.seconds[maker]
            share = _DOUBT
        if self.runs_again[maker]:
            return 0.0
        total, seen, todo = 0.0, {maker}, [maker]
        while todo and len(seen) <= _WALK:
            k = todo.pop()
            total += self.seconds[k]
            for i in self.inputs[k]:
                if not self.resident[i]:
                    m = self.maker[i]
                    if m not in seen and not self.runs_again[m]:
                        seen.add(m)
                        todo.append(m)
        return share * max(total, self.way_seconds[maker])

    # ---- segments: connected evicted storages, by union-find; a restored storage takes its sums out, not its links

    def _share_seconds(self, s: int) -> float:
        k = self.maker[s]
        return self.seconds[k] / len(self.outputs[k])

    def _find(self, x: int) -> int:
        parent = self._parent
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    def _around(self, s: int) -> set[int]:
        """The segments that evicting s would join."""
        node = self._node
        roots = {self._find(node[i]) for i in self.inputs[self.maker[s]] if i in node}
        for k in self.readers[s]:
            for y in self.outputs[k]:
                if y in node:
                    roots.add(self._find(node[y]))
        return roots

    def _join(self, s: int) -> None:
        roots = self._around(s)
        x = len(self._parent)
        self._parent.append(x)
        self._segment_seconds.append(self._share_seconds(s))
        self._segment_bytes.append(self.size[s] if self.held[s] else 0)
        self._segment_count.append(int(self.held[s]))
        self._node[s] = x
        for root in roots:
            self._parent[root] = x
            self._segment_seconds[x] += self._segment_seconds[root]
            self._segment_bytes[x] += self._segment_bytes[root]
            self._segment_count[x] += self._segment_count[root]

    def repeat_seconds(self, s: int, room_bytes: float) -> float:
        """Seconds that evicting s (resident) adds because its segment would not find room when it is made again.

        A segment that is larger than `room_bytes` is made in as many parts as there is room for (as many as it has members
        at most), and each time from its beginning: half of it, on average.
        """
        if not (self.wanted[s] or self._asked[s]):
            return 0.0
        held = int(self.held[s])
        seconds, size, count, before = self._share_seconds(s), float(self.size[s] * held), held, 0.0
        for root in self._around(s):
            c, b, n = self._segment_seconds[root], self._segment_bytes[root], self._segment_count[root]
            seconds += c
            size += b
            count += n
            before += c * max(0.0, min(b / room_bytes, n) - 1.0)
        return 0.5 * max(0.0, seconds * max(0.0, min(size / room_bytes, count) - 1.0) - before)

    # ---- bookkeeping

    def _add(self, k: int) -> None:
        todo = [k]
        while todo:
            k = todo.pop()
            if self.runs_again[k]:
                continue
            self.runs_again[k] = True
            self._disturb(k)
            for i in self.inputs[k]:
                self._asked[i] += 1
                if not self.resident[i]:
                    todo.append(self.maker[i])
                elif self._asked[i] == 1:
                    self._stale.add(i)

    def _remove_if_idle(self, k: int) -> None:
        todo = [k]
        while todo:
            k = todo.pop()
            if not self.runs_again[k] or any(
                not self.resident[y] and (self.wanted[y] or self._asked[y]) for y in self.outputs[k]
            ):
                continue
            self.runs_again[k] = False
            self._disturb(k)
            for i in self.inputs[k]:
                self._asked[i] -= 1
                if self._asked[i] == 0:
                    if self.resident[i]:
                        self._stale.add(i)
                    else:
                        todo.append(self.maker[i])

    def _disturb(self, k: int) -> None:
        """Marks the prices that op k is part of: those of resident storages below it, reached through absent ones."""
        todo, seen = [k], {k}
        while todo:
            for y in self.outputs[todo.pop()]:
                if self.resident[y]:
                    self._stale.add(y)
                    continue
                for reader in self.readers[y]:
                    if reader not in seen and not self.runs_again[reader] and len(seen) <= _WALK:
                        seen.add(reader)
                        todo.append(reader)

    def _disturb_readers(self, s: int) -> None:
        for reader in self.readers[s]:
            if not self.runs_again[reader]:
                self._disturb(reader)

    def check_invariants(self) -> None:
        """Recounts everything. For tests. Raises `AssertionError`: the counts have drifted."""
        again: set[int] = set()
        todo = [
            self.maker[s] for s in range(len(self.size)) if not self.resident[s] and self.wanted[s] and self._made(s)
        ]
        while todo:
            k = todo.pop()
            if k not in again:
                again.add(k)
                todo += [self.maker[i] for i in self.inputs[k] if not self.resident[i]]
        assert again == {k for k, runs in enumerate(self.runs_again) if runs}
        assert self.used_bytes == sum(n for n, here in zip(self.size, self.resident, strict=True) if here)
        asked = [0] * len(self.size)
        for k in again:
            for i in self.inputs[k]:
                asked[i] += 1
        assert asked == self._asked
        held = [s for s in self._node if self.held[s]]
        roots = {self._find(x) for x in self._node.values()}
        assert not any(self.resident[s] for s in self._node)
        assert sum(self._segment_bytes[x] for x in roots) == sum(self.size[s] for s in held)
        assert sum(self._segment_count[x] for x in roots) == len(held)
        seconds = sum(self._share_seconds(s) for s in self._node)
        assert abs(sum(self._segment_seconds[x] for x in roots) - seconds) <= 1e-9 * (1.0 + seconds)

    def _made(self, s: int) -> bool:
        return not self.fixed[s]
