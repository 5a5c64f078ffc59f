"""Cost that evicting a storage adds to others: the evicted ancestors of each resident storage, and DTR's union-find
estimate of its evicted neighbourhood, kept up to date.
"""

from __future__ import annotations

from collections.abc import Callable

from memmgr.policies.trace import OpKind, Trace

_WALK = 256  # a chain of so many ops is expensive, however many more it has


class Neighbourhoods:
    """Neighbourhoods and components over a trace, of which the part that has run is known."""

    def __init__(self, trace: Trace, gone: Callable[[int], bool]) -> None:
        """The chains of a pass in which nothing has run.

        `gone`: s was made, and has to be made again before it can be read (neither resident nor in a tier).
        """
        self._gone = gone
        self._ops = trace.ops
        self._maker = [s.maker for s in trace.storages]
        self._cost = [op.seconds for op in trace.ops]
        self._readers: list[list[int]] = [[] for _ in trace.storages]  # the ops so far that could run again
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
                self._readers[s].append(k)
                self._useful_readers[s] += 1

    def release(self, s: int) -> list[int]:
        """Records that the program released s. Returns the storages that no recomputation can need either."""
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
        """The ops of ancestors that are evicted, each once, without the op of s itself."""
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
                if m not in seen and self._gone(i):
                    seen.add(m)
                    todo.append(m)
                    total += self._cost[m]
        return total

    def changed(self, s: int) -> None:
        """s went or came: chains through it are no longer known."""
        todo, seen = list(self._readers[s]), set(self._readers[s])
        while todo and len(seen) <= _WALK:
            for y in self._ops[todo.pop()].outputs:
                self._chain.pop(y, None)
                if self._gone(y):
                    fresh = [r for r in self._readers[y] if r not in seen]
                    seen.update(fresh)
                    todo += fresh

    # ---- DTR's h_eq

    def _find(self, s: int) -> int:
        while self._parent[s] != s:
            self._parent[s] = self._parent[self._parent[s]]
            s = self._parent[s]
        return s

    def _neighbours(self, s: int) -> set[int]:
        near = [i for i in self._ops[self._maker[s]].inputs if self._gone(i)]
        near += [y for r in self._readers[s] for y in self._ops[r].outputs if self._gone(y)]
        return {self._find(n) for n in near if n in self._parent}

    def component_seconds(self, s: int) -> float:
        """The components beside s, summed."""
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
