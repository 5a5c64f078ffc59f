"""A plan as data: a planner's decisions about a pass, and their cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .schedule import Do, Step
from .trace import Trace


@dataclass(frozen=True)
class Plan:
    """Decisions for one pass."""

    budget_bytes: int  # the budget that it was made for
    feasible: bool  # there are steps
    steps: tuple[Step, ...]  # the schedule; empty if infeasible
    peak_bytes: int  # most bytes resident at any step; 0 if infeasible
    seconds: float  # predicted time, waits included; inf if infeasible
    unmanaged_seconds: float  # time of one run of each op
    bound_seconds: float  # no schedule under the budget takes less; inf: none exists
    away: tuple[int, ...] = ()  # of a cycle, the constants that are in the tier, and not resident, when the pass begins
    clean: tuple[int, ...] = ()  # of a cycle, the constants that are resident then and have a copy in the tier
    moved_bytes: int = 0  # of a cycle, bytes that a pass writes and reads

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


@dataclass(frozen=True, slots=True)
class Carried:
    """A storage that is made again before one op and read before a later one to make others."""

    storage: int  # number in the trace
    made: int  # the op before which its maker runs again
    read: int  # a later op, before which another op runs again that reads it


def carried(trace: Trace, steps: Sequence[Step]) -> list[Carried]:
    """The storages that a schedule keeps from one burst of recomputation to another.

    `steps`: a schedule for it that `schedule.replay` accepts.
    """
    made: dict[int, int] = {}  # recomputed storages that are resident: before which op each was made
    found: dict[Carried, None] = {}
    stage = 0
    for step in steps:
        if step.do is Do.COMPUTE:
            stage += 1
        elif step.do is Do.FREE:
            made.pop(step.target, None)
        elif step.do is Do.RECOMPUTE:
            op = trace.ops[step.target]
            for s in op.inputs:
                if made.get(s, stage) < stage:
                    found[Carried(s, made[s], stage)] = None
            for s in op.outputs:
                made.setdefault(s, stage)
    return list(found)
