"""Loggers that take numbers by name: TensorBoard, W&B, MLflow, the loggers of Lightning, accelerate's trackers."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakKeyDictionary

from memmgr.api.budget import last
from memmgr.config.sizes import UNLIMITED
from memmgr.observe.interval import Interval


class Scalars(Protocol):
    """The method that is used of `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> Any:
        """Notes one number."""


class Metrics(Protocol):
    """The method that is used of the module `mlflow`, or of a logger of Lightning."""

    def log_metrics(self, metrics: dict[str, float], /, step: int) -> Any:
        """Notes numbers."""


class Log(Protocol):
    """The method that is used of a run of W&B, or of an `Accelerator`."""

    def log(self, data: dict[str, float], /, step: int) -> Any:
        """Notes numbers."""


# For each budget, since when the shares of a writer's next call are: by identity, since a writer need have no hash.
_intervals: WeakKeyDictionary[object, dict[int, Interval]] = WeakKeyDictionary()


def log_stats(writer: Scalars | Metrics | Log, step: int, prefix: str = "memmgr/") -> None:
    """Writes the figures of the open budget, or of the last one, to a logger.

    These are `peak_gb` (so far, in 10^9 bytes), `recompute_percent` and `stall_percent` (of the time since the last call with
    this writer, or since the budget opened), and all of `memmgr.stats()`, each in the unit that its name says.

    Args:
        writer: a `SummaryWriter`; a run of W&B; the module `mlflow`, inside a run; a logger of Lightning; an `Accelerator`
            with trackers; or another object with one of their methods: `add_scalar`, `log_metrics`, `log`.
        step: the step to which they belong.
        prefix: before each name; a slash makes it a group.

    Raises:
        TypeError: it has none of these methods. `wandb.run` is None before `wandb.init`.

    No figure is written before the first budget, and no `budget_bytes` without a limit. Places in the program
    (`escapes.FILE:LINE`) are not written.
    """
    ways = [name for name in ("add_scalar", "log_metrics", "log") if callable(getattr(writer, name, None))]
    if not ways:
        raise TypeError(
            f"log_stats: {writer!r} takes no numbers: hand over a SummaryWriter, a run of W&B (after wandb.init), the module "
            "mlflow, a logger of Lightning, an Accelerator, or another object with add_scalar, log_metrics or log"
        )
    runtime = last()
    if runtime is None:
        return
    now = runtime.stats()
    numbers = {name: float(v) for name, v in now.items() if v != UNLIMITED and not name.startswith("escapes.")}
    shares = _interval(runtime, id(writer)).take_until(now)
    figures = {prefix + name: value for name, value in (shares | numbers).items()}
    if ways[0] == "add_scalar":
        for name, value in figures.items():
            writer.add_scalar(name, value, step)  # type: ignore[union-attr]
    else:
        getattr(writer, ways[0])(figures, step=step)


def _interval(budget: object, writer: int) -> Interval:
    writers = _intervals.setdefault(budget, {})
    if writer not in writers:
        writers[writer] = Interval()
        writers[writer].begin({})  # where the budget itself begins
    return writers[writer]
