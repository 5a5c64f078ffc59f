"""The planners of a measured period, by their names in a policy (`Policy.planner`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from memmgr.policies.plan.planner import plan
from memmgr.policies.published.capuchin import capuchin
from memmgr.policies.published.coop import coop
from memmgr.policies.published.delta import delta_taco
from memmgr.policies.published.states import MODEL_STATE_SYSTEMS
from memmgr.policies.published.swapping import vdnn_all, vdnn_conv
from memmgr.policies.simulate.simulator import Run
from memmgr.policies.trace import TierLink, Trace
from memmgr.policies.trace.schedule import Do, Step

EFFORT = 600_000
"""Steps of the planner's search for a period at most: about a second."""

PERIODS = 1_000
"""A step of training comes so often at least: more search than they get back is not done."""


@dataclass(frozen=True)
class Scheduled:
    """A planner's result."""

    steps: Sequence[Step]  # the schedule
    overhead: float  # predicted time over the unmanaged one's
    lower_bound: float | None = None  # no schedule takes less, in the same unit; None: the planner has none
    away: Sequence[int] = ()  # storages in the tier when the period begins
    moved_bytes: int = 0  # bytes that it writes and reads; 0: not counted

    @property
    def rematerialized(self) -> int:
        """How many ops run again."""
        return sum(step.do is Do.RECOMPUTE for step in self.steps)

    @property
    def offloaded(self) -> int:
        """How many storages are written below."""
        return sum(step.do is Do.OFFLOAD for step in self.steps)


Planner = Callable[[Trace, int, TierLink | None, bool], Scheduled | None]
"""(period, budget in bytes, tier, may ops run again) -> a schedule; None: none fits."""


def _ours(trace: Trace, budget_bytes: int, link: TierLink | None, recompute: bool) -> Scheduled | None:
    made = plan(
        trace, budget_bytes, link=link, recompute=recompute, effort=EFFORT, solve=False, periods=PERIODS, lets_go=True
    )
    if not made.feasible:
        return None
    return Scheduled(made.steps, made.overhead, made.lower_bound, made.away, made.moved_bytes)


def _published(system: Callable[[Trace, int, TierLink | None], Run]) -> Planner:
    def make(trace: Trace, budget_bytes: int, link: TierLink | None, recompute: bool) -> Scheduled | None:
        run = system(trace, budget_bytes, link)
        if not run.feasible:
            return None
        return Scheduled(run.steps, run.overhead, away=run.away, moved_bytes=run.moved_bytes)

    return make


PLANNERS: MappingProxyType[str, Planner] = MappingProxyType(
    {
        "plan": _ours,
        "capuchin": _published(capuchin),
        "delta_taco": _published(delta_taco),
        "coop": _published(coop),
        "vdnn_all": _published(vdnn_all),
        "vdnn_conv": _published(vdnn_conv),
        **{name: _published(system) for name, system in MODEL_STATE_SYSTEMS.items()},
    }
)
"""The published ones run with the feedback and the fallback of their papers, both in the simulator. Live, the whole
resulting schedule is followed.
"""
