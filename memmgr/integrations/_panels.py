"""Panels of a logger: memory under the budget line, the reasons for slowness, the holders of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from memmgr.api.budget import current, last
from memmgr.config.extras import pip_line
from memmgr.config.sizes import UNLIMITED, show_size
from memmgr.observe.holdings import Holder
from memmgr.observe.slowness import losses, why_slow

_GB = 1e-9
_LOSSES = ("recompute", "reads", "room", "per_op")
_HEAD = ("bytes", "absent bytes", "tensors", "kind", "name", "module", "line")


@dataclass
class _History:
    """The samples of one writer; `shares` are the losses so far, in per cent."""

    steps: list[int] = field(default_factory=list)
    memory: dict[str, list[float]] = field(default_factory=dict)
    shares: dict[str, list[float]] = field(default_factory=dict)
    has_layout: bool = False

    def add(self, step: int, stats: dict[str, Any]) -> None:
        sizes = {
            "resident_gb": stats["resident_bytes.current"],
            "peak_gb": stats["resident_bytes.peak"],
            "unmanaged_gb": stats["unmanaged_peak_bytes"],
        }
        if stats["budget_bytes"] < UNLIMITED:
            sizes["budget_gb"] = stats["budget_bytes"]
        self.steps.append(step)
        # A budget that is measured first has no line before: then there is a gap, not a zero.
        for name in {*self.memory, *sizes}:
            series = self.memory.setdefault(name, [float("nan")] * (len(self.steps) - 1))
            series.append(sizes[name] * _GB if name in sizes else float("nan"))
        found = losses(stats)
        for name in _LOSSES:
            self.shares.setdefault(name, []).append(100 * getattr(found, name))


_histories: WeakKeyDictionary[object, dict[int, _History]] = WeakKeyDictionary()


def log_panels(writer: Any, step: int, prefix: str = "memmgr/", top: int = 10) -> None:
    """Draws panels in a logger: memory over time under the budget line, the reasons why the run is slow, the holders of memory.

    Each call adds a sample to the curves and draws the panels anew, so call it every hundred steps or so, inside the budget.

    | logger | memory and reasons | holders |
    |---|---|---|
    | TensorBoard | charts of several curves, under *Custom Scalars* | a table, under *Text* |
    | W&B | charts `memory` and `slowness`, of the run | a `wandb.Table` |
    | MLflow | figures `memory.png` and `slowness.png`, artifacts of the run (needs matplotlib) | `holders.md` |

    Args:
        writer: a `SummaryWriter` of torch or of tensorboardX; the module `wandb` after `wandb.init`, or its run; the module
            `mlflow`, inside a run.
        step: the step to which the sample belongs.
        prefix: before each name; a slash makes it a group.
        top: holders that the table has.

    Raises:
        TypeError: another kind of logger: `log_stats` writes numbers to it.
        ModuleNotFoundError: MLflow's figures need matplotlib.

    Nothing is drawn before the first budget; after the last one has closed the table of holders is left out.
    """
    draw = _drawer(writer)
    runtime = last()
    if runtime is None:
        return
    history = _histories.setdefault(runtime, {}).setdefault(id(writer), _History())
    stats = runtime.stats()
    history.add(step, stats)
    holders = (
        runtime.explain(0).now[:top] if runtime is current() else ()
    )  # 0: no search for the variables that keep them
    draw(writer, history, step, prefix, why_slow(stats), holders)


_Draw = Callable[[Any, _History, int, str, str, tuple[Holder, ...]], None]


def _drawer(writer: Any) -> _Draw:
    library = (getattr(writer, "__name__", None) or type(writer).__module__).partition(".")[0]
    if callable(getattr(writer, "add_custom_scalars", None)):
        return _tensorboard
    if library == "wandb" and callable(getattr(writer, "log", None)):
        return _wandb
    if callable(getattr(writer, "log_figure", None)) and callable(getattr(writer, "log_text", None)):
        return _mlflow
    raise TypeError(
        f"log_panels: {writer!r} has no panels: hand over a SummaryWriter, wandb or its run (after wandb.init), or the module "
        "mlflow; log_stats writes numbers to any logger"
    )


def _rows(holders: tuple[Holder, ...]) -> list[tuple[Any, ...]]:
    return [(h.bytes, h.absent_bytes, h.count, h.kind, h.name, h.module, h.where) for h in holders]


def _markdown(holders: tuple[Holder, ...]) -> str:
    cells = [[show_size(row[0]), show_size(row[1]), *map(str, row[2:])] for row in _rows(holders)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (_HEAD, ["---"] * len(_HEAD), *cells))


def _tensorboard(writer: Any, history: _History, step: int, prefix: str, why: str, holders: tuple[Holder, ...]) -> None:
    panels = {"memory": history.memory, "slowness": {f"{name}_percent": s for name, s in history.shares.items()}}
    for panel, series in panels.items():
        for name, values in series.items():
            writer.add_scalar(f"{prefix}{panel}/{name}", values[-1], step)
    if not history.has_layout:
        history.has_layout = True
        charts = {panel: ["Multiline", [f"{prefix}{panel}/.*"]] for panel in panels}
        writer.add_custom_scalars({prefix.rstrip("/") or "memmgr": charts})
    writer.add_text(f"{prefix}slowness", why, step)
    if holders:
        writer.add_text(f"{prefix}holders", _markdown(holders), step)


def _wandb(writer: Any, history: _History, step: int, prefix: str, why: str, holders: tuple[Holder, ...]) -> None:
    import wandb

    def chart(series: dict[str, list[float]], title: str) -> Any:
        return wandb.plot.line_series(
            xs=history.steps, ys=list(series.values()), keys=list(series), title=title, xname="step"
        )

    panels = {
        f"{prefix}memory": chart(history.memory, "memory and budget, GB"),
        f"{prefix}slowness": chart(history.shares, "time lost so far, %"),
        f"{prefix}why": wandb.Html(f"<p>{why}</p>"),
    }
    if holders:
        panels[f"{prefix}holders"] = wandb.Table(columns=list(_HEAD), data=[list(row) for row in _rows(holders)])
    writer.log(panels, step=step)


def _mlflow(writer: Any, history: _History, step: int, prefix: str, why: str, holders: tuple[Holder, ...]) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"log_panels: figures need matplotlib: {pip_line('demo')}", name="matplotlib"
        ) from None
    for panel, series, unit in (("memory", history.memory, "GB"), ("slowness", history.shares, "% of the time so far")):
        figure = Figure(figsize=(7, 3.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for name, values in series.items():
            form = "r--" if name == "budget_gb" else ".-"
            axes.plot(history.steps, values, form, label=name)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("step")
        axes.set_ylabel(unit)
        axes.legend(fontsize=8, frameon=False)
        writer.log_figure(figure, f"{prefix}{panel}.png")
    writer.log_text(why, f"{prefix}why.txt")
    if holders:
        writer.log_text(_markdown(holders), f"{prefix}holders.md")
