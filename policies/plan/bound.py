"""Lower bounds: how little extra time any schedule under a budget can take.

Source: the relaxation of `anchors`, as a linear program. At a *moment* (while op T runs) let K be the resident storages
and R the ops that run again afterwards. A storage that is needed later is in K or its maker is in R; an op in R has
each input in K or its maker in R; K fits the budget together with the storages that op T itself and the program hold;
minimise the time of R. Every schedule gives such a K and R, so the fractional optimum is a bound.

With several moments T1 < T2 < ... the stages between them have their own R. A storage resident at a moment was resident
at the one before, or was made since, and the ops after a moment are those of the stages after it. Each moment's own
program is among the constraints, so the bound is at least the best of the single ones, and tighter where memory is
short for long: making things again needs room as well.

With a link, a storage that is not in K may also be read back. The reads after T must fit into the time of the ops after
T, the writes into the time of the ops before it; the excess is waiting. That is a bound on time for schedules with
offload.

*Known limitations*: an op that runs more than once between two moments is counted once; with a link only the single moments
count. Views cost nothing again. HiGHS is called with its defaults, so the bound is good to its feasibility tolerance (1e-7).
A single moment is solved by cuts (cut.py), without a solver; its bound is at most 1e-7 of the pass below the optimum. Without
scipy (an extra) several moments are each asked alone, and the bound is 0 with a link.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np

from memmgr.policies.trace import TierLink, Trace
from memmgr.policies.trace.columns import Problem

from .cut import relaxed

INFEASIBLE = float("inf")


class Unsolved(Exception):
    """There is no answer of the linear program: no solver, or it gave up."""


SOLVE: ContextVar[bool] = ContextVar("SOLVE", default=True)
"""False: as if there were no solver. Loading scipy takes some 50 MB, too much where these bytes are the budget."""


@dataclass
class Rows:
    """A linear program being written: variables in [low, high], rows `sum <= right`."""

    cost: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)

    def variable(self, cost: float, low: float = 0.0, high: float = 1.0) -> int:
        self.cost.append(cost)
        self.low.append(low)
        self.high.append(high)
        return len(self.cost) - 1

    def at_most(self, right: float, *terms: tuple[int, float]) -> None:
        n = len(self.right)
        for column, value in terms:
            self.row.append(n)
            self.column.append(column)
            self.value.append(value)
        self.right.append(right)

    def solve(self) -> tuple[float, list[float]] | None:
        """The optimum and where it is; None if there is no solution.

        Raises:
            Unsolved: no solver is installed, or it came to no answer.
        """
        if not self.cost:
            return 0.0, []
        if not SOLVE.get():
            raise Unsolved("linear programs are not wanted here")
        try:  # imported here: scipy is an extra, and a budget with room for all never gets here
            from scipy.optimize import linprog
            from scipy.sparse import csr_array
        except ImportError as error:
            raise Unsolved(str(error)) from None
        matrix = csr_array((self.value, (self.row, self.column)), shape=(len(self.right), len(self.cost)))
        result = linprog(self.cost, A_ub=matrix, b_ub=self.right, bounds=np.array([self.low, self.high]).T)
        if result.status not in (0, 2):
            raise Unsolved(result.message)
        return None if result.status == 2 else (float(result.fun), list(result.x))


@dataclass(frozen=True)
class _Moment:
    """One moment: which storages matter after it, and which bytes are resident in every schedule."""

    at: int
    relevant: list[int]
    there: frozenset[int]
    lost: frozenset[int]
    forced_bytes: int


def _moment(problem: Problem, at: int, last_use: list[int]) -> _Moment:
    there = set(problem.inputs[at]) | set(problem.outputs[at])
    there.update(s for s, k in enumerate(problem.maker) if k <= at <= problem.pinned[s])
    relevant: set[int] = set()
    # An op that runs at the moment has read its inputs, but after it they may be wanted again.
    stack = [s for s, k in enumerate(problem.maker) if k <= at < last_use[s]]
    while stack:
        s = stack.pop()
        if s not in relevant:
            relevant.add(s)
            if problem.again[s]:
                stack.extend(problem.inputs[problem.maker[s]])
    forced = sum(problem.size[s] for s in there) - problem.handed[at]
    lost = frozenset(s for s in relevant if 0 <= problem.written[s] <= at or 0 <= problem.let_go[s] < at)
    return _Moment(at, sorted(relevant), frozenset(there), lost, forced)


def _uses(problem: Problem) -> list[list[int]]:
    uses: list[list[int]] = [[] for _ in problem.size]
    for k, inputs in enumerate(problem.inputs):
        for s in inputs:
            uses[s].append(k)
    for s in problem.held:
        uses[s].append(problem.n_ops)
    return uses


def lower_bound_seconds(
    trace: Trace, budget_bytes: int, *, moments: Sequence[int] | None = None, link: TierLink | None = None
) -> float:
    """Extra seconds (over one run of each op) that no schedule under the budget can go below.

    Args:
        trace: the pass.
        budget_bytes: most bytes resident at any time.
        moments: op numbers; default: the unmanaged peak alone. More are tighter and slower.
        link: None: recompute only. Else reads and writes over it are allowed beside recompute.

    Returns:
        0.0 or more; `INFEASIBLE` if no schedule can exist (the reverse is not proved by a finite bound).
    """
    problem = Problem.of(trace)
    at = sorted(set(moments if moments is not None else (trace.unmanaged_peak[1],)))
    if not problem.n_ops:
        return 0.0
    if link is not None:
        return max(with_link(problem, budget_bytes, t, link).seconds for t in at)
    return relaxation(problem, budget_bytes, at)[0]


def relaxation(problem: Problem, budget_bytes: int, at: Sequence[int]) -> tuple[float, dict[int, float]]:
    """The bound over the moments `at` (ascending), and the share of each storage that it keeps at the first of them."""
    unit = max(max(problem.cost), 1e-30)
    uses = _uses(problem)
    last_use = [u[-1] if u else -1 for u in uses]
    rows = Rows()
    seen = [_moment(problem, t, last_use) for t in at]
    if any(m.forced_bytes > budget_bytes for m in seen):
        return INFEASIBLE, {}
    if len(seen) == 1 or not SOLVE.get():
        return max((_alone(problem, budget_bytes, m, last_use) for m in seen), key=lambda found: found[0])
    kept: list[dict[int, int]] = []
    again: list[dict[int, int]] = []
    for m in seen:
        kept.append(_kept(rows, problem, m, budget_bytes))
        makers = {problem.maker[s] for s in m.relevant if problem.again[s]}
        again.append({k: rows.variable(problem.cost[k] / unit) for k in sorted(makers)})
    for j, m in enumerate(seen):
        for e in sorted({j, len(seen) - 1}):  # the stage after this moment, and all that comes after it
            ran = again[j]
            if e > j:
                ran = {k: rows.variable(0.0) for k in again[j]}
                for k, x in ran.items():
                    rows.at_most(0.0, (x, 1.0), *((again[q][k], -1.0) for q in range(j, e + 1) if k in again[q]))
            until = at[e + 1] if e + 1 < len(at) else problem.n_ops
            for s in m.relevant:
                made = ((kept[j][s], -1.0), *optional(ran, problem.maker[s], -1.0))
                if any(m.at < u <= until for u in uses[s]):
                    rows.at_most(-1.0, *made)
                if e + 1 < len(seen) and s in kept[e + 1]:
                    rows.at_most(0.0, (kept[e + 1][s], 1.0), *made)
            for k, x in ran.items():
                for s in problem.inputs[k]:
                    rows.at_most(0.0, (x, 1.0), (kept[j][s], -1.0), *optional(ran, problem.maker[s], -1.0))
    try:
        found = rows.solve()
    except Unsolved:
        return max((_alone(problem, budget_bytes, m, last_use) for m in seen), key=lambda found: found[0])
    if found is None:
        return INFEASIBLE, {}
    return max(0.0, found[0] * unit), {s: found[1][x] for s, x in kept[0].items()}


MOST_WORK = 6_000
"""Limit of `tighter`: storages that matter, summed over the moments of all programs it solves. HiGHS takes 0.02 to 0.1
ms for one.
"""


def tighter(
    problem: Problem, budget_bytes: int, known: float, moments: Sequence[int], most_work: int = MOST_WORK
) -> float:
    """A bound in extra seconds over more moments than one, for a pass that has a schedule.

    Memory may be short for another reason than at the unmanaged peak: there many resident storages may be evicted, here
    few. Then another moment gives a higher bound. Bytes kept for one moment are missing at the other. Each moment is
    solved alone. Then the others join the one with the highest bound while that raises it.

    Args:
        problem: the pass.
        budget_bytes: most bytes resident.
        known: the bound over one moment.
        moments: op numbers, the most promising first: where a good schedule has no room left.
        most_work: nothing more is asked then.

    Returns:
        At least `known`.
    """
    uses = _uses(problem)
    last_use = [u[-1] if u else -1 for u in uses]
    weight = {t: len(_moment(problem, t, last_use).relevant) for t in moments}
    alone: dict[int, float] = {}
    for t in weight:
        most_work -= weight[t]
        if most_work >= 0:
            alone[t] = relaxation(problem, budget_bytes, [t])[0]
    # There is a schedule, so where a relaxation has none that was rounding.
    alone = {t: seconds for t, seconds in alone.items() if seconds < INFEASIBLE}
    ranked = sorted(alone, key=lambda t: -alone[t])
    together, best = ranked[:1], max([0.0, *alone.values()])
    for t in ranked[1:] if SOLVE.get() else ():
        most_work -= sum(weight[m] for m in together) + weight[t]
        if most_work < 0:
            break
        seconds = relaxation(problem, budget_bytes, sorted((*together, t)))[0]
        if best * 1.0005 < seconds < INFEASIBLE:
            together.append(t)
        best = max(best, seconds) if seconds < INFEASIBLE else best
    return max(known, best)


def _alone(problem: Problem, budget_bytes: int, m: _Moment, last_use: list[int]) -> tuple[float, dict[int, float]]:
    """The optimum of one moment's program, and the shares that are kept, by cuts."""
    loose = [s for s in m.relevant if s not in m.there or s in m.lost]
    known = set(loose)
    again = sorted({problem.maker[s] for s in m.relevant if problem.again[s]})
    seconds, kept = relaxed(
        {k: problem.cost[k] for k in again},
        {k: [s for s in problem.inputs[k] if s in known] for k in again},
        {s: problem.size[s] for s in loose},
        {s: problem.maker[s] for s in loose},
        [s for s in loose if last_use[s] > m.at],
        m.lost & known,
        budget_bytes - m.forced_bytes,
        {s: last_use[s] / problem.n_ops for s in loose if last_use[s] >= 0},
    )
    return seconds, {s: kept.get(s, 1.0) for s in m.relevant} if kept or seconds < INFEASIBLE else {}


def optional(variables: dict[int, int], key: int, value: float) -> tuple[tuple[int, float], ...]:
    return ((variables[key], value),) if key in variables else ()


def _kept(rows: Rows, problem: Problem, m: _Moment, budget_bytes: int) -> dict[int, int]:
    """K of a moment, and its room."""
    kept = {s: rows.variable(0.0, float(s in m.there and s not in m.lost), float(s not in m.lost)) for s in m.relevant}
    room = [(x, problem.size[s] / max(budget_bytes, 1)) for s, x in kept.items() if s not in m.there]
    if room:
        rows.at_most((budget_bytes - m.forced_bytes) / max(budget_bytes, 1), *room)
    return kept


@dataclass(frozen=True)
class Share:
    """Solution of the program with a link: seconds over one run of each op, and the shares kept and read back at the
    moment.
    """

    seconds: float
    kept: dict[int, float]
    read: dict[int, float]


def with_link(problem: Problem, budget_bytes: int, at: int, link: TierLink, *, due: int | None = None) -> Share:
    """The single-moment program in which the link may read storages that K lacks. Its objective counts waiting as well.

    Args:
        due: also asks that each read fits between the moment and its first use, and each write between the making and
            op `due`, or the moment for a storage made later. Schedules may do without, so this is advice, not a bound.
    """
    uses = _uses(problem)
    m = _moment(problem, at, [u[-1] if u else -1 for u in uses])
    if m.forced_bytes > budget_bytes:
        return Share(INFEASIBLE, {}, {})
    unit = max(max(problem.cost), 1e-30)
    rows = Rows()
    kept = _kept(rows, problem, m, budget_bytes)
    makers = sorted({problem.maker[s] for s in m.relevant if problem.again[s]})
    again = {k: rows.variable(problem.cost[k] / unit) for k in makers}
    read = {s: rows.variable(1e-6) for s in m.relevant if s not in m.there} if due is not None else {}
    read = read or {s: rows.variable(0.0) for s in m.relevant if s not in m.there}
    waits = [rows.variable(1.0, 0.0, float("inf")) for _ in range(2)]
    for s in m.relevant:
        if uses[s] and uses[s][-1] > at:
            rows.at_most(-1.0, (kept[s], -1.0), *optional(again, problem.maker[s], -1.0), *optional(read, s, -1.0))
    for k, x in again.items():
        for s in problem.inputs[k]:
            rows.at_most(
                0.0, (x, 1.0), (kept[s], -1.0), *optional(again, problem.maker[s], -1.0), *optional(read, s, -1.0)
            )
    passed = np.concatenate(([0.0], np.cumsum(problem.cost))) / unit
    before, after = float(passed[at + 1]), float(passed[-1] - passed[at])
    reading = {s: problem.size[s] / unit / link.read_bytes_per_second for s in read}
    writing = {s: problem.size[s] / unit / link.write_bytes_per_second for s in read}
    # Ops that run again after the moment hide reads too. No op of this program runs again before it.
    more = ((x, -problem.cost[k] / unit) for k, x in again.items())
    rows.at_most(after, *((x, reading[s]) for s, x in read.items()), *more, (waits[0], -1.0))
    rows.at_most(before, *((x, writing[s]) for s, x in read.items()), (waits[1], -1.0))
    if link.capacity_bytes is not None:
        rows.at_most(1.0, *((x, problem.size[s] / max(link.capacity_bytes, 1)) for s, x in read.items()))
    if due is not None:
        first = {s: next((u for u in uses[s] if u > at), problem.n_ops) for s in read}
        for part in range(1, _PARTS + 1):
            limit = min(int(np.searchsorted(passed, passed[at] + after * part / _PARTS)), problem.n_ops)
            early = [(x, reading[s]) for s, x in read.items() if first[s] <= limit]
            if early:
                rows.at_most(float(passed[limit] - passed[at + 1]), *early, (waits[0], -1.0))
            for end in {min(due, at), at}:
                limit = min(int(np.searchsorted(passed, float(passed[end + 1]) * (part - 1) / _PARTS)), end + 1)
                late = [(x, writing[s]) for s, x in read.items() if limit <= problem.maker[s] <= end]
                if late:
                    rows.at_most(float(passed[end + 1] - passed[limit]), *late, (waits[1], -1.0))
    try:
        found = rows.solve()
    except Unsolved:
        return Share(0.0, {}, {})
    if found is None:
        return Share(INFEASIBLE, {}, {})
    seconds, shares = max(0.0, found[0] * unit), found[1]
    return Share(seconds, {s: shares[v] for s, v in kept.items()}, {s: shares[v] for s, v in read.items()})


_PARTS = 12
"""Deadlines on either side of the moment that the advice keeps."""
