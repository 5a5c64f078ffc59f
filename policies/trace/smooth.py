"""Evens out what one pass measured: ops that look alike take what their median took.

A trace is one pass, so each of its times is one sample, and on a CPU that something else interrupts the worst of them are
twice what the op takes. A planner that believes them recomputes what is expensive and keeps what is cheap. Models repeat their
layers, so the same op is measured many times in a pass all the same.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from .trace import Op, OpKind, Trace

LEAST_ALIKE = 3
"""Ops that look alike, for their median to say more than each of them: of two, one cannot tell which was disturbed."""

_Look = tuple[str, OpKind, bool, tuple[int, ...], tuple[int, ...]]


def smoothed(trace: Trace) -> Trace:
    """The same trace with times that one disturbed op does not change.

    Two ops look alike if name, kind, the sizes of all storages that they read and make, and the side of the turn to backward
    are the same. With views of one storage that differ in length but not in what is made of them this takes different work
    for the same; what takes no storage at all (the time between ops) is left as it is.

    Args:
        trace: a measured pass; it is not changed.
    """
    sizes = [s.size_bytes for s in trace.storages]
    turn = len(trace.ops) if trace.backward_at is None else trace.backward_at

    def look(k: int, op: Op) -> _Look:
        return op.name, op.kind, k < turn, tuple(sizes[s] for s in op.inputs), tuple(sizes[s] for s in op.outputs)

    alike: dict[_Look, list[float]] = {}
    looks = [look(k, op) for k, op in enumerate(trace.ops)]
    for key, op in zip(looks, trace.ops, strict=True):
        if op.inputs or op.outputs:
            alike.setdefault(key, []).append(op.seconds)
    takes = {key: median(seconds) for key, seconds in alike.items() if len(seconds) >= LEAST_ALIKE}
    ops = tuple(
        replace(op, seconds=takes[key]) if key in takes else op for key, op in zip(looks, trace.ops, strict=True)
    )
    return replace(trace, ops=ops)
