"""Checkpointing (Chen, Xu, Zhang, Guestrin, arXiv 1604.06174): tensors that cross some cuts of forward stay. Each
segment between two cuts runs once more when backward reaches it.

- `sqrt_n` (section 4.2): a pass of n layers in the square root of n segments. It has one schedule for all budgets.
- `chen_greedy` (algorithm 3, *memory planning with given budget*): walks through forward and cuts as soon as a
  segment has made more than b bytes. b is searched, here for the fastest schedule that fits.

The last segment is not made again: backward begins with it. Layers are ops with outputs. A cut is placed where fewest
bytes cross nearby. A tensor that skips a segment crosses its cuts as well (Checkmate's paper calls that *linearised*).
"""

from __future__ import annotations

from math import isqrt

from memmgr.policies.simulate.simulator import Run
from memmgr.policies.trace import OpKind, TierLink, Trace
from memmgr.policies.trace.schedule import Step

from .chain import Chain
from .runs import fastest, judged, runs_of

_CANDIDATES = 128  # places for a cut that `chen_greedy` looks at
_SIZES = 24  # of b that it tries


def checkpointed(chain: Chain) -> list[Step]:
    """The events: each segment is made again before the first op of backward that reads one of its tensors."""
    events = runs_of(range(chain.turn), again=False)
    at = chain.turn
    for i in range(len(chain) - 2, -1, -1):
        begin = chain.starts[i]
        events += runs_of(range(at, begin), again=False)
        low, high = chain.cuts[i], chain.cuts[i + 1]
        events += runs_of(chain.rematerialize(chain.interior[i], low, high, chain.crossing(high)), again=True)
        at = begin
    return events + runs_of(range(at, len(chain.trace.ops)), again=False)


def sqrt_n(trace: Trace, budget_bytes: int, tier: TierLink | None = None) -> Run:
    """Square root of n segments."""
    chain = Chain(trace)
    layers = sum(bool(op.outputs) and op.kind != OpKind.CONSTANT for op in trace.ops[: chain.turn])
    return judged("sqrt_n", trace, budget_bytes, tier, checkpointed(chain.at(chain.narrow(isqrt(layers)))))


def chen_greedy(trace: Trace, budget_bytes: int, tier: TierLink | None = None) -> Run:
    """Segments of about b bytes each."""
    chain = Chain(trace)
    candidates = set(chain.narrow(_CANDIDATES))
    made = [sum(trace.storages[s].size_bytes for s in op.outputs) * (op.kind != OpKind.CONSTANT) for op in trace.ops]
    total = sum(made[: chain.turn])
    tried: dict[tuple[int, ...], Run] = {}
    for i in range(_SIZES):
        most = total * 2.0 ** (-i / 3)
        cuts, since = [], 0
        for k in range(chain.turn):
            if since > most and k in candidates:
                cuts.append(k)
                since = 0
            since += made[k]
        if tuple(cuts) not in tried:
            tried[tuple(cuts)] = judged("chen_greedy", trace, budget_bytes, tier, checkpointed(chain.at(cuts)))
    return fastest(tried.values())
