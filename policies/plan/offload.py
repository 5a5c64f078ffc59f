"""Plans with a link: the reads that the relaxation chooses, and mixtures at several prices of the link. The fastest
plan counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from memmgr.policies.trace import TierLink
from memmgr.policies.trace.columns import Problem

from .bound import with_link
from .recompute import descend
from .search import Search
from .timeline import Timeline
from .transfers import hide

_PRICES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Seconds of recompute that a second of the link is worth, tried in turn; 0: all that leaves is offloaded."""

_SHARES = ((1.0, False), (0.85, False), (1.0, True), (0.8, True), (0.5, True), (0.25, True))
"""The share of the bandwidth that the advice may count on, and whether writes must have ended when memory fills up
first.
"""

_SHARPNESS = (1.0, 3.0)


def offloading(
    problem: Problem, budget_bytes: int, link: TierLink, at: int, effort: int, *, gate: bool
) -> Iterator[tuple[Timeline, float]]:
    """Yields (timeline, seconds) of each attempt that fits.

    Args:
        problem: the pass; where no op may run again the link alone has to do.
        budget_bytes: most bytes resident.
        link: the tier.
        at: the op of the unmanaged peak.
        effort: steps of search of each way, in quarters and eighths; of all ways, twice as many.
        gate: no schedule is known to fit yet. Then a schedule counts only if a ladder reaches the budget (`descend`),
            so that every larger budget has one, too.
    """
    if gate:
        fits = descend(problem, budget_bytes, prices_of(problem, link, 0.0))
        if fits is None:
            return
        fits.budget, fits.bias = budget_bytes, {}
        fits.settle(effort)
        yield fits.timeline, hide(fits.timeline, link, budget_bytes).seconds
    full = int((Timeline(problem).profile > budget_bytes).argmax())
    ways = [_advised(problem, budget_bytes, link, at, share, full if early else at, effort) for share, early in _SHARES]
    prices = _PRICES if any(problem.again) else _PRICES[:1]
    ways += [_mixed(problem, budget_bytes, link, price, effort) for price in prices]
    left = 2 * effort
    for way in ways:
        for search, met in way:
            if met:
                search.settle(effort)
                yield search.timeline, hide(search.timeline, link, budget_bytes).seconds
            left -= search.work + problem.n_ops  # the timeline, and its seconds with the copies hidden
            if left < 0:
                return


def prices_of(problem: Problem, link: TierLink, price: float, first: Iterable[int] = ()) -> dict[int, float]:
    """The storages that may be read back and the price of each, as far as the tier's room lasts: `first`, then the most
    expensive per byte.

    A storage is on the list if moving it costs less than running its op again, where a second of the link costs `price`
    seconds and a second of copying by the CPU costs one, or if its op cannot run again.
    """
    prices: dict[int, float] = {}
    room = link.capacity_bytes
    chosen = list(first)
    rest = sorted(range(len(problem.size)), key=lambda s: -problem.cost[problem.maker[s]] / max(problem.size[s], 1))
    for s in dict.fromkeys((*chosen, *rest)):
        size = problem.size[s]
        moving = size / link.read_bytes_per_second + size / link.write_bytes_per_second + 2 * link.latency_seconds
        copying = 2 * size * link.cpu_seconds_per_byte
        wanted = price * moving + copying < problem.cost[problem.maker[s]] or not problem.again[s]
        if size and (wanted or s in chosen):
            if room is not None:
                if size > room:
                    continue
                room -= size
            # Never 0: even where the link is free, a plan that moves fewer bytes is better.
            prices[s] = max(price, 0.02) * moving + copying
    return prices


def _advised(
    problem: Problem, budget_bytes: int, link: TierLink, at: int, share: float, due: int, effort: int
) -> Iterator[tuple[Search, bool]]:
    """Offloads over the moment `at` the storages that the relaxation reads back, and shaves the rest. Yields each
    search, and if it fits.
    """
    slower = replace(
        link,
        read_bytes_per_second=share * link.read_bytes_per_second,
        write_bytes_per_second=share * link.write_bytes_per_second,
    )
    advice = with_link(problem, budget_bytes, at, slower, due=due)
    read = sorted((s for s, x in advice.read.items() if x > 0.5), key=lambda s: -advice.read[s])
    if not read:
        return
    prices = prices_of(problem, link, 0.0, read)
    if any(problem.again):  # else storages that the advice keeps may have to be dropped as well
        prices = {s: prices[s] for s in read if s in prices}
    for s in read:
        if s in prices:
            prices[s] = problem.size[s] * (1e-3 / link.read_bytes_per_second + 2 * link.cpu_seconds_per_byte)
    bias = {s: 0.1 + k for s, k in advice.kept.items()}
    for sharpness in _SHARPNESS:
        timeline = Timeline(problem, prices)
        moment = timeline.own[at]
        for s in read:
            uses = [q for q in timeline.uses[s] if q > moment]
            if uses and timeline.pin[s] < moment and s in prices:
                timeline.add(timeline.restore(s, uses[0]))
        search = Search(timeline, budget_bytes, bias=bias)
        yield search, search.shave(sharpness=sharpness, limit_work=effort // 8)


def _mixed(
    problem: Problem, budget_bytes: int, link: TierLink, price: float, effort: int
) -> Iterator[tuple[Search, bool]]:
    """Offloads the storages that cost less over the link at this price than by running again. Yields each search, and
    if it fits.
    """
    prices = prices_of(problem, link, price)
    for sharpness in _SHARPNESS:
        search = Search(Timeline(problem, prices), budget_bytes)
        yield search, search.shave(sharpness=sharpness, limit_work=effort // 4)
