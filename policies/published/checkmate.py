"""Checkmate and Moccasin: integer programs that choose which node runs again before which.

- `checkmate` (Jain et al., MLSys 2020, section 4): R[t, i] says that node i runs in stage t, S[t, v] that value v is
  resident when stage t begins. A node runs if each of its inputs is resident or was made in the stage. A resident value
  was resident a stage before, or was made in it. Memory is counted after each node. A value that no later node of the
  stage reads and that is not resident at the next stage is freed. If the program is not solved in time, the answer is
  the better of the best solution found and of its relaxation, rounded in two phases (section 5).
- `moccasin` (Bartan et al., NeurIPS 2023): the output of each node has at most two *retention intervals*, so a node runs at most
  once more. The paper solves that by constraint programming over O(n) integers; here it is a row for each node in the same
  program.

*Known limitations*: passes of more than 40 ops are condensed to so many nodes, blocks of forward and their work in backward.
HiGHS gets a time limit (`milp.py`), so on a slower machine the answer may be a worse one. Needs scipy (the extra `plan`).
"""

from __future__ import annotations

import itertools
from collections import Counter

from memmgr.policies.simulate.simulator import Run
from memmgr.policies.trace import TierLink, Trace

from .graph import Graph, graph_of
from .milp import LIMIT_SECONDS, Milp
from .runs import fastest, judged, refused

MOST_NODES = 40
_RELAXED_SECONDS = 10.0
_THRESHOLDS = (0.5, 0.3, 0.7, 0.1, 0.9)
"""Above which a value of the relaxation is kept; the paper rounds at one half."""


def checkmate(trace: Trace, budget_bytes: int, tier: TierLink | None = None) -> Run:
    """Any node may run again in any stage."""
    return _solved("checkmate", trace, budget_bytes, tier, None)


def moccasin(trace: Trace, budget_bytes: int, tier: TierLink | None = None) -> Run:
    """Each node runs at most once more: two retention intervals."""
    return _solved("moccasin", trace, budget_bytes, tier, 1)


def _solved(name: str, trace: Trace, budget: int, tier: TierLink | None, most_again: int | None) -> Run:
    graph = graph_of(trace, MOST_NODES)
    program = Stages(graph, budget, most_again)
    answers = program.solve(LIMIT_SECONDS.get())
    if answers is None:
        return refused(name, trace, budget, "Checkmate's program needs scipy: pip install scipy")
    runs = [judged(name, trace, budget, tier, graph.events(answer)) for answer in answers]
    return fastest(runs) if runs else refused(name, trace, budget, "no schedule was found")


class Stages:
    """The program. A stage ends with the first run of its node, one more with the end of the pass."""

    def __init__(self, graph: Graph, budget_bytes: int, most_again: int | None, *, since: int = 0) -> None:
        """The program, before it is solved.

        `most_again`: how often each node runs again at most; None: as often as there are stages. `since`: before this
        stage nothing runs again.
        """
        self.graph, self.budget, self.since = graph, budget_bytes, since
        self.most_again = most_again
        self.n = len(graph.nodes)
        self.p = Milp()
        self.unit = max(graph.seconds) or 1.0
        self.runs: dict[tuple[int, int], int] = {}
        self.stays: dict[tuple[int, int], int] = {}
        self._variables()
        self._rows()
        self._memory()
        for i in range(self.n) if most_again is not None else ():
            self.p.at_most(float(most_again or 0), *((x, 1.0) for (t, j), x in self.runs.items() if j == i and t > i))

    def _variables(self) -> None:
        g, p = self.graph, self.p
        for t in range(self.n + 1):
            for i in range(min(t + 1, self.n)):
                if i == t:
                    self.runs[t, i] = p.variable(0.0, 1.0, whole=True)
                elif g.again[i] and t >= self.since:
                    self.runs[t, i] = p.variable(g.seconds[i] / self.unit, whole=True)
        for v, value in enumerate(g.values):
            for t in range(value.maker + 1, self.n + 2):
                there = value.held and t == self.n + 1
                gone = t == value.overwritten + 1
                self.stays[t, v] = p.variable(0.0, float(there), 0.0 if gone and not there else 1.0)

    def _rows(self) -> None:
        g, p = self.graph, self.p
        for v, value in enumerate(g.values):
            for t in range(value.maker + 1, self.n + 2):
                made = self.runs.get((t - 1, value.maker))
                terms = [(self.stays[t, v], 1.0)]
                terms += [(self.stays[t - 1, v], -1.0)] if (t - 1, v) in self.stays else []
                p.at_most(0.0, *terms, *([(made, -1.0)] if made is not None else []))
            for i in value.readers:
                for t in range(i, self.n + 1):
                    if (t, i) in self.runs:
                        made = self.runs.get((t, value.maker))
                        terms = [(self.runs[t, i], 1.0), (self.stays[t, v], -1.0)]
                        p.at_most(0.0, *terms, *([(made, -1.0)] if made is not None else []))

    def _memory(self) -> None:
        g, p, budget = self.graph, self.p, self.budget
        makes: list[list[int]] = [[] for _ in range(self.n)]
        reads: list[list[int]] = [[] for _ in range(self.n)]
        for v, value in enumerate(g.values):
            makes[value.maker].append(v)
            for i in value.readers:
                reads[i].append(v)
        for t in range(self.n + 1):
            base = g.base[min(t, self.n - 1)] / budget
            used = p.variable(0.0, 0.0, 1.0)
            there = [(x, g.values[v].size / budget) for (u, v), x in self.stays.items() if u == t]
            p.at_most(-base, *there, (used, -1.0))
            for i in range(min(t + 1, self.n)):
                ran = self.runs.get((t, i))
                if ran is None:
                    continue
                during, after = p.variable(0.0, 0.0, 1.0), p.variable(0.0, 0.0, 1.0)
                terms = [(used, 1.0)]
                for v in makes[i]:
                    fresh = p.variable(0.0, 0.0, 1.0)
                    was = [(self.stays[t, v], -1.0)] if (t, v) in self.stays else []
                    p.at_most(0.0, (ran, 1.0), (fresh, -1.0), *was)
                    terms.append((fresh, g.values[v].size / budget))
                p.at_most(0.0, *terms, (during, -1.0))
                if g.inside[i]:
                    p.at_most(1.0, (during, 1.0), (ran, g.inside[i] / budget))
                freed = [(self._freed(t, v, i, ran), -g.values[v].size / budget) for v in (*makes[i], *reads[i])]
                p.at_most(0.0, (during, 1.0), *freed, (after, -1.0))
                used = after

    def _freed(self, t: int, v: int, i: int, ran: int) -> int:
        """Tells if value v is freed right after node i in stage t: no later node of the stage reads it, and it is not
        resident at the next stage.
        """
        freed = self.p.variable(0.0, 0.0, 1.0)
        self.p.at_most(0.0, (freed, 1.0), (ran, -1.0))
        self.p.at_most(1.0, (freed, 1.0), (self.stays[t + 1, v], 1.0))
        for j in self.graph.values[v].readers:
            if j > i and (t, j) in self.runs:
                self.p.at_most(1.0, (freed, 1.0), (self.runs[t, j], 1.0))
        return freed

    def keep_at_most(self, stage: int, size_bytes: int) -> None:
        """When this stage begins no more is there."""
        there = [(x, self.graph.values[v].size / self.budget) for (t, v), x in self.stays.items() if t == stage]
        self.p.at_most(size_bytes / self.budget, *there)

    def solve(self, limit_seconds: float, *, rounded: bool = True) -> list[list[list[int]]] | None:
        """Nodes that run again, by stage: the optimum, or several where it is not known; none where there is no schedule; None:
        there is no solver."""
        try:
            solved, x = self.p.solve(limit_seconds)
            found = [] if x is None else [self._order({key for key, at in self.runs.items() if x[at] > 0.5})]
            if not solved and rounded:
                _, x = self.p.solve(max(limit_seconds, _RELAXED_SECONDS), relaxed=True)
                found += [] if x is None else [self._rounded(x, threshold) for threshold in _THRESHOLDS]
                found = [stages for stages in found if self._runs_few(stages)]
        except ImportError:
            return None
        return found

    def _runs_few(self, stages: list[list[int]]) -> bool:
        again = Counter(itertools.chain.from_iterable(stages))
        return self.most_again is None or max(again.values(), default=0) <= self.most_again

    def _rounded(self, x: list[float], threshold: float) -> list[list[int]]:
        """Rounds the kept values first, then the ops that have to run for them (the paper's two phases)."""
        g = self.graph
        kept = {key for key, at in self.stays.items() if x[at] > threshold}
        inputs: list[list[int]] = [[] for _ in range(self.n)]
        for v, value in enumerate(g.values):
            for i in value.readers:
                inputs[i].append(v)
        runs: set[tuple[int, int]] = set()
        for t in range(self.n + 1):
            todo = [t] if t < self.n else []
            todo += [g.values[v].maker for (u, v) in kept if u == t + 1 and (t, v) not in kept]
            while todo:
                i = todo.pop()
                if (t, i) not in runs:
                    runs.add((t, i))
                    for v in inputs[i]:
                        if (t, v) in kept:
                            continue
                        if g.again[g.values[v].maker]:
                            todo.append(g.values[v].maker)
        return self._order(runs)

    def _order(self, runs: set[tuple[int, int]]) -> list[list[int]]:
        return [sorted(i for u, i in runs if u == t and i != t) for t in range(self.n + 1)]
