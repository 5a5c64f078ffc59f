"""The optimum of small passes: an integer program that chooses which ops run again when, solved to the end by HiGHS.

Checkmate's space: before each op of the program the ops before it may run again, each once, in the program's order. It
shares no code with the planner, and its answers are schedules that exist (`replay` says so), so nothing can prove a bound
wrong better than it.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from memmgr.policies.trace import HELD, OpKind, Trace
from memmgr.policies.trace.schedule import Do, Step


@dataclass(frozen=True)
class Exact:
    """The optimum.

    Attributes:
        solved: HiGHS proved it; False: it ran out of time, nothing is known.
        feasible: there is a schedule.
        extra_seconds: over one run of each op.
        steps: the schedule.
    """

    solved: bool
    feasible: bool
    extra_seconds: float
    steps: list[Step]


def exact(trace: Trace, budget_bytes: int, limit_seconds: float = 10.0) -> Exact:
    """Solves a pass with the operator logs' rules (recompute only, versions side by side)."""
    n = len(trace.ops)
    size = [s.size_bytes for s in trace.storages]
    unit = max(op.seconds for op in trace.ops)
    events = [(t, k) for t in range(n + 1) for k in range(t + 1) if k == t or trace.ops[k].kind == OpKind.COMPUTE]
    cost, low, high = [], [], []
    row, column, value, least = [], [], [], []

    def variable(price: float, at_least: float, integer: bool) -> int:
        cost.append(price)
        low.append(at_least)
        high.append(1.0)
        whole.append(int(integer))
        return len(cost) - 1

    def at_least(bound: float, *terms: tuple[int, float]) -> None:
        for x, factor in terms:
            row.append(len(least))
            column.append(x)
            value.append(factor)
        least.append(bound)

    whole: list[int] = []
    before: dict[int, int] = {}  # storage -> variable: whether it is resident at the event before
    runs: list[int] = []
    for t, k in events:
        own = k == t
        ran = variable(0.0 if own else trace.ops[k].seconds / unit, 1.0 if own else 0.0, not own)
        makes = trace.ops[k].outputs if k < n else ()
        now = {}
        for s in (*before, *(s for s in makes if s not in before)):
            stays = s in trace.constants and t < min(trace.storages[s].released, n + 1)
            now[s] = variable(0.0, float(stays), False)
            terms = [(now[s], -1.0)]
            if s in before:
                terms.append((before[s], 1.0))
            if s in makes:
                terms.append((ran, 1.0))
                at_least(0.0, (now[s], 1.0), (ran, -1.0))
            at_least(0.0, *terms)
        for s in trace.ops[k].inputs if k < n else ():
            at_least(0.0, (now[s], 1.0), (ran, -1.0))
        at_least(-1.0, *((x, -size[s] / budget_bytes) for s, x in now.items()))
        runs.append(ran)
        before = now
    for s, storage in enumerate(trace.storages):
        if storage.released == HELD:
            at_least(1.0, (before[s], 1.0))
    matrix = csr_array((value, (row, column)), shape=(len(least), len(cost)))
    found = milp(
        cost,
        constraints=LinearConstraint(matrix, np.array(least), np.inf),
        bounds=Bounds(np.array(low), np.array(high)),
        integrality=np.array(whole),
        options={"time_limit": limit_seconds, "mip_rel_gap": 0.0},
    )
    if found.status == 2:
        return Exact(True, False, float("inf"), [])
    if found.status != 0:
        return Exact(False, False, float("inf"), [])
    order = [event for event, ran in zip(events, runs, strict=True) if found.x[ran] > 0.5 and event[1] < n]
    return Exact(True, True, float(found.fun) * unit, _steps(trace, order))


def _steps(trace: Trace, order: list[tuple[int, int]]) -> list[Step]:
    """Runs `order`, (stage, op) each, and frees a storage if no op reads it before it is made again."""
    wanted = {s for s, storage in enumerate(trace.storages) if storage.released == HELD}
    steps: list[Step] = []
    for t, k in reversed(order):
        op = trace.ops[k]
        gone = {s for s in (*op.inputs, *op.outputs) if s not in wanted and (s not in trace.constants)}
        steps += [Step(Do.FREE, s) for s in sorted(gone)]
        steps.append(Step(Do.COMPUTE if k == t else Do.RECOMPUTE, k))
        wanted = (wanted - set(op.outputs)) | set(op.inputs)
    return steps[::-1]
