"""The one entry point: filter, sort, direct, stop when there is enough."""

from __future__ import annotations

import numpy as np

from .filters import bound
from .types import Action, Candidates, Director, Filter, Ints, Link, Ranking

_FIRST_PREFIX = 64
_GROWTH = 4


def rank(
    candidates: Candidates,
    score: Filter,
    director: Director,
    link: Link,
    need_bytes: int | None = None,
    *,
    urgent_bytes: int | None = None,
) -> Ranking:
    """The order of eviction and the method for each cell, until `need_bytes` are free.

    Args:
        candidates: n cells.
        score: a `Filter`; the smallest is evicted first, equal scores in the order of the candidates, NaN last.
        director: a `Director`.
        link: the way to the tier below (`NO_LINK` if there is none).
        need_bytes: stop once the entries free this much; None: rank all cells that can be evicted.
        urgent_bytes: how much of it a request waits for now; the rest comes at `link.demand_bytes_per_second`. Default:
            all of `need_bytes`, or nothing if that is None (ranking ahead).

    Returns:
        A `Ranking` of the shortest prefix that is enough, or of all cells that can be evicted. Cells that can neither
        be recomputed nor offloaded never appear, nor do cells that the director keeps.

    Known limitations: chains are those at the time of the call: the eviction of an entry does not raise the score of
    its children further down. Rank again after a few hundred releases.
    """
    n = len(candidates)
    if n == 0 or (need_bytes is not None and need_bytes <= 0):
        return _EMPTY
    urgent = urgent_bytes if urgent_bytes is not None else (need_bytes or 0)
    eligible = np.flatnonzero(candidates.releasable)
    if len(eligible) == 0:
        return _EMPTY
    scores = np.asarray(bound(score, link)(candidates), dtype=np.float64)[eligible]
    if np.isnan(scores).any():
        scores = np.where(np.isnan(scores), np.inf, scores)

    total = len(eligible)
    length = total if need_bytes is None else min(total, _guess(candidates, eligible, need_bytes))
    while True:
        order = eligible[_smallest(scores, length)]
        action = np.asarray(director(candidates, order, link, urgent), dtype=np.int8)
        leaves = action != Action.KEEP
        if need_bytes is None:
            return Ranking(order[leaves], action[leaves])
        freed = np.where(leaves, candidates.size_bytes[order], 0).cumsum()
        enough = int(np.searchsorted(freed, need_bytes, side="left"))
        if enough < len(order):
            leaves[enough + 1 :] = False
            return Ranking(order[leaves], action[leaves])
        if length == total:
            return Ranking(order[leaves], action[leaves])
        length = min(total, length * _GROWTH)


_EMPTY = Ranking(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int8))


def _guess(candidates: Candidates, eligible: Ints, need_bytes: int) -> int:
    """A prefix that is likely to be enough: cells of mean size, and a half more."""
    mean = max(1.0, float(candidates.size_bytes[eligible].mean()))
    return max(_FIRST_PREFIX, int(1.5 * need_bytes / mean))


def _smallest(scores: np.ndarray[tuple[int, ...], np.dtype[np.float64]], k: int) -> Ints:
    """Indices of the `k` smallest, ascending, ties by index."""
    if k >= len(scores):
        return np.argsort(scores, kind="stable").astype(np.int64, copy=False)
    threshold = np.partition(scores, k - 1)[k - 1]
    chosen = np.flatnonzero(scores <= threshold)  # by index, so that the stable sort breaks ties by index
    return chosen[np.argsort(scores[chosen], kind="stable")[:k]].astype(np.int64, copy=False)
