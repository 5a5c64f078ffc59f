"""The budget below which no schedule exists at all."""

from __future__ import annotations

from memmgr.policies.trace import Trace
from memmgr.policies.trace.columns import Problem
from memmgr.policies.trace.least_memory import least_bytes

from .bound import Rows, Unsolved, optional

_MOST = 16
"""Ops that need most and are looked at together. More of them prove more, and cost a linear program each."""


def smallest_budget_bytes(trace: Trace) -> int:
    """A lower bound: no recompute-only schedule fits in fewer bytes.

    Let C be the ops that need most. After the *last* run of any of them, each storage that the program holds at the end
    is resident or is made from resident ones, without C. So at that last op, in addition to its own need, at least so
    many bytes are resident as suffice for that: a minimum over fractional choices of the resident storages (K) and of
    the ops that run again afterwards (R). The last op of C is not known, so the least over all of them counts.
    `least_bytes` ignores storages that backward has made and must keep, so it is often lower.

    *Known limitations*: two sets C are tried, of up to 16 ops that need nearly as much as the largest; without scipy it is
    `least_bytes`.
    """
    problem = Problem.of(trace)
    least = least_bytes(problem)
    if not problem.n_ops:
        return least
    always = [s for s in trace.constants if problem.pinned[s] >= problem.n_ops]
    there = [set(problem.inputs[k]) | set(problem.outputs[k]) | set(always) for k in range(problem.n_ops)]
    need = [sum(problem.size[s] for s in t) - h for t, h in zip(there, problem.handed, strict=True)]
    order = sorted(range(problem.n_ops), key=lambda k: -need[k])[:_MOST]
    best = least
    for share in (0.97, 0.85):
        chosen = [k for k in order if need[k] >= share * need[order[0]]]
        try:
            best = max(best, _beside(problem, {k: (need[k], there[k]) for k in chosen}, best))
        except Unsolved:
            break
    return best


def _beside(problem: Problem, barred: dict[int, tuple[int, set[int]]], enough: int) -> int:
    """The least over `barred` (op: the bytes that it needs, and the storages that have them) of these bytes plus the
    bytes that must be resident in addition, so that all storages held at the end can be made without any op of
    `barred`. Ends early at `enough`.
    """
    rows = Rows()
    relevant: set[int] = set()
    todo = list(problem.held)
    while todo:
        s = todo.pop()
        if s not in relevant:
            relevant.add(s)
            if problem.again[s] and problem.maker[s] not in barred:
                todo.extend(problem.inputs[problem.maker[s]])
    unit = max(max(problem.size), 1)
    kept = {s: rows.variable(problem.size[s] / unit) for s in sorted(relevant)}
    makers = sorted({problem.maker[s] for s in relevant if problem.again[s]} - set(barred))
    again = {k: rows.variable(0.0) for k in makers}
    for s in problem.held:
        rows.at_most(-1.0, (kept[s], -1.0), *optional(again, problem.maker[s], -1.0))
    for k, x in again.items():
        for s in problem.inputs[k]:
            rows.at_most(0.0, (x, 1.0), (kept[s], -1.0), *optional(again, problem.maker[s], -1.0))
    prices = list(rows.cost)
    least = 1 << 62
    for need, there in barred.values():
        rows.cost = list(prices)
        for s in there & relevant:
            rows.cost[kept[s]] = 0.0
        found = rows.solve()
        least = min(least, need + (int(found[0] * unit) if found is not None else 0))
        if least <= enough:
            return enough
    return least
