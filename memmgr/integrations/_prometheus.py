"""Prometheus: `memmgr.stats()` in base units, read when the server asks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from memmgr.api.budget import stats
from memmgr.config.sizes import UNLIMITED
from memmgr.observe.figures import FIGURES

_FIGURES = {figure.name: figure for figure in FIGURES}
_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}


class MemmgrCollector(Collector):
    """Collects the figures of the open budget, or of the last one.

        from prometheus_client import REGISTRY, start_http_server
        from memmgr.integrations import MemmgrCollector

        REGISTRY.register(MemmgrCollector())
        start_http_server(9000)

    Names are those of `memmgr.stats()` with `memmgr_` before them: `memmgr_resident_bytes` (now), `memmgr_resident_peak_bytes`,
    `memmgr_recompute_seconds_total`, `memmgr_evictions_total`. No limit is `+Inf`. A metric whose name ends in `_total`
    only grows until the next budget opens; all others are gauges.

    Args:
        labels: put on every metric, for example `{"rank": "0"}`.
    """

    def __init__(self, labels: dict[str, str] | None = None) -> None:
        self._names = tuple(labels or ())
        self._values = tuple((labels or {}).values())

    def describe(self) -> Iterator[Metric]:
        """Returns no metric: the metrics are known when a budget is open."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """One family a figure; none before the first budget."""
        for key, value in stats().items():
            if key.startswith("escapes."):
                continue  # places in a program are no metrics
            figure = _FIGURES[key]
            metric = _FAMILIES[figure.kind](_name(key), figure.meaning, labels=self._names)
            metric.add_metric(self._values, float("inf") if value == UNLIMITED else float(value))
            yield metric


def _name(key: str) -> str:
    """`resident_bytes.peak` as `memmgr_resident_peak_bytes`: the unit comes last."""
    stem, _, last = key.partition(".")
    name, _, unit = stem.rpartition("_")
    return f"memmgr_{stem}" if last in ("", "current") else f"memmgr_{name}_{last}_{unit}"
