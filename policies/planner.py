"""From a trace and a budget to a plan: keep, recompute, offload and prefetch, cell by cell (design section 5).

The plan is a list of steps in the order in which the compute stream meets them, and says what it costs, what no schedule can
go below, and the gap between the two. What is behind it: docs/planner.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .bound import INFEASIBLE, with_link
from .planner_link import hide
from .planner_recompute import least_bytes, recompute_only
from .planner_search import Search
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


EFFORT = 300_000
"""Steps of search of a plan by default: about a second."""

_PRICES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Seconds of recompute that a second of the link is worth, tried in turn; 0: all that leaves is offloaded."""


def plan(
    trace: Trace,
    budget_bytes: int,
    *,
    link: TierLink | None = None,
    recompute: bool = True,
    effort: int = EFFORT,
) -> Plan:
    """The best plan found. The same arguments give the same plan.

    With a link it is the best of recompute alone, the link alone and mixtures of both, so never worse than either.

    Args:
        trace: a measured pass.
        budget_bytes: most bytes resident at any time, the outputs of the running op included.
        link: the tier that may be used; None: recompute only.
        recompute: whether ops may run again; without it the link alone has to do.
        effort: steps of search, about 3 us each.

    *Known limitations*: what the program holds at the end (gradients) may be dropped and made again, but close to the room
    that constants, these and the largest op need together a plan may not be found although one exists. In a trace that is
    not `copy_on_write`, recomputing an in-place op is taken to need a private copy (design rule 2).
    """
    problem = Problem.of(trace)
    if not recompute:
        problem = replace(problem, again=[False] * len(problem.size))
    at = trace.unmanaged_peak[1]
    unmanaged = sum(problem.cost)
    idle = Timeline(problem)
    best: Timeline | None = None
    seconds = bound = INFEASIBLE
    if budget_bytes < least_bytes(problem):
        pass
    elif idle.peak <= budget_bytes:
        best, seconds, bound = idle, unmanaged, 0.0
    elif recompute:
        best, bound = recompute_only(problem, budget_bytes, moment=at, effort=effort)
        seconds = unmanaged + best.extra_seconds if best is not None else INFEASIBLE
    if link is not None and idle.peak > budget_bytes >= least_bytes(problem):
        bound = with_link(problem, budget_bytes, at, link).seconds
        full = int((idle.profile > budget_bytes).argmax())
        candidates = [
            _advised(problem, budget_bytes, link, at, share, full if early else at, effort) for share, early in _SHARES
        ]
        candidates += [_mixed(problem, budget_bytes, link, x, effort) for x in (_PRICES if recompute else _PRICES[:1])]
        for other in candidates:
            if other is not None and other[1] < seconds:
                best, seconds = other
    if best is None:
        return Plan(budget_bytes, False, (), (), 0, INFEASIBLE, unmanaged, unmanaged + bound)
    steps = _steps(best)
    return Plan(budget_bytes, True, steps, _absences(best), best.peak, seconds, unmanaged, unmanaged + bound)


_SHARES = ((1.0, False), (0.85, False), (1.0, True), (0.8, True), (0.5, True), (0.25, True))
"""What share of the bandwidth the advice may count on, and whether writes have to be done when memory fills up first."""


def _advised(
    problem: Problem, budget_bytes: int, link: TierLink, at: int, share: float, due: int, effort: int
) -> tuple[Timeline, float] | None:
    """(timeline, seconds) where what the relaxation reads back is offloaded over the moment `at`, the rest shaved."""
    slower = replace(
        link,
        read_bytes_per_second=share * link.read_bytes_per_second,
        write_bytes_per_second=share * link.write_bytes_per_second,
    )
    advice = with_link(problem, budget_bytes, at, slower, due=due)
    chosen = {s for s, x in advice.read.items() if x > 0.5}
    if not chosen:
        return None
    best: tuple[Timeline, float] | None = None
    prices = {s: 1e-3 * problem.size[s] / link.read_bytes_per_second for s in chosen}
    if not any(problem.again):  # what the advice keeps may have to go as well
        prices = {s: prices.get(s, size / link.read_bytes_per_second) for s, size in enumerate(problem.size) if size}
    bias = {s: 0.1 + k for s, k in advice.kept.items()}
    for sharpness in (1.0, 3.0):
        timeline = Timeline(problem, prices)
        moment = timeline.own[at]
        for s in chosen:
            uses = [q for q in timeline.uses[s] if q > moment]
            if uses and timeline.pin[s] < moment:
                timeline.add(timeline.restore(s, uses[0]))
        search = Search(timeline, budget_bytes, bias=bias)
        if not search.shave(sharpness=sharpness, limit_work=effort // 8):
            continue
        search.settle()
        seconds = hide(timeline, link, budget_bytes).seconds
        if best is None or seconds < best[1]:
            best = timeline, seconds
    return best


def _mixed(
    problem: Problem, budget_bytes: int, link: TierLink, price: float, effort: int
) -> tuple[Timeline, float] | None:
    """(timeline, seconds) where what costs less over the link than running again, at this price, is offloaded."""
    prices = {}
    room = link.capacity_bytes
    for s in sorted(range(len(problem.size)), key=lambda s: -problem.cost[problem.maker[s]] / max(problem.size[s], 1)):
        size = problem.size[s]
        moving = size / link.read_bytes_per_second + size / link.write_bytes_per_second + 2 * link.latency_seconds
        if size and (price * moving < problem.cost[problem.maker[s]] or not problem.again[s]):
            if room is not None:
                if size > room:
                    continue
                room -= size
            # Never nothing: what moves fewer bytes is better even where the link is free.
            prices[s] = max(price, 0.02) * moving
    best: tuple[Timeline, float] | None = None
    for sharpness in (1.0, 3.0):
        search = Search(Timeline(problem, prices), budget_bytes)
        if not search.shave(sharpness=sharpness, limit_work=effort // 4):
            search = Search(Timeline(problem, prices), budget_bytes)
            if not search.squeeze(sharpness=sharpness, limit_work=effort // 4):
                continue
        search.settle()
        if not any(search.timeline.op(q) < 0 for q in search.timeline.extras()):
            continue
        seconds = hide(search.timeline, link, budget_bytes).seconds
        if best is None or seconds < best[1]:
            best = search.timeline, seconds
    return best


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
