"""Memory over time as columns, each with its lowest and highest values: the data of both pictures.

A sample is one moment of a pass that swings between almost nothing and the budget; drawn as it is, it would show the
moments of sampling. So a column is a stretch of time, never one sample, and contains the peaks of the passes that ended
in it as well.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from memmgr.tools.view.run_state import Point, RunState

FEW_SAMPLES = 8
"""A pass with fewer samples than this has no shape that they would show."""
AROUND = 12
"""So many samples of such passes show their lowest and highest values together. So many on each side are counted for it."""

Edges = tuple[int, ...]
"""The upper edges of the layers, from below: fixed, evictable (the resident bytes end there), evicted, offloaded."""
RESIDENT, UNMANAGED = 1, 3


@dataclass(frozen=True)
class Column:
    """A stretch of time, in seconds since the budget opened, and each edge at its lowest and at its highest there.

    `sparse`: passes have so few samples there that the edges are those of many samples around.
    """

    begin: float
    end: float
    least: Edges
    most: Edges
    sparse: bool = False


def columns(watched: RunState, points: Sequence[Point], most: int) -> list[Column]:
    """At most so many columns over these samples; none without a sample, one without a stretch for one sample.

    Known limitation: the least is that of samples, so a dip between two of them is missed. Passes tell their peaks.
    """
    edges = [_edges(point) for point in points]
    times = [point.seconds for point in points]
    if len(points) < 2:
        return [Column(times[0], times[0], edges[0], edges[0])] if points else []
    stretches = len(points) - 1
    low = [_each(min, edges[i : i + 2]) for i in range(stretches)]
    high = [_each(max, edges[i : i + 2]) for i in range(stretches)]
    _raise_to_peaks(watched, times, high)
    width = (times[-1] - times[0]) / most
    # A part of the time each, since a log has more samples at its beginning. The tolerance is one of floating point numbers.
    starts = sorted(
        {bisect_left(times, times[0] + (i - 1e-6) * width) for i in range(most)} - {stretches, stretches + 1}
    )
    found = []
    for first, last in pairwise((*starts, stretches)):
        sparse = _sparse(points, first, last)
        length = max(AROUND if sparse else 1, last - first)
        from_ = max(0, min((first + last - length) // 2, stretches - length))  # not fewer at the beginning and the end
        near = slice(from_, from_ + length)
        found.append(Column(times[first], times[last], _each(min, low[near]), _each(max, high[near]), sparse))
    return found


def _sparse(points: Sequence[Point], first: int, last: int) -> bool:
    """Do passes have few samples from one to the other?"""
    first, last = max(0, first - AROUND), min(len(points) - 1, last + AROUND)
    passes = points[last].passes - points[first].passes
    return passes > 0 and (last - first) / passes < FEW_SAMPLES


def _edges(point: Point) -> Edges:
    below, found = 0, []
    for size in point.layers:
        below += size
        found.append(below)
    return tuple(found)


def _each(choose: Callable[[Iterable[int]], int], rows: Sequence[Edges]) -> Edges:
    return tuple(choose(values) for values in zip(*rows, strict=True))


def _raise_to_peaks(watched: RunState, times: Sequence[float], high: list[Edges]) -> None:
    """Each pass's peaks go to the stretch of it that was highest anyway: that is where they most likely were."""
    for one in watched.passes:
        if one.end <= times[0] or one.begin >= times[-1]:
            continue
        first = max(0, bisect_right(times, one.begin) - 1)
        last = min(len(high), max(first + 1, bisect_right(times, one.end)))
        at = max(range(min(first, len(high) - 1), last), key=lambda i: high[i][UNMANAGED])
        fixed, resident, evicted, unmanaged = high[at]
        peak = max(unmanaged, one.unmanaged_peak_bytes)
        high[at] = (fixed, max(resident, one.resident_peak_bytes), evicted if evicted < unmanaged else peak, peak)


def ends_of_passes(points: Sequence[Point], most: int) -> tuple[int, Iterator[tuple[float, int]]]:
    """Where passes ended, as (seconds, number), every n-th of them so that there are at most about so many; and n."""
    if len(points) < 2 or points[-1].passes <= points[0].passes:
        return 0, iter(())
    n = nice((points[-1].passes - points[0].passes) / max(1, most))
    return n, _ends(points, n)


def _ends(points: Sequence[Point], n: int) -> Iterator[tuple[float, int]]:
    for before, after in zip(points, points[1:], strict=False):
        for number in range(n * (before.passes // n + 1), after.passes + 1, n):
            share = (number - before.passes) / (after.passes - before.passes)
            yield before.seconds + share * (after.seconds - before.seconds), number


def nice(least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20 ... that is not below."""
    unit = 1
    while True:
        for factor in (1, 2, 5):
            if factor * unit >= least:
                return factor * unit
        unit *= 10
