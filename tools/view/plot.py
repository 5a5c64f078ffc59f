"""Pictures: memory over time against the budget line, of several runs and of a planned step, and time against the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from memmgr.config.extras import pip_line
from memmgr.tools.common.outputs import check_output
from memmgr.tools.common.usage_error import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from memmgr.tools.bench.runs import RunResult
    from memmgr.tools.common.outlook import Level

COLOURS = ("#5b6472", "#2a78b8", "#2a9d6f", "#d0802a", "#8a5fb0", "#b8434e")

HIGHEST = 2.5
"""Where a picture of slowdowns ends: a system that takes five times as long would flatten all others."""


def available() -> bool:
    """matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def check_picture(path: Path | None) -> None:
    """Can `--picture` be drawn there?

    Raises:
        UsageError: no.
    """
    if path is None:
        return
    if path.suffix not in (".png", ".svg"):
        raise UsageError(f"--picture: {path} ends in neither .png nor .svg")
    if not available():
        raise UsageError(f"--picture needs the package matplotlib: {pip_line('demo')}")
    check_output(path, "--picture")


@dataclass(frozen=True)
class Point:
    """One pass at one budget: the budget's share of the need, time over unmanaged, the bound, whose it is."""

    ratio: float
    overhead: float | None
    lower_bound: float | None
    label: str


@dataclass(frozen=True)
class Marks:
    """Budgets that a picture of slowdowns points out.

    Attributes:
        measured: share of the need, time over unmanaged, and doubt of that time, of runs.
        proposal: share and time of the budget that is proposed; None: none is.
        sizes: shares of the need, and the names of the devices that have so much memory.
        limit: the largest time over unmanaged that was asked for.
    """

    measured: Sequence[tuple[float, float, float]] = ()
    proposal: tuple[float, float] | None = None
    sizes: Sequence[tuple[float, str]] = ()
    limit: float | None = None


def _mark(axes: Axes, marks: Marks) -> None:
    for ratio, name in marks.sizes:
        axes.axvline(ratio, color="#8a5fb0", linewidth=0.9, linestyle=(0, (2, 3)))
        axes.annotate(
            name, (ratio, 0.98), xycoords=("data", "axes fraction"), xytext=(-2, 0), textcoords="offset points",
            rotation=90, ha="right", va="top", fontsize=7, color="#8a5fb0",
        )  # fmt: skip
    if marks.limit is not None:
        axes.axhline(marks.limit, color="#c0202a", linewidth=0.9, linestyle=(0, (5, 3)), label="asked for at most")
    if marks.measured:
        ratios, factors, doubts = zip(*marks.measured, strict=True)
        axes.errorbar(
            ratios, factors, yerr=doubts, fmt="D", color=COLOURS[3], markersize=6, elinewidth=0.9, capsize=3,
            label="measured", zorder=5,
        )  # fmt: skip
    if marks.proposal is not None:
        axes.plot(*marks.proposal, "o", markersize=15, fillstyle="none", color=COLOURS[2], label="proposal", zorder=6)


def slowdown(rows: Sequence[Sequence[Point]], path: Path, title: str, marks: Marks | None = None) -> None:
    """Draws time over unmanaged against the budget, a line a label, with the first one's bound that no schedule passes.

    A line ends where the pass does not fit; where no line is left, a text says so.

    Args:
        rows: for each budget and each label, the result.
        path: a PNG or an SVG, by its name.
        title: above.
        marks: budgets to point out.

    Raises:
        ImportError: matplotlib is missing; ask `available` first.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    many = len(rows[0]) > len(COLOURS)
    figure = Figure(figsize=(10.5, 6.5) if many else (7.5, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    bound = [(row[0].ratio, row[0].lower_bound) for row in rows if row[0].lower_bound is not None]
    if bound:
        ratios, factors = [ratio for ratio, _ in bound], [factor for _, factor in bound]
        axes.fill_between(ratios, factors, 1, color="#5b6472", alpha=0.15, linewidth=0, label="below the bound")
    for index, same in enumerate(zip(*rows, strict=True)):
        fits = [result for result in same if result.overhead is not None]
        axes.plot(
            [result.ratio for result in fits],
            [result.overhead or 1.0 for result in fits],
            color=COLOURS[(index + 1) % len(COLOURS)],
            linestyle=("-", "--", ":")[index // len(COLOURS) % 3],
            marker="o^sD"[index // len(COLOURS) % 4],
            markersize=4,
            linewidth=2.5 if same[0].label == "plan" else 1.3,
            label=same[0].label,
        )
    if marks is not None:
        _mark(axes, marks)
    axes.set_xlim(1.02, 0)
    _tell_where_none_is_left(axes, rows, "does not fit" if marks is None else "no plan was found")
    axes.set_ylim(*_reach(rows, marks))
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(color="#d9dde2", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.set_xlabel("budget, of the unmanaged peak", fontsize=9)
    axes.set_ylabel("time over unmanaged", fontsize=9)
    beside = {"bbox_to_anchor": (1.01, 1.0), "loc": "upper left"} if many else {"loc": "upper left"}
    axes.legend(fontsize=8, frameon=False, handlelength=3, **beside)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    figure.savefig(path, dpi=130)


def _tell_where_none_is_left(axes: Axes, rows: Sequence[Sequence[Point]], text: str) -> None:
    least = min((result.ratio for row in rows for result in row if result.overhead is not None), default=1.0)
    if least > min(row[0].ratio for row in rows):
        where = axes.get_xaxis_transform()
        axes.text(least / 2, 0.5, text, transform=where, ha="center", color="#5b6472", fontsize=9)


def _reach(rows: Sequence[Sequence[Point]], marks: Marks | None) -> tuple[float, float]:
    """The least and the largest time that a picture of slowdowns shows."""
    marked = () if marks is None else (marks.limit or 1.0, *(factor + doubt for _, factor, doubt in marks.measured))
    highest = max([1.05, *marked, *(result.overhead or 1.0 for row in rows for result in row)])
    room = 1.05 if marks is None else 1.4  # for the legend, above a line
    drawn = [result.overhead for row in rows for result in row if result.overhead is not None]
    lowest = (
        1.0
        if marks is None
        else min([1.0, *(0.98 * f for f in drawn), *(0.98 * (f - d) for _, f, d in marks.measured)])
    )
    return lowest, min(1 + room * (highest - 1), HIGHEST)


def memory_over_time(results: Sequence[RunResult], path: Path, title: str) -> None:
    """Draws one strip per run, all on the same axes' scales, and writes a PNG.

    The line is the process's resident set over its start, which the machine has to have. The dark area below it is the
    part that tensors hold. In an unmanaged run the latter is known for two more steps only, behind the timed ones (see
    `bench.runs.with_need`).

    Args:
        results: the runs, top to bottom; one that failed gets an empty strip that says so.
        path: the PNG.
        title: above the first strip.

    Raises:
        ImportError: matplotlib is missing; ask `available` first.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # No pyplot: it keeps figures in a global and picks a backend by looking for a display.
    figure = Figure(figsize=(9, 0.6 + 1.35 * len(results)), layout="constrained")
    FigureCanvasAgg(figure)
    strips = figure.subplots(len(results), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    highest = max([1, *(rss for result in results for _, rss, _ in result.timeline)])
    highest = max([highest, *(result.spec.budget_bytes or 0 for result in results)])
    for index, (strip, result) in enumerate(zip(strips, results, strict=True)):
        colour = COLOURS[index % len(COLOURS)]
        seconds = [point[0] for point in result.timeline]
        rss = [point[1] / 1e6 for point in result.timeline]
        held = [resident / 1e6 if resident >= 0 else float("nan") for _, _, resident in result.timeline]
        strip.fill_between(seconds, rss, color=colour, alpha=0.15, linewidth=0)
        strip.fill_between(seconds, held, color=colour, alpha=0.6, linewidth=0)
        strip.plot(seconds, rss, color=colour, linewidth=0.9)
        budget = result.spec.budget_bytes
        if budget is not None:
            strip.axhline(budget / 1e6, color="#c0202a", linewidth=1.1, linestyle=(0, (5, 3)))
            strip.annotate(
                f"budget {budget / 1e6:,.0f} MB",
                (1, budget / 1e6),
                xycoords=("axes fraction", "data"),
                xytext=(-4, 3),
                textcoords="offset points",
                ha="right",
                fontsize=8,
                color="#c0202a",
            )
        note = "failed" if result.failure else f"{result.seconds_a_step:.2f} s a step"
        strip.set_title(f"{result.spec.label} · {note}", loc="left", fontsize=9, color=colour, pad=3)
        strip.spines[["top", "right"]].set_visible(False)
        strip.tick_params(labelsize=8)
        strip.margins(x=0)
    strips[0].set_ylim(0, 1.12 * highest / 1e6)
    strips[-1].set_xlabel("seconds      (line: the process's resident set; dark: held by tensors)", fontsize=9)
    figure.supylabel("MB over the start", fontsize=9)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    figure.savefig(path, dpi=130)


def memory_of_step(
    unmanaged: Sequence[Level], managed: Sequence[Level], budget_bytes: int, path: Path, title: str
) -> None:
    """Draws memory over one step by kind, under a budget where there is a plan, and the step without one as a line.

    Args:
        unmanaged: the step as it is.
        managed: under the plan; empty: there is none, and the step as it is is drawn by kind.
        budget_bytes: the line.
        path: a PNG or an SVG, by its name.
        title: above.

    Raises:
        ImportError: matplotlib is missing; ask `available` first.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from memmgr.tools.common.outlook import KINDS

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    drawn = managed or unmanaged
    by_kind = [[level.resident[i] / 1e9 for level in drawn] for i in range(len(KINDS))]
    there = [i for i, sizes in enumerate(by_kind) if any(sizes)]
    axes.stackplot(
        [level.seconds for level in drawn], [by_kind[i] for i in there], labels=[KINDS[i] for i in there],
        colors=[COLOURS[i + 1] for i in there], step="post", linewidth=0, alpha=0.75,
    )  # fmt: skip
    axes.step(
        [level.seconds for level in unmanaged], [sum(level.resident) / 1e9 for level in unmanaged], where="post",
        color=COLOURS[0], linewidth=0.9, label="without a budget",
    )  # fmt: skip
    axes.axhline(budget_bytes / 1e9, color="#c0202a", linewidth=1.1, linestyle=(0, (5, 3)), label="budget")
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.set_xlabel("seconds of a step, from the end of one backward to the end of the next", fontsize=9)
    axes.set_ylabel("GB", fontsize=9)
    axes.legend(fontsize=8, frameon=False, ncols=2)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    figure.savefig(path, dpi=130)
