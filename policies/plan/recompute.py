"""The recompute-only planner: several ways of shaving, the relaxation's answer among them, the best one traded further."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memmgr.policies.online.policy import run_online
from memmgr.policies.trace import Trace
from memmgr.policies.trace.columns import Problem
from memmgr.policies.trace.least_memory import least_bytes
from memmgr.policies.trace.schedule import Do, Step

from .bound import INFEASIBLE, relaxation, tighter
from .search import Search
from .smallest_budget import smallest_budget_bytes
from .timeline import Timeline

_WAYS = ((0.1, 1.0), (0.02, 3.0), (None, 1.0), (0.5, 3.0), (None, 3.0), (0.1, 0.0), (0.5, 0.0), (None, 0.0), (0.5, 1.0))
"""(share of the price that the relaxation's K leaves to dropped storages, None: the relaxation is not used; sharpness),
most promising first.
"""

_LADDERS = (1.0, 0.0, 3.0)
"""Sharpness on the way down to a budget that is hard to meet, in turn."""

_PATIENT = 0.0
"""The one of these that goes on with `_PATIENCE` times the steps for a rung, where all of them ended above the budget."""

_PATIENCE = 4
"""Where gradients are taken of gradients, one dropped storage makes most of a step run again, so a rung takes many more
steps than there are storages. More than four times as many hardly leads further down.
"""

_MOST_AGAIN = 3.0
"""A schedule of the online policy that recomputes more than so many times the pass is not waited for."""

_GOOD = 0.003
"""Trading stops when the extra time is this share above the bound's."""

STEP_SECONDS = 2e-6
"""The time of a step, about ..."""

_TURN = 100_000
"""... and so many are a turn: after each it is asked whether it was worth it."""

_MOMENTS = 6
"""The highest summits of the timeline that was found, for a tighter bound."""


def _hold(timeline: Timeline, moment: int, kept: dict[int, float]) -> list[tuple[int, int]]:
    """Keeps storages of K in the place of those that K drops, until the last of these is used. Returns (storage, event)
    of each hold.
    """
    p, now = timeline.problem, timeline.own[moment]
    until = [timeline.stage(uses[-1]) if uses else 0 for uses in timeline.uses]
    for s in sorted(kept, key=lambda s: -p.maker[s]):
        if kept[s] < 0.5:
            for i in p.inputs[p.maker[s]]:
                until[i] = max(until[i], until[s])
    held = []
    for s, share in kept.items():
        if share >= 0.5 and until[s] > moment and timeline.gone[s] > now and timeline.reach(s, now + 1) < now:
            held.append((s, timeline.own[until[s]]))
            timeline.hold(*held[-1])
    return held


def shaved(problem: Problem, budget_bytes: int, moment: int, kept: dict[int, float], effort: int) -> Iterator[Search]:
    """Searches whose timelines meet the budget, one for each way that got there, while `effort` lasts."""
    best = INFEASIBLE
    for share, sharpness in _WAYS:
        bias = {s: share + k for s, k in kept.items()} if share is not None else {}
        search = Search(Timeline(problem), budget_bytes, bias=bias)
        # K keeps small tensors from which large ones are cheaply made, although the program has done with them. Such a
        # tensor is worth its room only once much is made from it. It stays from the start, and is dropped afterwards if
        # no recomputation has read it.
        held = _hold(search.timeline, moment, kept) if share is not None else []
        # Pruning takes back at most half of the bytes that shaving drops in excess.
        if search.shave(sharpness=sharpness, limit_seconds=2.2 * best, limit_work=effort):
            for s, key in held:
                search.timeline.release(s, key)
            search.settle(effort)
            best = min(best, search.timeline.extra_seconds)
            yield search
        effort -= search.work
        if effort < 0:
            return


def descend(
    problem: Problem, budget_bytes: int, prices: dict[int, float] | None = None, trace: Trace | None = None
) -> Search | None:
    """A timeline that fits, at any cost; None: no plan. If a budget has a timeline, every larger one has.

    The reason: only the end of the search depends on the budget. The same ladders are climbed down, the same levels
    tried, and a timeline that fits a level fits every budget above it.

    Args:
        problem: the pass.
        budget_bytes: most bytes resident.
        prices: the storages that may be read back, see `Timeline`.
        trace: the problem's, if no storage may be read back. A budget that is proven too small is then not searched
            for, and the online policy runs at the same levels if all else fails.
    """
    least = least_bytes(problem)
    work = 2_000 + 24 * len(problem.size)  # steps of one level that may be in vain
    if budget_bytes < least:
        return None
    ladders: dict[float, Search] = {}
    for sharpness in _LADDERS:
        search = ladders[sharpness] = Search(Timeline(problem, prices), 0)
        if _climb_down(search, sharpness, budget_bytes, least, work, 0.2):
            return search
    if trace is not None and budget_bytes < smallest_budget_bytes(trace):
        return None
    search = ladders[_PATIENT]
    if _climb_down(search, _PATIENT, budget_bytes, least, _PATIENCE * work, 0.1):
        return search
    excess = 1.0
    while excess:
        excess = excess / 2 if excess > 0.01 else 0.0
        level = int(least * (1 + excess))
        if level <= budget_bytes:
            search = Search(Timeline(problem, prices), level)
            if search.squeeze(sharpness=1.0, limit_work=3 * work):
                return search
            if trace is not None and trace.copy_on_write:  # the online policy knows no block that is handed on
                fits, machine = run_online(trace, level, most_again=_MOST_AGAIN)
                timeline = replayed(problem, machine.steps) if fits else None
                if timeline is not None and timeline.peak <= level:
                    return Search(timeline, level)
    return None


def _climb_down(search: Search, sharpness: float, budget_bytes: int, least: int, work: int, step: float) -> bool:
    """Lowers the peak by a share of its excess over `least`, rung by rung. Returns if the budget is met.

    A rung that takes more than `work` steps is taken back and tried half as far down, until that is too little to be
    tried.
    """
    timeline = search.timeline
    while timeline.peak > budget_bytes and step > 0.02:
        search.budget, search.bias = least + int((timeline.peak - least) * (1 - step)), {}
        timeline.mark()
        if not search.squeeze(sharpness=sharpness, limit_work=work):
            timeline.undo()
            step /= 2
        timeline.journal = None
    return timeline.peak <= budget_bytes


def replayed(problem: Problem, steps: Iterable[Step]) -> Timeline | None:
    """The timeline of a schedule. None: a stage recomputes in more orders than there are rows, or keeps a storage that
    is freed.
    """
    timeline = Timeline(problem)
    stages: list[list[list[int]]] = [[[]]]  # per stage, per row, ops in ascending order
    for step in steps:
        if step.do is Do.COMPUTE:
            stages.append([[]])
        elif step.do is Do.RECOMPUTE:
            if stages[-1][-1] and stages[-1][-1][-1] >= step.target:
                stages[-1].append([])
            stages[-1][-1].append(step.target)
    for stage, rows in enumerate(stages):
        if len(rows) > timeline.rows:
            return None
        for back, ops in enumerate(reversed(rows)):
            for op in ops:
                timeline.add(timeline.key(stage, op) - back * timeline.stride)
    if any(start < timeline.gone[s] < end for s, start, end in timeline.intervals()):
        return None
    return timeline


def traded(search: Search, bound: float, effort: int, periods: float = INFEASIBLE) -> None:
    """Trades for `effort` steps, until the extra seconds are near the bound, or until `periods` periods cannot repay
    the time of two turns.
    """
    until, enough, timeline = search.work + effort, bound * (1 + _GOOD), search.timeline
    turn = _TURN if periods < INFEASIBLE else effort
    vain = 0
    while search.work < until and (before := timeline.extra_seconds) > enough and vain < 2:
        if (before - enough) * periods < turn * STEP_SECONDS:
            break  # all that there is to win is not worth it
        search.improve(min(turn, until - search.work), enough)
        vain = vain + 1 if (before - timeline.extra_seconds) * periods < turn * STEP_SECONDS else 0


def recompute_only(
    problem: Problem, trace: Trace, budget_bytes: int, *, effort: int, periods: float = INFEASIBLE
) -> tuple[Timeline | None, float]:
    """(the cheapest timeline found, a bound in extra seconds: the relaxation at the unmanaged peak, and where that leaves a
    gap, at the timeline's highest summits).

    Args:
        problem: the pass.
        trace: the same.
        budget_bytes: most bytes resident.
        effort: steps of search, each about `STEP_SECONDS`.
        periods: how often the plan will be followed, see `traded`.
    """
    moment = trace.unmanaged_peak[1]
    bound, kept = relaxation(problem, budget_bytes, [moment])
    if bound == INFEASIBLE:
        return None, bound
    fits = descend(problem, budget_bytes, trace=trace)
    if fits is None:
        return None, bound
    found = list(shaved(problem, budget_bytes, moment, kept, effort // 2))
    fits.budget, fits.bias = budget_bytes, {}
    fits.settle(effort)
    found.append(fits)
    search = min(found, key=lambda search: search.timeline.extra_seconds)
    if search.timeline.extra_seconds > bound * (1 + _GOOD):
        bound = tighter(problem, budget_bytes, bound, search.timeline.summits(_MOMENTS))
    traded(search, bound, max(effort - sum(other.work for other in found), effort // 4), periods)
    return search.timeline, bound
