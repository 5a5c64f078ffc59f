"""From a trace and a budget to a plan: keep, recompute, offload and prefetch, cell by cell.

The plan is a list of steps in the order of the compute stream. It has its cost, a lower bound on every schedule's, and
the gap between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from memmgr.policies.trace import TierLink, Trace
from memmgr.policies.trace.columns import Problem
from memmgr.policies.trace.least_memory import least_bytes
from memmgr.policies.trace.plan import Plan
from memmgr.policies.trace.schedule import Do, Step
from memmgr.policies.trace.trace import OpKind

from .bound import INFEASIBLE, SOLVE, with_link
from .fallback import best_online
from .offload import offloading
from .paging import MANY, least_seconds, paged
from .recompute import recompute_only, replayed, traded
from .search import Search
from .smallest_budget import smallest_budget_bytes
from .timeline import Timeline

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
    periods: float = INFEASIBLE,
    lets_go: bool = False,
) -> Plan:
    """The best plan found. The same arguments give the same plan.

    With a link it is the best of recompute alone, the link alone and mixtures of both, so never worse than either.
    Where none of these fits, it is the best schedule of an online policy.

    Args:
        trace: a measured pass.
        budget_bytes: most bytes resident at any time, the outputs of the running op included.
        link: the tier that may be used; None: recompute only.
        recompute: whether ops may run again; without it the link alone has to do.
        effort: steps of search at most, about 2 us each.
        periods: how often the plan will be followed. A search ends when that many periods cannot repay it.
        lets_go: a storage that the program has released is freed, as in a run that follows the plan; else a schedule
            may keep it.
        solve: whether linear programs are solved, for the bound and as advice; without them the bound is weaker, plans with a
            slow link are up to a twentieth longer, and scipy (50 MB) is not loaded.

    *Known limitations*: storages that the program holds at the end (gradients) may be dropped and made again. But close
    to the room that constants, these and the largest op need together, a plan may not be found although one exists. If
    a budget has a plan, every larger one has, too, except for the few that only an online policy fits. In a trace that
    is not `copy_on_write`, recomputing an in-place op is taken to need a private copy (rule 4).
    """
    wanted = SOLVE.set(solve)
    try:
        return _plan(trace, budget_bytes, link, recompute, effort, periods, lets_go)
    finally:
        SOLVE.reset(wanted)


def _plan(
    trace: Trace, budget_bytes: int, link: TierLink | None, recompute: bool, effort: int, periods: float = INFEASIBLE,
    lets_go: bool = False,
) -> Plan:  # fmt: skip
    if link is not None and trace.cycle:
        return _cycle(trace, budget_bytes, link, recompute, effort, lets_go)
    problem = Problem.of(trace, lets_go=lets_go)
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
            best, bound = recompute_only(problem, trace, budget_bytes, effort=effort, periods=periods)
            seconds = unmanaged + best.extra_seconds if best is not None else INFEASIBLE
        if link is not None:
            bound = with_link(problem if recompute else swapping, budget_bytes, at, link).seconds
            # The link alone is tried too, so that no smaller set of means gives a better plan.
            for p in (swapping, problem) if recompute else (swapping,):
                gate = best is None or p is swapping  # alone it has the same turn
                for other, takes in offloading(p, budget_bytes, link, at, effort, gate=gate):
                    if takes < seconds:
                        best, seconds = other, takes
                    if seconds <= (unmanaged + bound) * (1 + 1e-9):
                        break
    if best is None and bound < INFEASIBLE and (link is not None or budget_bytes >= smallest_budget_bytes(trace)):
        found = best_online(trace, budget_bytes, link, recompute=recompute)
        if found is not None:
            steps, cost = found
            best = _improved(problem, trace, budget_bytes, steps, bound, effort) if link is None else None
            if best is None:
                return Plan(budget_bytes, True, steps, cost.peak_bytes, cost.seconds, unmanaged, unmanaged + bound)
            seconds = unmanaged + best.extra_seconds
    if best is None:
        return Plan(budget_bytes, False, (), 0, INFEASIBLE, unmanaged, unmanaged + bound)
    return Plan(budget_bytes, True, _steps(best), best.peak, seconds, unmanaged, unmanaged + bound)


_STEPS = (1 / 4, 1 / 8, 1 / 16, 1 / 32)
"""How far apart the levels are that are tried in turn (`_levels`)."""

_STEPS_OF_MANY = _STEPS[:2]
"""The same for a pass of `MANY` ops."""

_CLOSE = 1.02
"""So near to the bound nothing is tried any more."""


def _cycle(trace: Trace, budget_bytes: int, link: TierLink, recompute: bool, effort: int, lets_go: bool) -> Plan:
    """The best of two plans: paging alone, and paging the rest after some storages are recomputed."""
    unmanaged = trace.seconds
    if trace.unmanaged_peak[0] <= budget_bytes:
        idle = Timeline(Problem.of(trace))
        return Plan(budget_bytes, True, _steps(idle), idle.peak, unmanaged, unmanaged, unmanaged)
    bound = least_seconds(trace, budget_bytes, link)
    found: list[Plan] = []

    def seconds_of(made: Plan | None) -> float:
        if made is None or not made.feasible:
            return INFEASIBLE
        found.append(made)
        return made.seconds

    def paging(program: Iterable[Step] | None = None) -> Plan | None:
        made = paged(trace, budget_bytes, link, program)
        if made is None:
            return None
        return Plan(
            budget_bytes, True, made.steps, made.peak_bytes, max(made.seconds, unmanaged), unmanaged, bound, made.away,
            made.clean, made.moved_bytes,
        )  # fmt: skip  # the clock of the second pass rounds

    if seconds_of(paging()) > _CLOSE * bound:
        # First as if storages that live from pass to pass could not be evicted; then with more or fewer of the others.
        seconds_of(_standing(trace, budget_bytes, link, recompute, effort, bound, lets_go))
        if recompute:
            _levels(trace, budget_bytes, effort, lets_go, lambda steps: seconds_of(paging(steps)))
    return min(
        found, key=lambda one: one.seconds, default=Plan(budget_bytes, False, (), 0, INFEASIBLE, unmanaged, bound)
    )


def _levels(
    trace: Trace, budget_bytes: int, effort: int, lets_go: bool, seconds_of: Callable[[Iterable[Step]], float]
) -> None:
    """Pages the pass with more or fewer of its own storages made again: half of those that may stay, then those levels around
    the best one, ever nearer to it.

    Args:
        seconds_of: pages a schedule of computes, recomputes and frees.
    """
    inside = _without_cycle(trace)
    in_time = _read_in_time(inside)
    least = least_bytes(Problem.of(inside))
    most = min(inside.unmanaged_peak[0], budget_bytes)
    known: dict[float, float] = {}

    def tried(level: float) -> float:
        if level not in known:
            limit = int(least + level * (most - least))
            made = _plan(inside, limit, None, True, effort // 8, lets_go=lets_go)
            if _reads_what_is_gone(inside, made.steps):
                made = _plan(in_time, limit, None, True, effort // 8, lets_go=lets_go)
            known[level] = seconds_of(made.steps) if made.feasible else INFEASIBLE
        return known[level]

    best = 0.5
    for step in _STEPS_OF_MANY if len(trace.ops) >= MANY else _STEPS:
        best = min((best, best + step, best - step), key=tried)


def _standing(
    trace: Trace, budget_bytes: int, link: TierLink, recompute: bool, effort: int, bound: float, lets_go: bool
) -> Plan:
    """The best plan where storages that live from pass to pass stay resident. A shared link counts as half of it each
    way.
    """
    share = 0.5 if link.shared else 1.0
    halved = replace(
        link,
        read_bytes_per_second=share * link.read_bytes_per_second,
        write_bytes_per_second=share * link.write_bytes_per_second,
    )
    made = _plan(replace(trace, cycle=()), budget_bytes, halved, recompute, effort, lets_go=lets_go)
    copied = (step.target for step in made.steps if step.do in (Do.OFFLOAD, Do.RELOAD))
    moved = sum(trace.storages[s].size_bytes for s in copied)
    return replace(made, bound_seconds=bound, moved_bytes=moved)


def _without_cycle(trace: Trace) -> Trace:
    """The same ops, where storages that live from pass to pass take no room."""
    there = {s for pair in trace.cycle for s in pair}
    for op in reversed(trace.ops):
        there.update(old for old, new in op.writes if new in there)
    for op in trace.ops:
        there.update(new for old, new in op.writes if old in there)
    storages = tuple(replace(s, size_bytes=0) if i in there else s for i, s in enumerate(trace.storages))
    return replace(trace, storages=storages, cycle=())


def _reads_what_is_gone(trace: Trace, steps: Iterable[Step]) -> bool:
    """Tells if an op runs again on bytes that another op has overwritten: a storage without size has a copy for
    nothing.
    """
    gone: set[int] = set()
    for step in steps:
        if step.do not in (Do.COMPUTE, Do.RECOMPUTE):
            continue
        op = trace.ops[step.target]
        if step.do is Do.COMPUTE:
            gone.update(old for old, _ in op.writes)
        elif not gone.isdisjoint(op.inputs):
            return True
        gone.difference_update(op.outputs)
    return False


def _read_in_time(trace: Trace) -> Trace:
    """The same ops, where an op that reads bytes which take no room and are overwritten later runs once."""
    written = {old for op in trace.ops for old, _ in op.writes if not trace.storages[old].size_bytes}
    ops = (
        replace(op, kind=OpKind.ONCE) if op.kind == OpKind.COMPUTE and not written.isdisjoint(op.inputs) else op
        for op in trace.ops
    )
    return replace(trace, ops=tuple(ops))


def _improved(
    problem: Problem, trace: Trace, budget_bytes: int, steps: tuple[Step, ...], bound: float, effort: int
) -> Timeline | None:
    """The timeline of an online policy's schedule, without recomputations that are superfluous in the pass as a whole.
    None: it has no timeline.
    """
    timeline = replayed(problem, steps)
    if timeline is None or timeline.peak > budget_bytes:
        return None
    search = Search(timeline, budget_bytes)
    search.settle(effort)
    traded(search, bound, effort)
    return timeline


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
