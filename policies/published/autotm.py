"""AutoTM (Hildebrand, Khan, Trika, Lowe-Power, Akella, ASPLOS 2020): an integer program chooses which tensor is in the
tier between which two of its uses.

Each pair of uses that follow one another, with memory short between them, has a variable: absent or not. At every
moment of shortage enough bytes must be absent. The objective is the time of the copies beyond the ops that run during
them. The link carries one copy at a time each way: a write has the time from the last use to the moment of shortage, a
read the time from that moment to the next use.

*Known limitations*: AutoTM's kernels may also work in the slower memory; here all inputs of an op are on the device. At
most 60 moments are used. Needs scipy (the extra `plan`).
"""

from __future__ import annotations

from memmgr.policies.simulate.decided import Accesses
from memmgr.policies.simulate.simulator import Run
from memmgr.policies.trace import TierLink, Trace

from .copies import Swap, around_shortage, with_copies
from .milp import LIMIT_SECONDS, Milp
from .runs import fastest, judged, refused, runs_of
from .swapping import NEEDS_TIER

MOMENTS = 60
TIGHTER = (1.0, 0.97, 0.93, 0.88)
"""Shares of the budget that the program is given: moments that it does not look at may be short, too."""


def autotm(trace: Trace, budget_bytes: int, tier: TierLink | None = None) -> Run:
    """Swaps only."""
    if tier is None:
        return refused("autotm", trace, budget_bytes, NEEDS_TIER)
    accesses = Accesses.of(trace)
    events = runs_of(range(len(trace.ops)), again=False)
    runs: list[Run] = []
    for share in TIGHTER:
        budget = int(share * budget_bytes)
        try:
            swaps = chosen(trace, accesses, budget, tier)
        except ImportError:
            return refused("autotm", trace, budget_bytes, "its program needs scipy: pip install scipy")
        if swaps is not None:
            swaps = around_shortage(swaps, accesses.used_bytes, budget)
            runs.append(judged("autotm", trace, budget_bytes, tier, with_copies(trace, events, swaps, tier)))
        if runs and runs[-1].feasible:
            break
    return fastest(runs) if runs else refused("autotm", trace, budget_bytes, "too little can be away at once")


def chosen(trace: Trace, accesses: Accesses, budget_bytes: int, tier: TierLink) -> list[Swap] | None:
    """The swaps; None: none are enough. Raises `ImportError`: no scipy."""
    used, start = accesses.used_bytes, accesses.start
    gaps = [
        Swap(s, a, b)
        for s, uses in enumerate(accesses.ops) if s not in trace.constants and trace.storages[s].size_bytes
        for a, b in zip(uses, uses[1:], strict=False) if b - a > 2
    ]  # fmt: skip
    gaps = around_shortage(gaps, used, budget_bytes)
    moments = _moments(used)
    if not gaps:
        return []
    p = Milp()
    size = [trace.storages[g.storage].size_bytes / budget_bytes for g in gaps]
    write = [tier.latency_seconds + trace.storages[g.storage].size_bytes / tier.write_bytes_per_second for g in gaps]
    read = [tier.latency_seconds + trace.storages[g.storage].size_bytes / tier.read_bytes_per_second for g in gaps]
    unit = max(trace.seconds, 1e-12)
    away = [p.variable(1e-6 * (w + r) / unit, whole=True) for w, r in zip(write, read, strict=True)]
    late = [p.variable(1.0, 0.0, float("inf")) for _ in moments]
    for k in (k for k in moments if used[k] > budget_bytes):
        there = [(x, -b) for x, b, g in zip(away, size, gaps, strict=True) if g.out < k < g.back]
        p.at_most(1.0 - used[k] / budget_bytes, *there)
    for number, k in enumerate(moments):
        for after in moments[number:]:  # used last since k, and away by `after`: written in between, or waited for
            rows = [
                (x, w / unit) for x, w, g in zip(away, write, gaps, strict=True) if k <= g.out and (g.by or 0) < after
            ]
            waits = [(late[i], -1.0) for i in range(number, moments.index(after) + 1)]
            p.at_most((start[after] - start[k]) / unit, *rows, *waits)
            rows = [
                (x, r / unit) for x, r, g in zip(away, read, gaps, strict=True) if g.not_before > k and g.back <= after
            ]
            p.at_most((start[after] - start[k]) / unit, *rows, *waits)
    _, x = p.solve(LIMIT_SECONDS.get() / 2)
    return None if x is None else [g for g, at in zip(gaps, away, strict=True) if x[at] > 0.5]


def _moments(used: list[int]) -> list[int]:
    """The highest moment of each stretch of ops."""
    width = max(1, len(used) // MOMENTS)
    return [max(range(a, min(a + width, len(used))), key=used.__getitem__) for a in range(0, len(used), width)]
