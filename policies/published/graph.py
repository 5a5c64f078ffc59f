"""A pass as a graph of nodes that run one after the other, as integer programs see it.

A node is one op, or several neighbours if there are too many ops. The outputs of a node for the same later nodes are
one value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from memmgr.policies.trace import HELD, OpKind, Trace
from memmgr.policies.trace.schedule import Step

from .chain import Chain
from .runs import runs_of


@dataclass(frozen=True)
class Value:
    """Outputs of a node that other nodes read."""

    maker: int
    readers: tuple[int, ...]  # later nodes, ascending
    size: int  # bytes
    held: bool  # it must be resident at the end
    overwritten: int = -1  # the node that takes its block; -1: none


@dataclass(frozen=True)
class Graph:
    """Nodes in the order of the program."""

    trace: Trace
    nodes: list[range]  # the ops of each, ascending
    again: list[bool]  # per node, if it may run again
    seconds: list[float]  # per node, time when it runs again
    inside: list[int]  # bytes that it needs in addition to its inputs and values, at its worst moment
    base: list[int]  # bytes of constants while it runs
    values: list[Value]

    def events(self, runs: Sequence[Sequence[int]]) -> list[Step]:
        """The pass in which `runs[t]` run again before node t does, and these before the end: one entry more."""
        events: list[Step] = []
        for t, before in enumerate(runs):
            for i in before:
                events += runs_of((k for k in self.nodes[i] if self.trace.ops[k].kind == OpKind.COMPUTE), again=True)
            if t < len(self.nodes):
                events += runs_of(self.nodes[t], again=False)
        return events


def graph_of(trace: Trace, most_nodes: int) -> Graph:
    """An op a node, or, where these would be more than `most_nodes`, blocks of a chain and their work in backward."""
    chain = Chain(trace)
    firsts = [k for k, op in enumerate(trace.ops) if op.outputs and op.kind != OpKind.CONSTANT]
    if len(firsts) > most_nodes:
        cut = chain.at(chain.narrow(most_nodes // 2))
        firsts = sorted({*cut.cuts[1:], *cut.starts[:-1]} - {len(trace.ops)})
    else:  # a view, and a constant, belongs to the op after it
        firsts = [k + 1 for k in firsts[:-1]]
    edges = [0, *firsts, len(trace.ops)]
    return _graph(trace, chain, [range(a, b) for a, b in zip(edges, edges[1:], strict=False)])


def _graph(trace: Trace, chain: Chain, nodes: list[range]) -> Graph:
    node_of = {k: i for i, ops in enumerate(nodes) for k in ops}
    readers: list[set[int]] = [set() for _ in trace.storages]
    last = [-1] * len(trace.storages)
    overwritten = [-1] * len(trace.storages)
    for k, op in enumerate(trace.ops):
        for s in op.inputs:
            readers[s].add(node_of[k])
            last[s] = k
        if not trace.copy_on_write:
            for old, _ in op.writes:
                overwritten[old] = node_of[k]
    groups: dict[tuple[int, tuple[int, ...], bool, int], int] = defaultdict(int)
    shared = [False] * len(trace.storages)
    for s, storage in enumerate(trace.storages):
        maker, held = node_of[storage.maker], storage.released == HELD
        later = tuple(sorted(readers[s] - {maker}))
        shared[s] = bool(later) or held
        if s not in trace.constants and shared[s] and storage.size_bytes:
            groups[maker, later, held, overwritten[s]] += storage.size_bytes
    inside, level = [], 0
    base = [0] * len(nodes)
    for i, ops in enumerate(nodes):
        live = most = mine = 0
        for k in ops:
            op = trace.ops[k]
            if op.kind == OpKind.CONSTANT:
                level += sum(trace.storages[s].size_bytes for s in op.outputs)
                base[i] = max(base[i], level)
                continue
            live += sum(trace.storages[s].size_bytes for s in op.outputs)
            mine += sum(trace.storages[s].size_bytes for s in op.outputs if shared[s])
            most = max(most, live)
            dead = {
                s for s in (*op.inputs, *op.outputs) if not shared[s] and max(last[s], trace.storages[s].maker) == k
            }
            live -= sum(trace.storages[s].size_bytes for s in dead if trace.storages[s].maker in ops)
        inside.append(max(most - mine, 0))
        base[i] = max(base[i], level)
        level -= sum(
            trace.storages[s].size_bytes for s in trace.constants if ops.start < trace.storages[s].released <= ops.stop
        )
    again = [all(chain.again[k] or trace.ops[k].kind != OpKind.COMPUTE for k in ops) for ops in nodes]
    again = [
        ok and not any(trace.ops[k].kind == OpKind.ONCE for k in ops) for ok, ops in zip(again, nodes, strict=True)
    ]
    seconds = [sum(trace.ops[k].seconds for k in ops if trace.ops[k].kind == OpKind.COMPUTE) for ops in nodes]
    values = [Value(maker, later, size, held, over) for (maker, later, held, over), size in groups.items()]
    return Graph(trace, nodes, again, seconds, inside, base, values)
