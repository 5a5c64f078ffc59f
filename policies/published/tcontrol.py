"""T-Control (ASPLOS 2026): the tensors that most recompute paths lead through are locked, the rest is DTR.

A tensor's betweenness is the number of shortest paths between two others that lead through it, where a path is as long as the
ops on it take. Recomputations start again and again from the same few tensors; once one of these is evicted, chains get long.
The top K % by betweenness stay, K = alpha * residual / budget + 1 %. If that leaves no room, they are evicted after
all.

*Known limitations*: the system's measures against fragmentation (best fit, migration, eviction of segments) have no
meaning where memory is counted in bytes. *Residual* is the budget less the bytes that are never evicted. Paths are
those of forward, from at most 256 tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memmgr.policies.rules.directors import DIRECTORS
from memmgr.policies.rules.filters import FILTERS
from memmgr.policies.rules.prefetchers import off
from memmgr.policies.rules.registry import Policy
from memmgr.policies.rules.types import Bools
from memmgr.policies.simulate.simulator import Run, Simulation, finished
from memmgr.policies.trace import TierLink, Trace

from .chain import Chain

ALPHA = 0.3
"""Published: 0.1 to 0.5."""
SOURCES = 256

TCONTROL = Policy("tcontrol", FILTERS["dtr"], DIRECTORS["evict"], off, offloads=False)


def tcontrol(trace: Trace, budget_bytes: int, tier: TierLink | None = None) -> Run:
    """Recompute only; a tier is not used."""
    run = _Locked(trace, budget_bytes, TCONTROL, None)
    chain = Chain(trace)
    forward = [s for s, storage in enumerate(trace.storages) if storage.maker < chain.turn and s not in trace.constants]
    number = {s: i for i, s in enumerate(forward)}
    made = [trace.ops[trace.storages[s].maker] for s in forward]
    between = betweenness([[number[i] for i in op.inputs if i in number] for op in made], [op.seconds for op in made])
    stays = sum(trace.storages[s].size_bytes for s in trace.constants)
    share = min(ALPHA * max(budget_bytes - stays, 0) / budget_bytes + 0.01, 1.0)
    order = np.argsort(-np.array(between), kind="stable")
    run.locked[[forward[i] for i in order[: int(share * len(forward))]]] = True
    return finished(run)


def betweenness(inputs: Sequence[Sequence[int]], seconds: Sequence[float], sources: int = SOURCES) -> list[float]:
    """Per tensor, how many shortest paths between two others lead through it (Brandes 2001, on a graph without circles).

    `inputs`: per tensor, in the order of making, the tensors that it is made of. `seconds`: per tensor, the time of its
    op: the length of the steps to it. `sources`: paths begin at so many tensors at most, spread evenly.
    """
    n = len(inputs)
    total = [0.0] * n
    for source in range(0, n, max(1, -(-n // sources))):
        far, paths, before = {source: 0.0}, {source: 1.0}, dict[int, list[int]]()
        for v in range(source + 1, n):
            near = [u for u in dict.fromkeys(inputs[v]) if u in far]
            if near:
                least = min(far[u] for u in near)
                before[v] = [u for u in near if far[u] == least]
                far[v] = least + seconds[v]
                paths[v] = sum(paths[u] for u in before[v])
        through = dict.fromkeys(far, 0.0)
        for v in reversed(before):
            for u in before[v]:
                through[u] += paths[u] / paths[v] * (1.0 + through[v])
            total[v] += through[v]
    return total


class _Locked(Simulation):
    """A simulation in which some stay as long as the others are enough."""

    def __init__(self, trace: Trace, budget_bytes: int, policy: Policy, tier: TierLink | None) -> None:
        super().__init__(trace, budget_bytes, policy, tier)
        self.locked = np.zeros(len(trace.storages), dtype=np.bool_)
        self.strict = False

    def room(self, need_bytes: int) -> None:
        self.strict = True
        short = self.clock.used + need_bytes - self.budget
        self.strict = short <= 0 or int(self.size[self.able() & self.recomputable].sum()) >= short
        super().room(need_bytes)

    def able(self) -> Bools:
        able = super().able()
        return able & ~self.locked if self.strict else able
