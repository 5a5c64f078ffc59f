"""The least memory of a pass under any schedule, and the memory that making a storage again takes at once."""

from __future__ import annotations

from .columns import Problem
from .trace import OpKind, Trace


def least_bytes(problem: Problem) -> int:
    """A lower bound on every schedule's peak: the op that needs most, plus the storages that the program holds and that
    cannot be dropped.
    """
    held = [0] * (problem.n_ops + 1)
    for s, k in enumerate(problem.maker):
        if problem.pinned[s] >= k:
            held[k] += problem.size[s]
            if problem.pinned[s] + 1 <= problem.n_ops:
                held[problem.pinned[s] + 1] -= problem.size[s]
    most = level = 0
    for k in range(problem.n_ops):
        level += held[k]
        there = set(problem.inputs[k]) | set(problem.outputs[k])
        loose = sum(problem.size[s] for s in there if not problem.maker[s] <= k <= problem.pinned[s])
        most = max(most, level + loose - problem.handed[k])
    loose = sum(problem.size[s] for s in problem.held if problem.pinned[s] < problem.n_ops)
    return max(most, level + held[problem.n_ops] + loose)


def room_bytes(trace: Trace) -> list[int]:
    """Per storage, the most bytes that an op of its chain reads and makes, constants left out: making it takes that at
    once.

    A storage with less room than that in addition to `least_bytes` cannot safely be dropped: backward may read it when
    the rest is at its floor.
    """
    ops: list[int] = []
    for op in trace.ops:
        read = [s for s in op.inputs if s not in trace.constants]
        own = sum(trace.storages[s].size_bytes for s in {*read, *op.outputs}) if op.kind != OpKind.CONSTANT else 0
        ops.append(max([own, *(ops[trace.storages[s].maker] for s in read)]))
    return [ops[s.maker] for s in trace.storages]
