"""The two drawings of a report, as SVG inside the page: memory over time, and bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from memmgr.config.sizes import UNLIMITED, show_seconds, show_size
from memmgr.tools.view.columns import RESIDENT, UNMANAGED, Column, columns, ends_of_passes
from memmgr.tools.view.run_state import Point, RunState

WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM, TOP = 960, 340, 76, 8, 46, 16
FLOOR = HEIGHT - BOTTOM
MOST_COLUMNS, MOST_MARKS, MOST_NUMBERS = 480, 200, 10


def ticks(begin: float, end: float, about: int = 4) -> Iterator[float]:
    """Round values from `begin` to `end`."""
    raw = max(end - begin, 1e-9) / about
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= 0.999 * raw)
    for i in range(math.ceil(begin / step - 1e-9), math.floor(end / step + 1e-9) + 1):
        yield i * step


def wide(drawn: str) -> str:
    """A picture that a narrow screen scrolls, since its words would be too small to read there."""
    return f"<div class=box>{drawn}</div>"


def size_ticks(most: int | float, *, binary: bool) -> Iterator[tuple[float, str]]:
    """Sizes from 0 to `most` that are round in their unit, and how they are written."""
    unit = next((1024.0**power for power in range(4, 0, -1) if most >= 1024**power), 1.0) if binary else 1.0
    for size in ticks(0, most / unit):
        yield size * unit, show_size(size * unit, binary=binary)


@dataclass(frozen=True)
class _Axes:
    """Where seconds and bytes lie in the picture."""

    begin: float
    end: float
    top: float

    def x(self, seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (seconds - self.begin) / (self.end - self.begin)

    def y(self, size: float) -> float:
        return TOP + (FLOOR - TOP) * (1 - size / self.top)


def over_time(watched: RunState) -> str:
    """Memory over time: lowest and highest resident bytes, most absent bytes, and the budget."""
    points = list(watched.points)
    found = columns(watched, points, MOST_COLUMNS)
    begin, end = points[0].seconds, max(points[-1].seconds, points[0].seconds + 1e-3)
    if len(points) == 1:
        found = [Column(begin, end, found[0].least, found[0].most)]
    budget = watched.budget_bytes
    axes = _Axes(begin, end, 1.08 * max([c.most[UNMANAGED] for c in found] + [budget if budget < UNLIMITED else 0, 1]))
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="memory over time">']
    for size, said in size_ticks(axes.top, binary=watched.binary):
        y = axes.y(size)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{said}</text>')
    parts += [*_layers(found, axes), *_few(found, axes)]
    if budget < UNLIMITED:
        y, label = axes.y(budget), f"budget {watched.size(budget)}"
        since = axes.x(min(max(begin, watched.limit_seconds), end))
        parts.append(f'<line class="budget" x1="{since:.1f}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="label" x="{WIDTH - 12}" y="{y - 5:.1f}" text-anchor="end">{label}</text>')
    parts += [*_passes(points, axes), *_values(watched, found, axes)]
    parts.append(f'<text class="tick" x="{LEFT - 8}" y="{HEIGHT - 8}" text-anchor="end">time</text>')
    for seconds in ticks(begin, end, 6):
        x = axes.x(seconds)
        anchor = "end" if x > WIDTH - 40 else "middle"
        said = show_seconds(seconds)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{said}</text>')
    return "".join(parts) + "</svg>"


def _layers(found: Sequence[Column], axes: _Axes) -> list[str]:
    """The areas, from the axis upwards."""

    def area(kind: str, label: str, lower: Sequence[int], upper: Sequence[int]) -> str:
        """Steps, because a column is a stretch of time; nothing where there is nothing."""
        if all(b >= a for b, a in zip(lower, upper, strict=True)):
            return ""
        above = [
            f"{axes.x(t):.1f},{axes.y(max(a, b)):.1f}"
            for c, a, b in zip(found, upper, lower, strict=True)
            for t in (c.begin, c.end)
        ]
        below = [
            f"{axes.x(t):.1f},{axes.y(b):.1f}" for c, b in zip(found, lower, strict=True) for t in (c.begin, c.end)
        ]
        return f'<polygon class="{kind}" points="{" ".join(above + below[::-1])}"><title>{label}</title></polygon>'

    fixed = [c.least[0] for c in found]
    always = [c.least[RESIDENT] for c in found]
    there = [c.most[RESIDENT] for c in found]
    evicted = [max(c.most[2], c.most[RESIDENT]) for c in found]
    offloaded = [c.most[UNMANAGED] for c in found]
    return [
        area("fixed", "fixed: always resident", [0] * len(found), fixed),
        area("evictable", "evictable: always resident", fixed, always),
        area("evictable pale", "resident at times", always, there),
        area("evicted", "evicted, at its most", there, evicted),
        area("offloaded", "offloaded, at its most", evicted, offloaded),
    ]


def _few(found: Sequence[Column], axes: _Axes) -> list[str]:
    """Lines above the stretches in which samples are too few for a curve; the longest of them has the words."""
    runs = [list(run) for sparse, run in groupby(found, lambda column: column.sparse) if sparse]
    ends = [(axes.x(run[0].begin), axes.x(run[-1].end)) for run in runs]
    y = TOP - 2
    drawn = [f'<line class="pass" x1="{begin:.1f}" x2="{end:.1f}" y1="{y}" y2="{y}"/>' for begin, end in ends]
    if ends:
        begin, end = max(ends, key=lambda one: one[1] - one[0])
        at = min(max((begin + end) / 2, LEFT + 150), WIDTH - RIGHT - 150)
        said = "few samples a pass: the least and the most, no curve"
        drawn.append(f'<text class="tick" x="{at:.1f}" y="{y - 4}" text-anchor="middle">{said}</text>')
    return drawn


def _values(watched: RunState, found: Sequence[Column], axes: _Axes) -> Iterator[str]:
    """The figures of each column, shown below the pointer."""
    for c in found:
        least, most = watched.size(c.least[RESIDENT]), watched.size(c.most[RESIDENT])
        told = f"{show_seconds(c.begin)}: resident {least}" + (f" to {most}" if least != most else "")
        x, width = axes.x(c.begin), axes.x(c.end) - axes.x(c.begin)
        yield (
            f'<rect class="value" x="{x:.1f}" y="{TOP}" width="{width:.1f}" height="{FLOOR - TOP}">'
            f"<title>{told}, with absent memory {watched.size(c.most[UNMANAGED])}</title></rect>"
        )


def _passes(points: Sequence[Point], axes: _Axes) -> list[str]:
    """Marks below the axis where a pass ends; some have their number."""
    every, marks = ends_of_passes(points, MOST_MARKS)
    numbered, _ = ends_of_passes(points, MOST_NUMBERS)
    parts = []
    for seconds, number in marks:
        long = number % numbered == 0
        x, low = f"{axes.x(seconds):.1f}", FLOOR + (7 if long else 4)
        parts.append(f'<line class="pass" x1="{x}" x2="{x}" y1="{FLOOR}" y2="{low}"/>')
        if long:
            parts.append(f'<text class="tick" x="{x}" y="{FLOOR + 18}" text-anchor="middle">{number}</text>')
    if every:
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{FLOOR + 18}" text-anchor="end">pass</text>')
    return parts


def bars(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], show: Callable[[float], str] = show_seconds) -> str:
    """Horizontal bars of seconds (or of values written by `show`), one a row, of parts that have a class each."""
    most = max((sum(size for _, size in parts) for _, parts in rows), default=0.0)
    if most <= 0:
        return ""
    height = 22 * len(rows)
    drawn = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="bars">']
    left, room = 360, WIDTH - 360 - 120
    for i, (name, parts) in enumerate(rows):
        at, top = float(left), 22 * i + 3
        shown = name if len(name) <= 52 else "…" + name[-51:]
        drawn.append(f'<text class="label" x="{left - 8}" y="{top + 13}" text-anchor="end">{escape(shown)}</text>')
        for kind, seconds in parts:
            width = room * seconds / most
            if width > 0:
                drawn.append(
                    f'<rect class="{kind}" x="{at:.1f}" y="{top}" width="{width:.1f}" height="16">'
                    f"<title>{escape(name)}: {kind.replace('_', ' ')} {show(seconds)}</title></rect>"
                )
            at += width
        total = show(sum(seconds for _, seconds in parts))
        drawn.append(f'<text class="tick" x="{at + 6:.1f}" y="{top + 13}">{total}</text>')
    return "".join(drawn) + "</svg>"
