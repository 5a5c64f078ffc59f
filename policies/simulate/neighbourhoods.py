"""What evicting a storage would make longer: the evicted ancestors of each resident storage, and DTR's union-find estimate
of its evicted neighbourhood, kept up to date."""

from __future__ import annotations

from collections.abc import Callable, Collection

from memmgr.policies.trace import OpKind, Trace

_CHILDREN, _FAN = 128, 32  # steps, and readers of one storage that are looked at: as live
_WALK = 256  # a chain of so many ops is dear, whatever comes on top


class Neighbourhoods:
    """Neighbourhoods and components over a trace, of which the part that has run is known.

    Attributes:
        readers: per storage, the ops so far that read it and could run again.
    """

    def __init__(self, trace: Trace, gone: Callable[[int], bool], saved: Collection[int] | None = None) -> None:
        """The chains of a pass in which nothing has run.

        Args:
            trace: the pass.
            gone: s was made, and has to be made again before it can be read (neither resident nor in a tier).
            saved: what autograd saves. The rest is there as long as the program has it, which is not until backward wants
                what was made from it, so it is part of a chain as well, but for what is made from nothing (the program's
                data). None: nobody knows.
        """
        self._gone = gone
        self._as_live = saved is not None
        self._stays = [
            saved is None
            or s in saved
            or trace.ops[storage.maker].kind != OpKind.COMPUTE
            or not trace.ops[storage.maker].inputs
            for s, storage in enumerate(trace.storages)
        ]
        self._ops = trace.ops
        self._maker = [s.maker for s in trace.storages]
        self._cost = [op.seconds for op in trace.ops]
        self.readers: list[list[int]] = [[] for _ in trace.storages]
        self._held = [True] * len(trace.storages)
        self._useful_readers = [0] * len(trace.storages)
        self._useful_outputs = [len(op.outputs) for op in trace.ops]
        self._chain: dict[int, float] = {}
        self._parent: dict[int, int] = {}  # union-find over evicted storages
        self._component: dict[int, float] = {}

    def ran(self, k: int) -> None:
        """Op k has run for the first time."""
        if self._ops[k].kind == OpKind.COMPUTE:
            for s in self._ops[k].inputs:
                self.readers[s].append(k)
                self._useful_readers[s] += 1

    def release(self, s: int) -> list[int]:
        """The program let go of s. Returns what no recompute can ever want any more either."""
        self._held[s] = False
        dead, todo = [], [s]
        while todo:
            y = todo.pop()
            if self._held[y] or self._useful_readers[y]:
                continue
            dead.append(y)
            k = self._maker[y]
            self._useful_outputs[k] -= 1
            if self._useful_outputs[k] == 0 and self._ops[k].kind == OpKind.COMPUTE:
                for i in self._ops[k].inputs:
                    self._useful_readers[i] -= 1
                    if self._useful_readers[i] == 0:
                        todo.append(i)
        return dead

    def chain_seconds(self, s: int) -> float:
        """The ops of ancestors that are evicted, or were never saved, each once, without the op of s itself."""
        known = self._chain.get(s)
        if known is None:
            known = self._chain[s] = self._walk(s)
        return known

    def _walk(self, s: int) -> float:
        maker = self._maker[s]
        total, seen, todo = 0.0, {maker}, [maker]
        while todo and len(seen) <= _WALK:
            for i in self._ops[todo.pop()].inputs:
                m = self._maker[i]
                if m not in seen and self._runs_again(i):
                    seen.add(m)
                    todo.append(m)
                    total += self._cost[m]
        return total

    def _runs_again(self, s: int) -> bool:
        return not self._stays[s] or self._gone(s)

    def changed(self, s: int) -> None:
        """s went or came: chains through it are no longer known."""
        todo, seen = list(self.readers[s]), set(self.readers[s])
        while todo and len(seen) <= _WALK:
            for y in self._ops[todo.pop()].outputs:
                self._chain.pop(y, None)
                if self._runs_again(y):
                    fresh = [r for r in self.readers[y] if r not in seen]
                    seen.update(fresh)
                    todo += fresh

    def _children_seconds(self, s: int) -> float:
        total, steps, todo, seen = 0.0, 0, [s], set[int]()
        while todo and steps < _CHILDREN:
            steps += 1
            for r in self.readers[todo.pop()][-_FAN:]:
                if r in seen:
                    continue
                seen.add(r)
                gone = next((y for y in self._ops[r].outputs if self._held[y] and self._gone(y)), None)
                if gone is not None:
                    total += self._cost[r]
                    todo.append(gone)
        return total

    # ---- DTR's h_eq

    def _find(self, s: int) -> int:
        while self._parent[s] != s:
            self._parent[s] = self._parent[self._parent[s]]
            s = self._parent[s]
        return s

    def _neighbours(self, s: int) -> set[int]:
        near = [i for i in self._ops[self._maker[s]].inputs if self._gone(i)]
        near += [y for r in self.readers[s] for y in self._ops[r].outputs if self._gone(y)]
        return {self._find(n) for n in near if n in self._parent}

    def component_seconds(self, s: int) -> float:
        """The neighbourhood of s: as published the sum over the components beside it, as live its chain and what is evicted
        of what was made from it."""
        if self._as_live:
            return self.chain_seconds(s) + self._children_seconds(s)
        return sum(self._component[root] for root in self._neighbours(s))

    def join(self, s: int) -> None:
        """s was evicted: it and the components beside it become one."""
        self._parent[s] = s
        self._component[s] = self._cost[self._maker[s]]
        for root in self._neighbours(s) - {s}:
            self._parent[root] = s
            self._component[s] += self._component.pop(root)

    def leave(self, s: int) -> None:
        """s is back: its cost leaves its component, which is not split (as published)."""
        if s in self._parent:
            root = self._find(s)
            self._component[root] = max(0.0, self._component[root] - self._cost[self._maker[s]])
