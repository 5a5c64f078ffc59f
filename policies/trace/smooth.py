"""Evens out the times of one pass: ops that look alike get their median.

A trace is one pass, so each of its times is one sample, and on a CPU with other work the worst of them are twice the
op's time. A planner that trusts them recomputes expensive storages and keeps cheap ones. Models repeat their layers, so
the same op is measured many times in a pass all the same.
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

    Two ops look alike if name, kind, the sizes of all storages that they read and make, and the side of the turn to
    backward are the same. Views of one storage that differ in length but have equal outputs are taken for the same,
    although their work differs. An op without storages (the time between ops) keeps its time. `trace`: a measured pass;
    it is not changed.
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
