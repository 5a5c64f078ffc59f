"""A picture of `memmgr simulate --job`: each rank's time by its budget, with the split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from memmgr.tools.view.plot import COLOURS

if TYPE_CHECKING:
    from memmgr.tools.view.simulate_job import Rank


def draw(ranks: Sequence[Rank], budgets: Sequence[int], evenly: Sequence[int], seconds: float, path: Path) -> None:
    """Draws a curve a rank; full: the best split, hollow: the equal one; dashed: the time of the slowest rank.

    Args:
        ranks: with their curves.
        budgets: of the best split.
        evenly: of the equal one.
        seconds: of the slowest rank in the best split.
        path: a PNG or an SVG, by its name.

    Raises:
        ImportError: matplotlib is missing; ask `plot.available` first.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    unit, name = (1e9, "GB") if max(rank.need_bytes for rank in ranks) >= 1e9 else (1e6, "MB")
    for i, (rank, budget, even) in enumerate(zip(ranks, budgets, evenly, strict=True)):
        colour, curve = COLOURS[(i + 1) % len(COLOURS)], rank.curve()
        points = [*curve.points, (max(rank.need_bytes, curve.points[-1][0]), curve.points[-1][1])]
        axes.step(
            [size / unit for size, _ in points], [takes * 1e3 for _, takes in points], where="post", color=colour,
            linewidth=1.4, label=f"rank {rank.number}",
        )  # fmt: skip
        for size, filled in ((even, "white"), (budget, colour)):
            takes = curve.seconds(size)
            if takes is not None:
                axes.plot([size / unit], [takes * 1e3], marker="o", color=colour, markerfacecolor=filled, markersize=7)
    axes.axhline(seconds * 1e3, color="#c0202a", linewidth=1.1, linestyle=(0, (5, 3)), label="slowest rank")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(color="#d9dde2", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.set_xlabel(f"budget of the rank, {name}      (full: the best split, hollow: the equal one)", fontsize=9)
    axes.set_ylabel("ms of a step, without collectives", fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    figure.suptitle(f"{len(ranks)} ranks: time by budget", fontsize=11, x=0.01, ha="left")
    figure.savefig(path, dpi=130)
