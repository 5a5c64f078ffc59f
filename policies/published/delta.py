"""DELTA (Tang et al., arXiv 2203.15980; TACO 2024), as published. `delta` in registry.py is the mended one.

Online: Filter `argmin 1 / (m s)`; Director: `2 (bytes / bandwidth) / c > 1` means recompute, with the own op's cost alone,
chains not counted; Prefetcher: first in, first out, five ahead. Only the units are put right (the public code compares
microseconds with nanoseconds), and the prefetcher is called.

TACO: a 0/1 knapsack picks beforehand which tensors stay. A tensor that is alive at the peak and used later has its
bytes as weight and min(swap, recompute) as value; the room is the budget less the bytes that must be resident.
Prefetching goes both ways: a victim is written right after its last access of forward, and read back five uses ahead.
"""

from __future__ import annotations

import numpy as np

from memmgr.policies.rules.filters import FILTERS
from memmgr.policies.rules.prefetchers import fifo
from memmgr.policies.rules.registry import Policy
from memmgr.policies.rules.types import Action, Actions, Candidates, Ints, Link
from memmgr.policies.simulate.decided import Accesses, Decision, run_decisions
from memmgr.policies.simulate.simulator import Run, simulate
from memmgr.policies.trace import OpKind, TierLink, Trace

_UNITS = 2000  # the knapsack's room, in units; a weight is rounded up to a whole unit


def director(c: Candidates, order: Ints, link: Link, urgent_bytes: int) -> Actions:
    """EVICT where `2 (bytes / bandwidth) / c > 1`, else OFFLOAD; the other where only one is possible."""
    pick = c.take(order)
    rate = min(link.write_bytes_per_second, link.read_bytes_per_second)
    swap = 2.0 * pick.size_bytes / rate if rate > 0 else np.full(len(pick), np.inf)
    evict = pick.recomputable & ((swap > pick.cost_seconds) | ~pick.can_offload)
    action = np.where(pick.can_offload, np.int8(Action.OFFLOAD), np.int8(Action.KEEP))
    action[evict] = Action.EVICT
    return action


DELTA_PAPER = Policy("delta_paper", FILTERS["delta"], director, fifo(5))


def delta_online(trace: Trace, budget_bytes: int, tier: TierLink | None = None) -> Run:
    """The online algorithm."""
    return simulate(trace, budget_bytes, DELTA_PAPER, tier)


def delta_taco(trace: Trace, budget_bytes: int, tier: TierLink | None = None) -> Run:
    """TACO's knapsack, with the online algorithm as the net beneath it."""
    decisions = knapsack(trace, budget_bytes, tier)
    net = Policy("delta_taco", DELTA_PAPER.filter, director, DELTA_PAPER.prefetcher)
    return run_decisions(trace, budget_bytes, net, tier, decisions)[0]


def knapsack(trace: Trace, budget_bytes: int, tier: TierLink | None = None) -> list[Decision]:
    """The tensors that the knapsack does not keep, and how each is evicted.

    Known limitations: `_UNITS` units of room, weights rounded up, so it keeps up to one unit per item too little.
    """
    peak, at = trace.unmanaged_peak
    accesses = Accesses.of(trace)
    items: list[Decision] = []
    value: list[float] = []
    rate = min(tier.write_bytes_per_second, tier.read_bytes_per_second) if tier else 0.0
    for s, storage in enumerate(trace.storages):
        op = trace.ops[storage.maker]
        pair = accesses.around(s, at) if storage.maker < at < storage.released and storage.size_bytes else None
        if pair is None or pair[0] == at or op.kind != OpKind.COMPUTE:
            continue
        swap = 2.0 * storage.size_bytes / rate if rate else float("inf")
        items.append(Decision(s, Action.EVICT if swap > op.seconds else Action.OFFLOAD, *pair))
        value.append(min(swap, op.seconds))
    sizes = [trace.storages[d.storage].size_bytes for d in items]
    room = budget_bytes - (peak - sum(sizes))
    if room <= 0:
        return items
    kept = _knapsack(np.array(value), np.ceil(np.array(sizes) * (_UNITS / room)).astype(np.int64), _UNITS)
    return [d for d, keep in zip(items, kept.tolist(), strict=True) if not keep]


def _knapsack(value: np.ndarray, weight: np.ndarray, room: int) -> np.ndarray:
    """bool (n,): the most valuable set whose integer weights (n,) sum to `room` at most."""
    n = len(value)
    best = np.zeros(room + 1)
    taken = np.zeros((n, room + 1), dtype=np.bool_)
    for i in range(n):
        w = int(weight[i])
        if w > room:
            continue
        with_it = best[: room + 1 - w] + value[i]
        better = with_it > best[w:]
        taken[i, w:] = better
        best[w:] = np.where(better, with_it, best[w:])
    kept = np.zeros(n, dtype=np.bool_)
    left = room
    for i in range(n - 1, -1, -1):
        if taken[i, left]:
            kept[i] = True
            left -= int(weight[i])
    return kept
