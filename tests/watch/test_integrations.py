"""Thin adaptors on `stats()`: Prometheus, and the names of all. (Loggers and the Trainer have files of their own.)"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from budget.there import bytes_already_there

import memmgr
from memmgr.api import budget as budgets
from memmgr.observe.figures import FIGURES


def _train(limit: int | None) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64)) for _ in range(4))
    )
    x = torch.randn(1024, 64)
    if limit is not None:
        limit += bytes_already_there()
    with memmgr.budget(limit, quiet=True, policy="evict") as mm:
        for _ in range(3):
            model(x).square().mean().backward()
    return mm.stats()


def test_no_counter_falls() -> None:
    """A counter that falls reads as a restart for a monitor, and its rate is nonsense."""
    kinds = {figure.name: figure.kind for figure in FIGURES}
    torch.manual_seed(0)
    blocks = (
        torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64)) for _ in range(4)
    )
    model = torch.nn.Sequential(*blocks)
    x = torch.randn(1024, 64)
    readings = []
    # Every tensor is evicted after every op; otherwise tensors of earlier tests could be evicted instead.
    with memmgr.budget("1GB", policy="torture", quiet=True) as mm:
        readings.append(mm.stats())
        for _ in range(4):
            seen = torch.randn(4096) * 2
            seen.numpy()  # escapes, and dies at the end of the loop
            loss = model(x).square().mean()
            readings.append(mm.stats())
            loss.backward()
            readings.append(mm.stats())
            del loss, seen
            readings.append(mm.stats())
        model.zero_grad()
        readings.append(mm.stats())
    readings.append(mm.stats())
    fell, grew = set(), set()
    for before, after in itertools.pairwise(readings):
        fell |= {name for name in before if after[name] < before[name]}
        grew |= {name for name in before if after[name] > before[name]}
    assert {name for name in fell if kinds.get(name) != "gauge"} == set()
    # The work was such that it could have shown.
    assert fell >= {"cells", "absent_cells", "recipe_bytes", "escaped_bytes", "resident_bytes.current"}
    assert grew >= {"evictions", "reloads", "recomputes", "escapes", "passes", "ops", "wall_seconds"}


def test_prometheus(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(
        "prometheus_client", reason="the package prometheus-client is not installed (the extra `prometheus`)"
    )
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    from memmgr.integrations import MemmgrCollector

    stats = _train(6_000_000)
    registry = CollectorRegistry()
    registry.register(MemmgrCollector({"rank": "0"}))
    text = generate_latest(registry).decode()
    samples = {s.name: s for family in text_string_to_metric_families(text) for s in family.samples}
    assert samples["memmgr_evictions_total"].value == stats["evictions"] > 0
    assert samples["memmgr_resident_peak_bytes"].value == stats["resident_bytes.peak"]
    assert samples["memmgr_resident_bytes"].value == stats["resident_bytes.current"]
    assert samples["memmgr_recompute_seconds_total"].labels == {"rank": "0"}
    assert len(samples) == len(stats), set(stats)
    assert not [n for n in samples if not n.startswith("memmgr_") or "." in n]
    kinds = {family.name: family.type for family in registry.collect()}
    gauges = "cells absent_cells pinned_cells recipe_bytes escaped_bytes prefetch_hits".split()
    assert {kinds[f"memmgr_{name}"] for name in gauges} == {"gauge"} and kinds["memmgr_ops"] == "counter"
    _train(None)
    unlimited = {s.name: s.value for family in registry.collect() for s in family.samples}
    assert math.isinf(unlimited["memmgr_budget_bytes"])
    monkeypatch.setattr(budgets, "_last", None)
    assert generate_latest(registry) == b""
    registry.register(MemmgrCollector())  # nothing is described, so a second one (of another rank) is welcome


def test_names_of_integrations() -> None:
    import memmgr.integrations as found

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        found.nothing  # noqa: B018
    assert sorted(found.__all__) == list(found.__all__)
