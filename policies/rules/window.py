"""What a search over addresses is told of each cell: a cost that it can add up, and how the cost ages.

Filters score per byte and compare cells one by one; Coop's window adds up what it would evict. The sum needs a cost per
cell, and because the allocator searches at other times than the policies rank, the age is left to the allocator: a cell
leaves at cost / staleness^exponent (allocator/core/window.h).
"""

from __future__ import annotations

import numpy as np

from .filters import DtrOptions, Price, bound, delta, dtr, dtr_eq, largest, lru
from .types import Candidates, Filter, Floats, Link

_NEVER = 1e6  # what goes last costs so many times the dearest that does not


def window_costs(candidates: Candidates, score: Filter, link: Link) -> tuple[Floats, float]:
    """Costs whose order per byte, once aged, is that of the filter's scores.

    Args:
        candidates: n cells.
        score: a `Filter`.
        link: the way to the tier below.

    Returns:
        float64 (n,), each >= 0 and finite, in the filter's unit times bytes; and the exponent of the staleness.

    Source: h = c / s of Coop (NeurIPS 2023) is `dtr` here: its score times the bytes.

    Known limitations: a filter that is not known here keeps its order but not its proportions, and does not age: each
    byte costs its cell's place in the order.
    """
    size = np.maximum(candidates.size_bytes, 1).astype(np.float64)
    if score is lru:
        return size, 1.0  # per byte 1/s: the stalest first
    if score is largest:
        return np.ones(len(candidates)), 0.0  # the fewest cells leave
    values = np.asarray(bound(score, link)(candidates), dtype=np.float64)
    if len(values) == 0:
        return values, 0.0
    usable = np.isfinite(values)
    if not np.all(values[usable] >= 0):
        place = np.empty(len(values))
        place[np.argsort(values, kind="stable")] = np.arange(1, len(values) + 1)
        return size * place / len(values), 0.0
    exponent = _exponent(score)
    cost = values * size * np.maximum(candidates.staleness_seconds, 1e-9) ** exponent
    usable &= np.isfinite(cost)
    last = _NEVER * float(cost[usable].max()) if usable.any() else 1.0
    return np.where(usable, cost, max(last, 1.0)), exponent


def _exponent(score: Filter) -> float:
    if isinstance(score, Price):
        return score.staleness_exponent
    if isinstance(score, DtrOptions):
        return _exponent(score.inner)
    return 1.0 if score in (dtr, dtr_eq, delta) else 0.0
