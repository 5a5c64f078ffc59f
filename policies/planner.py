"""From a trace and a budget to a plan: keep, recompute, offload and prefetch, cell by cell (design section 5).

The plan is a list of steps in the order in which the compute stream meets them, and says what it costs, what no schedule can
go below, and the gap between the two. What is behind it: docs/planner.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .bound import lower_bound_seconds
from .planner_search import Search
from .planner_timeline import Problem, Timeline
from .trace import TierLink, Trace


class Do(Enum):
    """What a step does. Values are the judge's words where it has one."""

    COMPUTE = "compute"  # target: op, for the first time
    RECOMPUTE = "recompute"  # target: op, again: makes those of its storages that are not resident
    FREE = "free"  # target: storage; if a write of it is under way, waits for its end
    OFFLOAD = "offload"  # target: storage; starts its copy to the tier once what was asked of the link before is done
    RELOAD = "reload"  # target: storage; its room is taken now, the read starts when the link is free; its users wait


@dataclass(frozen=True, slots=True)
class Step:
    """One step; see `Do`."""

    do: Do
    target: int


@dataclass(frozen=True)
class Plan:
    """Decisions for one pass.

    Attributes:
        budget_bytes: what it was made for.
        feasible: whether there are steps.
        steps: the schedule; empty if infeasible.
        peak_bytes: most bytes resident at any step; 0 if infeasible.
        seconds: predicted time, waits included; inf if infeasible.
        unmanaged_seconds: time of one run of each op.
        bound_seconds: no schedule under the budget takes less; inf: none exists.
    """

    budget_bytes: int
    feasible: bool
    steps: tuple[Step, ...]
    peak_bytes: int
    seconds: float
    unmanaged_seconds: float
    bound_seconds: float

    @property
    def overhead(self) -> float:
        """Predicted time over the unmanaged one's; inf if infeasible."""
        return self.seconds / self.unmanaged_seconds if self.unmanaged_seconds else 1.0

    @property
    def lower_bound(self) -> float:
        """The bound as an overhead."""
        return self.bound_seconds / self.unmanaged_seconds if self.unmanaged_seconds else 1.0

    @property
    def gap(self) -> float:
        """How much longer than the bound it takes, as a share of the bound's time: 0.03 is 3 % above the best possible."""
        return self.seconds / self.bound_seconds - 1.0 if 0 < self.bound_seconds < float("inf") else 0.0


def plan(trace: Trace, budget_bytes: int, *, link: TierLink | None = None, recompute: bool = True) -> Plan:
    """The best plan found.

    Args:
        trace: a measured pass.
        budget_bytes: most bytes resident at any time, the outputs of the running op included.
        link: the tier that may be used; None: recompute only.
        recompute: whether ops may run again; without it the link alone has to do.
    """
    problem = Problem.of(trace)
    best: Timeline | None = None
    for sharpness in (0.0, 1.0, 3.0):
        timeline = Timeline(problem)
        search = Search(timeline, budget_bytes)
        if search.shave(sharpness=sharpness, limit_seconds=best.extra_seconds * 2 if best else float("inf")):
            search.settle()
            if best is None or timeline.extra_seconds < best.extra_seconds:
                best = timeline
    unmanaged = trace.seconds
    bound = unmanaged + lower_bound_seconds(trace, budget_bytes)
    if best is None:
        return Plan(budget_bytes, False, (), 0, float("inf"), unmanaged, bound)
    return Plan(budget_bytes, True, _steps(best), best.peak, unmanaged + best.extra_seconds, unmanaged, bound)


def _steps(timeline: Timeline) -> tuple[Step, ...]:
    ends: dict[int, list[int]] = {}
    for s, _, end in timeline.intervals():
        ends.setdefault(end, []).append(s)
    steps = []
    for key in timeline.keys:
        stage, op = key // timeline.stride, key % timeline.stride - timeline.first
        if op == timeline.problem.n_ops:
            break
        steps.append(Step(Do.COMPUTE if op == stage else Do.RECOMPUTE, op))
        steps.extend(Step(Do.FREE, s) for s in ends.get(key, ()))
    return tuple(steps)
