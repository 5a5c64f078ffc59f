"""From a trace and a budget to a plan: keep, recompute, offload and prefetch, cell by cell (design section 5).

The plan is a list of steps in the order in which the compute stream meets them, and says what it costs, what no schedule can
go below, and the gap between the two. What is behind it: docs/planner.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .bound import INFEASIBLE, SOLVE, with_link
from .bound_room import least_bytes
from .planner_offload import offloading
from .planner_recompute import recompute_only
from .planner_timeline import Problem, Timeline
from .schedule import Do, Step
from .trace import TierLink, Trace


@dataclass(frozen=True, slots=True)
class Absence:
    """One time that a storage is away: what a live run acts on.

    Attributes:
        storage: number in the trace.
        offloaded: read back from the tier; else its op runs again.
        after: the op after which it goes (with `offloaded`, once its copy is complete).
        back: the op before which it has to be asked for again: its recompute runs, or its read starts, right before.
        rerun: the stage's own order of events makes some storages to make others; False: wanted by the program itself.
    """

    storage: int
    offloaded: bool
    after: int
    back: int
    rerun: bool


@dataclass(frozen=True)
class Plan:
    """Decisions for one pass.

    Attributes:
        budget_bytes: what it was made for.
        feasible: whether there are steps.
        steps: the schedule; empty if infeasible.
        absences: the same, cell by cell, in the order of going; a storage that is not named stays while it is wanted.
        peak_bytes: most bytes resident at any step; 0 if infeasible.
        seconds: predicted time, waits included; inf if infeasible.
        unmanaged_seconds: time of one run of each op.
        bound_seconds: no schedule under the budget takes less; inf: none exists.
    """

    budget_bytes: int
    feasible: bool
    steps: tuple[Step, ...]
    absences: tuple[Absence, ...]
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
        return self.seconds / self.bound_seconds - 1.0 if 0 < self.bound_seconds < INFEASIBLE else 0.0


@dataclass(frozen=True, slots=True)
class Carried:
    """A storage that nobody saved, made again before one op and read before a later one to make others.

    Attributes:
        storage: number in the trace.
        made: the op before which its maker runs again.
        read: a later op, before which another op runs again that reads it.
    """

    storage: int
    made: int
    read: int


def carried(trace: Trace, steps: Sequence[Step]) -> list[Carried]:
    """What a schedule keeps from one burst of recomputation to another although the program never saved it.

    A live run knows what autograd saved by the order of saving; of the rest it knows what recipes read.

    Args:
        trace: the pass.
        steps: a schedule for it that `schedule.replay` accepts.
    """
    saved = set(trace.saved)
    made: dict[int, int] = {}  # what is there because it was made again: before which op
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
                if s not in saved:
                    made.setdefault(s, stage)
    return list(found)


EFFORT = 300_000
"""Steps of search of a plan by default: about a second."""


def plan(
    trace: Trace,
    budget_bytes: int,
    *,
    link: TierLink | None = None,
    recompute: bool = True,
    effort: int = EFFORT,
    solve: bool = True,
) -> Plan:
    """The best plan found. The same arguments give the same plan.

    With a link it is the best of recompute alone, the link alone and mixtures of both, so never worse than either.

    Args:
        trace: a measured pass.
        budget_bytes: most bytes resident at any time, the outputs of the running op included.
        link: the tier that may be used; None: recompute only.
        recompute: whether ops may run again; without it the link alone has to do.
        effort: steps of search, about 3 us each.
        solve: whether linear programs are solved, for the bound and as advice; without them the bound is weaker, plans with a
            slow link are up to a twentieth longer, and scipy (50 MB) is not loaded.

    *Known limitations*: what the program holds at the end (gradients) may be dropped and made again, but close to the room
    that constants, these and the largest op need together a plan may not be found although one exists. In a trace that is
    not `copy_on_write`, recomputing an in-place op is taken to need a private copy (design rule 2).
    """
    wanted = SOLVE.set(solve)
    try:
        return _plan(trace, budget_bytes, link, recompute, effort)
    finally:
        SOLVE.reset(wanted)


def _plan(trace: Trace, budget_bytes: int, link: TierLink | None, recompute: bool, effort: int) -> Plan:
    problem = Problem.of(trace)
    swapping = replace(problem, again=[False] * len(problem.size))
    at = trace.unmanaged_peak[1]
    unmanaged = sum(problem.cost)
    idle = Timeline(problem)
    best: Timeline | None = None
    seconds = bound = INFEASIBLE
    if budget_bytes < least_bytes(problem):
        pass
    elif idle.peak <= budget_bytes:
        best, seconds, bound = idle, unmanaged, 0.0
    else:
        if recompute:
            best, bound = recompute_only(problem, trace, budget_bytes, effort=effort)
            seconds = unmanaged + best.extra_seconds if best is not None else INFEASIBLE
        if link is not None:
            bound = with_link(problem if recompute else swapping, budget_bytes, at, link).seconds
            # The link alone has its turn too, so that nobody does better with less.
            for p in (swapping, problem) if recompute else (swapping,):
                gate = best is None or p is swapping  # alone it has the same turn
                for other, takes in offloading(p, budget_bytes, link, at, effort, gate=gate):
                    if takes < seconds:
                        best, seconds = other, takes
                    if seconds <= (unmanaged + bound) * (1 + 1e-9):
                        break
    if best is None:
        return Plan(budget_bytes, False, (), (), 0, INFEASIBLE, unmanaged, unmanaged + bound)
    steps = _steps(best)
    return Plan(budget_bytes, True, steps, _absences(best), best.peak, seconds, unmanaged, unmanaged + bound)


def _steps(timeline: Timeline) -> tuple[Step, ...]:
    ends: dict[int, list[int]] = {}
    written = timeline.problem.written
    for s, _, end in timeline.intervals():
        if written[s] < 0 or end != timeline.own[written[s]]:  # else its block went to the new version
            ends.setdefault(end, []).append(s)
    back = {q % timeline.stride for q in timeline.keys if timeline.op(q) < 0}
    steps = []
    for key in timeline.keys:
        stage, op = timeline.stage(key), timeline.op(key)
        if op == timeline.problem.n_ops:
            break
        if op < 0:
            steps.append(Step(Do.RELOAD, key % timeline.stride))
        else:
            steps.append(Step(Do.COMPUTE if op == stage else Do.RECOMPUTE, op))
            if op == stage:
                steps.extend(Step(Do.OFFLOAD, s) for s in timeline.problem.outputs[op] if s in back)
        steps.extend(Step(Do.FREE, s) for s in ends.get(key, ()))
    return tuple(steps)


def _absences(timeline: Timeline) -> tuple[Absence, ...]:
    found = []
    for s, made in enumerate(timeline.made):
        for event, following in zip(made, made[1:], strict=False):
            end = timeline.reach(s, following)
            stage = timeline.stage(following)
            own = timeline.problem.wanted[stage] if stage < timeline.problem.n_ops else timeline.problem.held
            after = max(timeline.stage(max(end, event)), 0)
            found.append(Absence(s, timeline.op(following) < 0, after, stage, s not in own))
    return tuple(sorted(found, key=lambda a: (a.after, a.back, a.storage)))
