"""A plan as data: what a planner decided about a pass, and what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .schedule import Do, Step
from .trace import Trace


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
        return self.seconds / self.bound_seconds - 1.0 if 0 < self.bound_seconds < float("inf") else 0.0


@dataclass(frozen=True, slots=True)
class Carried:
    """A storage that is made again before one op and read before a later one to make others.

    Attributes:
        storage: number in the trace.
        made: the op before which its maker runs again.
        read: a later op, before which another op runs again that reads it.
    """

    storage: int
    made: int
    read: int


def carried(trace: Trace, steps: Sequence[Step]) -> list[Carried]:
    """What a schedule keeps from one burst of recomputation to another.

    Args:
        trace: the pass.
        steps: a schedule for it that `schedule.replay` accepts.
    """
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
                made.setdefault(s, stage)
    return list(found)


def absences(trace: Trace, steps: Iterable[Step]) -> tuple[Absence, ...]:
    """When each storage is away and comes back, in the order of going.

    Args:
        trace: the pass.
        steps: a schedule for it that `schedule.replay` accepts.
    """
    found = []
    there: set[int] = set()
    gone: dict[int, int] = {}  # after which op
    computed = stage = 0  # of the last step that ran something: the op that it ran, or ran it for
    for step in steps:
        if step.do is Do.FREE:
            there.discard(step.target)
            gone[step.target] = stage
            continue
        if step.do is Do.OFFLOAD:
            continue
        reads = step.do is Do.RELOAD
        fresh = [step.target] if reads else [s for s in trace.ops[step.target].outputs if s not in there]
        there.update(fresh)
        if step.do is Do.COMPUTE:
            if not trace.copy_on_write:
                there.difference_update(old for old, _ in trace.ops[step.target].writes)
                gone.update((old, computed) for old, _ in trace.ops[step.target].writes)
            stage = computed
            computed += 1
            continue
        stage = stage if reads else computed
        wanted = trace.ops[computed].inputs if computed < len(trace.ops) else trace.held_at_end
        found += [Absence(s, reads, gone[s], computed, s not in wanted) for s in fresh if s in gone]
    return tuple(sorted(found, key=lambda a: (a.after, a.back, a.storage)))
