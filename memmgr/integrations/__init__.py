"""Adaptors to other libraries, each thin and imported only when it is asked for.

`MemmgrCallback` for transformers' `Trainer`, `MemmgrLightningCallback` for Lightning's, `MemmgrTracker` for accelerate,
`log_stats` for TensorBoard, W&B, MLflow and the loggers of frameworks, `log_panels` for charts in the first three,
`MemmgrCollector` for Prometheus.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._accelerate import MemmgrTracker
    from ._lightning import MemmgrLightningCallback
    from ._loggers import log_stats
    from ._panels import log_panels
    from ._prometheus import MemmgrCollector
    from ._trainer import MemmgrCallback

__all__ = ["MemmgrCallback", "MemmgrCollector", "MemmgrLightningCallback", "MemmgrTracker", "log_panels", "log_stats"]

_HOMES = {
    "MemmgrCallback": "_trainer",
    "MemmgrCollector": "_prometheus",
    "MemmgrLightningCallback": "_lightning",
    "MemmgrTracker": "_accelerate",
    "log_panels": "_panels",
    "log_stats": "_loggers",
}
_EXTRAS = {
    "accelerate": "trainer",
    "transformers": "trainer",
    "lightning": "lightning",
    "prometheus_client": "prometheus",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from memmgr.config.extras import pip_line

    try:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in _EXTRAS:
            raise
        raise ModuleNotFoundError(
            f"memmgr.integrations.{name} needs {library}: {pip_line(_EXTRAS[library])}", name=library
        ) from None


def __dir__() -> list[str]:
    return sorted(__all__)
