"""Time against memory: a strip for each model, a line for each system."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from .rows import Row
from .systems import SYSTEMS
from .table import title

# In the order of SYSTEMS, so that a system has its colour in every picture: greys and browns without a budget.
_COLOURS = (
    "#5b6472 #8c564b #c49c94 #b8b2a7 #e0a800 #7f7f00 #6b4c9a #3d8b8b #2a78b8 #8fc1e3 #2a9d6f #d0802a #b8434e #8a5fb0 #e377c2 "
    "#17a2b8 #a0c24a"
).split()

_HIGHEST = 3.0
"""Where a strip ends: a system that takes six times as long would flatten all others; it is drawn at the edge."""


def draw(rows: Sequence[Row], path: Path, heading: str) -> None:
    """Writes a PNG or an SVG, by its name. Systems with budgets are lines, others single points. A system that did not
    run is left out.

    Raises `ImportError`: matplotlib is missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    ran = [row for row in rows if not row.error and row.need_bytes]
    models = list(dict.fromkeys(row.model for row in ran))
    systems = [name for name in SYSTEMS if any(row.system == name for row in ran)]
    colours = dict(zip(SYSTEMS, _COLOURS, strict=True))
    across = min(5, max(1, len(models)))
    down = -(-max(1, len(models)) // across)
    figure = Figure(figsize=(1.2 + 3.2 * max(across, 2), 1.4 + 2.7 * down), layout="constrained")
    FigureCanvasAgg(figure)
    strips = figure.subplots(down, across, squeeze=False, sharey=True)
    for axes, model in zip(strips.flat, models, strict=False):
        for system in systems:
            points = sorted(
                (row.inside_bytes / row.need_bytes, min(row.ratios[1], _HIGHEST))
                for row in ran
                if row.model == model and row.system == system and not (system == "unmanaged" and row.budget)
            )
            axes.plot(
                [x for x, _ in points], [y for _, y in points], label=title_of(system), color=colours[system], marker="o",
                markersize=5 if not SYSTEMS[system].policy else 3.5, linewidth=1.3,
            )  # fmt: skip
        axes.axhline(1, color="#5b6472", linewidth=0.6)
        axes.set_title(model, loc="left", fontsize=9)
        axes.set_xlim(1.08, 0)
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.grid(color="#d9dde2", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=7, labelleft=True)
    for axes in list(strips.flat)[len(models) :]:
        axes.set_visible(False)
    figure.supxlabel("memory, of what plain torch needs", fontsize=9)
    figure.supylabel("time of a step over plain torch", fontsize=9)
    if models:
        handles, labels = strips.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, fontsize=8, frameon=False, ncols=5, loc="outside lower left")
    lines = textwrap.fill(heading, int(13 * figure.get_figwidth()))  # 13 characters of this size are an inch
    figure.suptitle(lines, fontsize=9, x=0.01, ha="left")
    figure.savefig(path, dpi=110)


def title_of(system: str) -> str:
    """As in the table."""
    return title(Row("", "", system))
