"""One recorded pass at the resolution of its ops: memory by layer, as a picture and for Perfetto."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from memmgr.config.sizes import show_seconds, show_size
from memmgr.policies.trace import HELD, OpKind, Trace
from memmgr.tools.view.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, size_ticks, ticks, wide
from memmgr.tools.view.run_state import name_of

BEFORE, AFTER, NOBODY = "there before the pass", "from backward on", "no module"
_PLACES = (BEFORE, AFTER, NOBODY)
MOST_BANDS, MOST_POINTS = 14, 2000
# One for each band, told apart on white and on black.
COLOURS = (
    "#7d93b8", "#3f9b6b", "#d8a12a", "#4a86c5", "#c8504b", "#8a6bb5", "#c98a3a", "#5aa7a7",
    "#b06a8f", "#7a9a3a", "#a0785a", "#5f7fd0", "#cf7f6a", "#6f8f8a", "#9a9a9a", "#b5a642",
)  # fmt: skip


@dataclass(frozen=True)
class Period:
    """Memory over the ops of a pass, without a budget.

    Attributes:
        names: of the bands, the first at the bottom.
        bytes: of each band, after each op has begun.
        seconds: when each op begins, from the pass's begin.
        backward_at: the op at which backward begins; None: not known.
        run: where the ops that ran are among them, in order. The others are times between two ops.
    """

    names: list[str]
    bytes: list[list[int]]
    seconds: list[float]
    backward_at: int | None
    run: list[int]


def period(trace: Trace) -> Period:
    """A band for storages from before the period, one for each layer, one for those that are made from
    backward on, and one for the rest.

    An activation belongs to the module that made it. Gradients are in the band of backward, because the trace does not say
    which module's forward an op of backward belongs to. A written storage stays in its band. Layers are
    as many levels of the modules' paths as make at most `MOST_BANDS` bands.
    """
    made_by = _makers(trace)
    modules = dict.fromkeys(m for m in made_by if m not in _PLACES)
    counts = {d: len({_layer(m, d) for m in modules}) for d in range(1, 20)}
    depth = max((d for d in counts if counts[d] <= MOST_BANDS), key=lambda d: (counts[d], -d), default=1)
    names = [BEFORE, *dict.fromkeys(_layer(m, depth) for m in modules), AFTER, NOBODY]
    numbers = {name: i for i, name in enumerate(names)}
    n = len(trace.ops)
    first = next((k for k, op in enumerate(trace.ops) if op.kind != OpKind.CONSTANT), n)
    changes = [[0] * (n + 1) for _ in names]
    takes_over = {new for op in trace.ops if not trace.copy_on_write for _, new in op.writes}
    for i, s in enumerate(trace.storages):
        band = changes[numbers[_layer(made_by[i], depth)]]
        begins = s.maker + (i in takes_over)  # until the op is over its block is the old version's
        ends = n if s.released == HELD else min(s.released, n)
        if ends > begins:
            band[begins] += s.size_bytes
            band[ends] -= s.size_bytes
    bands = []
    for change in changes:
        now, band = 0, []
        for k in range(n):
            now += change[k]
            band.append(now)
        bands.append(band[first:])
    begins_at, at = [], 0.0
    for op in trace.ops:
        begins_at.append(at)
        at += op.seconds
    turn = None if trace.backward_at is None else max(0, trace.backward_at - first)
    kept = [i for i, band in enumerate(bands) if any(band)]
    run = [k - first for k, op in enumerate(trace.ops) if op.is_run]
    return Period([names[i] for i in kept], [bands[i] for i in kept], begins_at[first:], turn, run)


def _makers(trace: Trace) -> list[str]:
    """For each storage, the path of the module that it belongs to, or one of `_PLACES`."""
    found = [NOBODY] * len(trace.storages)
    turn = len(trace.ops) if trace.backward_at is None else trace.backward_at
    for k, op in enumerate(trace.ops):
        if op.kind == OpKind.CONSTANT:
            module = BEFORE
        elif op.module or k >= turn:
            module = op.module or AFTER
        else:  # between modules: of the module whose values it reads
            module = next((found[s] for s in op.inputs if found[s] not in _PLACES), NOBODY)
        old = {new: found[was] for was, new in op.writes}
        for s in op.outputs:
            found[s] = old.get(s, module)
    return found


def _layer(path: str, depth: int) -> str:
    return path if path in _PLACES else ".".join(path.split(".")[:depth])


def _points(count: int) -> list[int]:
    """Which ops are drawn: all, or the last of equal stretches."""
    step = max(1, -(-count // MOST_POINTS))
    return sorted({*range(0, count, step), count - 1} if count else ())


def svg(found: Period, name: str, *, binary: bool = False) -> str:
    """The picture, for a page or a file of its own; colours of lines and letters are the page's."""
    count = len(found.seconds)
    shown = _points(count)
    total = [sum(band[k] for band in found.bytes) for k in range(count)]
    top = 1.08 * max([*total, 1])
    floor = HEIGHT - BOTTOM

    def x(op: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * op / max(count, 1)

    def y(size: float) -> float:
        return TOP + (floor - TOP) * (1 - size / top)

    label = f"memory over the ops of one pass of {escape(name)}"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">']
    for size, said in size_ticks(top, binary=binary):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(size):.1f}" y2="{y(size):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y(size) + 4:.1f}" text-anchor="end">{said}</text>')
    below = [0] * count
    for which, (title, band) in enumerate(zip(found.names, found.bytes, strict=True)):
        above = [b + size for b, size in zip(below, band, strict=True)]
        over = _steps([(x(k), y(above[k])) for k in shown], x(count))
        under = _steps([(x(k), y(below[k])) for k in shown], x(count))
        parts.append(
            f'<path fill="{_colour(which)}" d="M{" ".join(over)}L{" ".join(reversed(under))}Z"><title>{escape(title)}, at most '
            f"{show_size(max(band), binary=binary)}</title></path>"
        )
        below = above
    if found.backward_at is not None:
        at = x(found.backward_at)
        parts.append(f'<line class="budget" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{floor}"/>')
        parts.append(f'<text class="label" x="{at + 6:.1f}" y="{TOP + 12}">backward</text>')
    for op, said in _marks(found):
        parts.append(f'<text class="tick" x="{x(op):.1f}" y="{floor + 18}" text-anchor="middle">{said}</text>')
    parts.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">op</text>')
    return "".join(parts) + "</svg>"


def _marks(found: Period) -> Iterator[tuple[int, str]]:
    """Places on the axis, and how many ops have run before each."""
    for op in ticks(0, len(found.run), 6):
        if int(op) < len(found.run):
            yield found.run[int(op)], f"{int(op):,}"


def _steps(points: list[tuple[float, float]], end: float) -> list[str]:
    """Corners of a line that goes in steps; where nothing changes there are none."""
    found: list[tuple[float, float]] = []
    for x, y in points:
        if not found or abs(y - found[-1][1]) > 0.05:
            found += [(x, found[-1][1]), (x, y)] if found else [(x, y)]
    return [f"{x:.1f},{y:.1f}" for x, y in [*found, (end, found[-1][1])]] if found else []


def _colour(which: int) -> str:
    return COLOURS[which % len(COLOURS)]


def key(found: Period) -> str:
    """The legend of the colours."""
    items = (
        f'<span><i style="background: {_colour(i)}"></i>{escape(name)}</span>' for i, name in enumerate(found.names)
    )
    return f"<p class=key>{''.join(items)}</p>"


def section(name: str, trace: Trace, *, binary: bool = False) -> str:
    """A section of a report's page; `binary`: sizes in powers of two, as its budgets were written."""
    found = period(trace)
    peak, at = trace.unmanaged_peak
    op = escape(name_of("op", trace.ops[at].name))
    return (
        f"<h2>One pass: {escape(name)}</h2><p class=soft>{trace.ops_run:,} ops in {show_seconds(trace.seconds)}; at most "
        f"{show_size(peak, binary=binary)}, at {op}. Without a budget: "
        "what the pass holds, by the layer that made it.</p>" + wide(svg(found, name, binary=binary)) + key(found)
    )


_STYLE = (
    "<style>text{font:12px system-ui,sans-serif;fill:#4b5560}.grid{stroke:#8886}.budget{stroke:#4b5560;stroke-dasharray:6 4}"
    "@media(prefers-color-scheme:dark){text{fill:#aab2bb}.budget{stroke:#aab2bb}}</style>"
)


def write_picture(trace: Trace, path: Path, name: str) -> None:
    """A PNG or an SVG, by its name.

    Raises:
        ImportError: a PNG needs matplotlib.
        OSError: it cannot be written.
    """
    found = period(trace)
    if path.suffix == ".svg":
        step = 18
        rows = "".join(
            f'<rect x="{LEFT + 300 * (i % 3)}" y="{HEIGHT + step * (i // 3)}" width="10" height="10" fill="{_colour(i)}"/>'
            f'<text x="{LEFT + 16 + 300 * (i % 3)}" y="{HEIGHT + 10 + step * (i // 3)}">{escape(title)}</text>'
            for i, title in enumerate(found.names)
        )
        height = HEIGHT + step * (-(-len(found.names) // 3)) + 8
        drawn = svg(found, name).replace(f"0 0 {WIDTH} {HEIGHT}", f"0 0 {WIDTH} {height}", 1)
        drawn = re.sub(r"(<svg [^>]*>)", lambda head: head[1] + _STYLE, drawn, count=1)
        path.write_text(drawn.replace("</svg>", f"{rows}</svg>"), encoding="utf-8")
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    megabytes = [[size / 1e6 for size in band] for band in found.bytes]
    axes.stackplot(range(len(found.seconds)), megabytes, labels=found.names, colors=COLOURS, step="post", linewidth=0)
    if found.backward_at is not None:
        axes.axvline(found.backward_at, color="#5b6472", linestyle="--", linewidth=1)
        axes.text(found.backward_at, 1.01, "backward", transform=axes.get_xaxis_transform(), ha="center", fontsize=9)
    axes.set_xlim(0, max(len(found.seconds) - 1, 1))
    axes.set_xticks([at for at, _ in _marks(found)], [said for _, said in _marks(found)])
    axes.set(xlabel="op", ylabel="MB without a budget")
    axes.set_title(name, pad=18)  # above the word "backward"
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def events(traces: Sequence[tuple[str, Trace]], first: int) -> Iterator[dict[str, Any]]:
    """For Perfetto: ops as slices, and memory by layer as a counter; a process of its own for each pass, from number `first`."""
    for number, (name, trace) in enumerate(traces, start=first):
        found = period(trace)
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": f"one pass: {name}"}}
        ops = trace.ops[len(trace.ops) - len(found.seconds) :]
        for k, (op, at) in enumerate(zip(ops, found.seconds, strict=True)):
            begin, end = round(1e6 * at), round(1e6 * (at + op.seconds))
            sizes = {title: band[k] for title, band in zip(found.names, found.bytes, strict=True)}
            yield {"ph": "C", "name": "memory by layer", "pid": number, "ts": begin, "args": sizes}
            yield {
                "ph": "X", "name": op.name, "cat": "op", "pid": number, "tid": 10 * number, "ts": begin, "dur": end - begin,
                "args": {"module": op.module},
            }  # fmt: skip
