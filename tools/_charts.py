"""The two drawings of a report, as SVG inside the page: stacked areas over time, and bars."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from memmgr._sizes import UNLIMITED, show_size
from memmgr.tools._watched import LAYERS, Point, Watched

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 960, 320, 76, 28, 14
MOST_COLUMNS = 480


def thinned(points: Sequence[Point], most: int = MOST_COLUMNS) -> list[Point]:
    """At most so many: of each stretch the one with the highest sum, because peaks are what a budget is about."""
    if len(points) <= most:
        return list(points)
    step = len(points) / most
    stretches = (points[int(i * step) : max(int((i + 1) * step), int(i * step) + 1)] for i in range(most))
    return [max(stretch, key=lambda p: p.unmanaged_bytes) for stretch in stretches]


def _nice(top: float) -> float:
    """A round step for about four lines up to `top`."""
    raw = top / 4
    unit = 10.0 ** (len(str(int(raw))) - 1)
    return next((m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= raw), raw)


def over_time(watched: Watched) -> str:
    """Memory over time: resident, evicted and offloaded bytes stacked, the budget, and what passes needed unmanaged."""
    points = thinned(list(watched.points))
    begin, end = points[0].seconds, max(points[-1].seconds, points[0].seconds + 1e-6)
    budget = watched.budget_bytes
    peaks = [(p.end, p.unmanaged_peak_bytes) for p in watched.passes if p.end >= begin]
    top = 1.06 * max(
        [p.unmanaged_bytes for p in points] + [size for _, size in peaks] + [budget if budget < UNLIMITED else 0, 1]
    )

    def x(seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - 8) * (seconds - begin) / (end - begin)

    def y(size: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - size / top)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="memory over time">']
    step = _nice(top)
    for i in range(int(top / step) + 1):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 8}" y1="{y(i * step):.1f}" y2="{y(i * step):.1f}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 8}" y="{y(i * step) + 4:.1f}" text-anchor="end">{show_size(i * step)}</text>'
        )
    below = [0] * len(points)
    for i, (name, label) in enumerate(LAYERS.items()):
        above = [b + p.layers[i] for b, p in zip(below, points, strict=True)]
        if above != below:
            edge = [f"{x(p.seconds):.1f},{y(a):.1f}" for p, a in zip(points, above, strict=True)]
            back = [f"{x(p.seconds):.1f},{y(b):.1f}" for p, b in zip(reversed(points), reversed(below), strict=True)]
            parts.append(f'<polygon class="{name}" points="{" ".join(edge + back)}"><title>{label}</title></polygon>')
        below = above
    if peaks:
        line = " ".join(f"{x(min(seconds, end)):.1f},{y(size):.1f}" for seconds, size in _thin_peaks(peaks))
        parts.append(f'<polyline class="peaks" points="{line}"><title>peak of a pass without memmgr</title></polyline>')
    if budget < UNLIMITED:
        parts.append(f'<line class="budget" x1="{LEFT}" x2="{WIDTH - 8}" y1="{y(budget):.1f}" y2="{y(budget):.1f}"/>')
        parts.append(
            f'<text class="label" x="{WIDTH - 12}" y="{y(budget) - 5:.1f}" text-anchor="end">budget {show_size(budget)}</text>'
        )
    for i in range(5):
        seconds = begin + (end - begin) * i / 4
        anchor = "start" if i == 0 else "end" if i == 4 else "middle"
        parts.append(
            f'<text class="tick" x="{x(seconds):.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{seconds:.3g} s</text>'
        )
    return "".join(parts) + "</svg>"


def _thin_peaks(peaks: list[tuple[float, int]]) -> list[tuple[float, int]]:
    if len(peaks) <= MOST_COLUMNS:
        return peaks
    step = len(peaks) / MOST_COLUMNS
    return [max(peaks[int(i * step) : int((i + 1) * step)], key=lambda p: p[1]) for i in range(MOST_COLUMNS)]


def bars(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: str) -> str:
    """Horizontal bars, one a row, of parts that have a class each; `unit` is written behind the sum."""
    most = max((sum(size for _, size in parts) for _, parts in rows), default=0.0)
    if most <= 0:
        return ""
    height = 22 * len(rows)
    drawn = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="bars">']
    left, room = 360, WIDTH - 360 - 90
    for i, (name, parts) in enumerate(rows):
        at, top = float(left), 22 * i + 3
        shown = name if len(name) <= 52 else "…" + name[-51:]
        drawn.append(f'<text class="label" x="{left - 8}" y="{top + 13}" text-anchor="end">{escape(shown)}</text>')
        for kind, size in parts:
            width = room * size / most
            if width > 0:
                drawn.append(
                    f'<rect class="{kind}" x="{at:.1f}" y="{top}" width="{width:.1f}" height="16">'
                    f"<title>{escape(name)}: {kind} {size:.3g} {unit}</title></rect>"
                )
            at += width
        total = sum(size for _, size in parts)
        drawn.append(f'<text class="tick" x="{at + 6:.1f}" y="{top + 13}">{total:.3g} {unit}</text>')
    return "".join(drawn) + "</svg>"
