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
    """A period to plan."""

    period: Noted  # as the pager noted it
    budgets: tuple[int, ...]  # in bytes, the best first; the plan is for the first of them that a schedule fits
    planner: str  # a name in `PLANNERS`
    recompute: bool  # whether ops may run again


@dataclass(frozen=True)
class Made:
    """A plan."""

    ops: int  # that the program runs
    rows: PackedRows  # for the pager (`Pager.add_plan`)
    overhead: float  # predicted time over the unmanaged one's
    lower_bound: float | None  # no schedule takes less, in the same unit; None: the planner has none
    rematerialized: int  # how many ops run again
    offloaded: int  # how many storages are written to the tier
    moved_bytes: int  # bytes that it writes and reads; 0: not counted


def make(job: PlanJob) -> Made | None:
    """The plan; None: no schedule fits. Raises `TraceError`: the period is no trace."""
    of = job.period.measured()
    trace = smoothed(of.trace)
    link = trace.links[0] if trace.links else None
    planner = PLANNERS[job.planner]
    for limit_bytes in job.budgets:
        found = planner(trace, limit_bytes, link, job.recompute)
        if found is not None:
            return Made(
                trace.ops_run,
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
    """A pass under which budgets of all sizes are tried."""

    period: Noted
    # the run's need. Tensors that no op of the pass touches can be offloaded if there is a tier, and stay otherwise.
    need_bytes: int
    floor_bytes: int  # no budget below it works
    margin: float  # share of a budget that a plan leaves free
    planner: str  # a name in `PLANNERS`; empty: the policy in the simulator predicts
    policy: str
    recompute: bool  # ops may run again
    offload: bool  # there is a tier


def find_knee(job: KneeJob) -> Knee:
    """Where a smaller budget begins to cost time. Raises `TraceError`: the pass is no trace."""
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
