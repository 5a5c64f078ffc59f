"""Background computations: the plan of a period, and the budget below which runs get slow. Pure functions from plain
data to plain data. They run in the planner's process, which has no torch, or in a thread of the training if no process
can be started.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from memmgr.policies.plan.knee import Knee, knee
from memmgr.policies.rules.registry import parse_policy
from memmgr.policies.simulate.simulator import simulate
from memmgr.policies.trace import TraceError
from memmgr.policies.trace.smooth import smoothed

from .planners import PLANNERS
from .timeline import Noted, PackedRows, rows


@dataclass(frozen=True)
class PlanJob:
    """A period to plan.

    Attributes:
        period: as the pager noted it.
        budgets: in bytes, the best first; the plan is for the first of them that a schedule fits.
        planner: a name in `PLANNERS`.
        recompute: whether ops may run again.
    """

    period: Noted
    budgets: tuple[int, ...]
    planner: str
    recompute: bool


@dataclass(frozen=True)
class Made:
    """A plan.

    Attributes:
        ops: of the trace, constants and the time between ops included.
        rows: for the pager (`Pager.add_plan`).
        overhead: predicted time over the unmanaged one's.
        lower_bound: no schedule takes less, in the same unit; None: the planner has none.
        rematerialized: how many ops run again.
        offloaded: how many storages are written to the tier.
        moved_bytes: bytes that it writes and reads; 0: not counted.
    """

    ops: int
    rows: PackedRows
    overhead: float
    lower_bound: float | None
    rematerialized: int
    offloaded: int
    moved_bytes: int


def make(job: PlanJob) -> Made | None:
    """The plan; None: no schedule fits.

    Raises:
        TraceError: the period is no trace.
    """
    of = job.period.measured()
    trace = smoothed(of.trace)
    link = trace.links[0] if trace.links else None
    planner = PLANNERS[job.planner]
    for limit_bytes in job.budgets:
        found = planner(trace, limit_bytes, link, job.recompute)
        if found is not None:
            return Made(
                len(trace.ops),
                rows(of, found.steps, found.away).packed(),
                found.overhead,
                found.lower_bound,
                found.rematerialized,
                found.offloaded,
                found.moved_bytes,
            )
    return None


@dataclass(frozen=True)
class KneeJob:
    """A pass under which budgets of all sizes are tried.

    Attributes:
        period: the pass.
        need_bytes: of the run. Tensors that no op of the pass touches can be offloaded if there is a tier, and stay
            otherwise.
        floor_bytes: no budget below it works.
        margin: share of a budget that a plan leaves free.
        planner: a name in `PLANNERS`; empty: the policy in the simulator predicts.
        policy: its name.
        recompute: ops may run again.
        offload: there is a tier.
    """

    period: Noted
    need_bytes: int
    floor_bytes: int
    margin: float
    planner: str
    policy: str
    recompute: bool
    offload: bool


def find_knee(job: KneeJob) -> Knee:
    """Where a smaller budget begins to cost time.

    Raises:
        TraceError: the pass is no trace.
    """
    trace = smoothed(job.period.measured().trace)
    link = trace.links[0] if trace.links else None
    stays = 0 if job.offload else max(0, job.need_bytes - trace.unmanaged_peak[0])

    def slowdown(budget_bytes: int) -> float | None:
        limit_bytes = int(budget_bytes * (1.0 - job.margin)) - stays
        if budget_bytes < job.floor_bytes or limit_bytes <= 0:
            return None
        if job.planner:
            made = PLANNERS[job.planner](trace, limit_bytes, link, job.recompute)
            return None if made is None else made.overhead
        run = simulate(trace, limit_bytes, parse_policy(job.policy), link)
        return run.overhead if run.feasible else None

    return knee(job.need_bytes, slowdown)


def modules() -> list[str]:
    """Names of the modules imported here. The planner's process has no torch."""
    return sorted(sys.modules)


def told(error: Exception) -> str:
    """The text of an error here. A period that is no trace (threads whose ops are mixed up) explains itself."""
    return str(error) if isinstance(error, TraceError) else f"{type(error).__name__}: {error}"
