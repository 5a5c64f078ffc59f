"""`log_stats` into loggers that take numbers: the packages themselves where they are installed, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from budget.there import bytes_already_there

import memmgr
from memmgr.api import budget as budgets
from memmgr.integrations import log_panels, log_stats

SHARES = {"recompute_percent", "stall_percent"}
THREE = SHARES | {"peak_gb"}


class Training:
    """Steps under a budget that is too small for all of them to stay."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        blocks = (
            torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64)) for _ in range(4)
        )
        self.model = torch.nn.Sequential(*blocks)
        self.x = torch.randn(1024, 64)

    def budget(self, limit: int | None = 6_000_000) -> memmgr.budget:
        return memmgr.budget(limit and limit + bytes_already_there(), quiet=True, policy="evict")

    def step(self) -> None:
        self.model(self.x).square().mean().backward()


def _trained(limit: int | None = 6_000_000) -> dict[str, Any]:
    training = Training()
    with training.budget(limit) as mm:
        for _ in range(3):
            training.step()
    return mm.stats()


def _names(stats: dict[str, Any]) -> set[str]:
    return THREE | {name for name in stats if not name.startswith("escapes.")}


class Writer:
    def __init__(self) -> None:
        self.written: dict[str, tuple[float, int | None]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        assert tag not in self.written
        self.written[tag] = (scalar_value, global_step)


def test_scalars_for_whatever_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = _trained()
    writer = Writer()
    log_stats(writer, 7)
    assert {name: value for name, value in writer.written.items() if name.removeprefix("memmgr/") not in THREE} == {
        f"memmgr/{name}": (float(stats[name]), 7) for name in _names(stats) - THREE
    }
    assert writer.written["memmgr/peak_gb"] == (pytest.approx(stats["resident_bytes.peak"] * 1e-9, abs=1e-6), 7)
    recomputed = 100 * stats["recompute_seconds"] / stats["wall_seconds"]
    assert recomputed > 0 and writer.written["memmgr/recompute_percent"][0] == pytest.approx(recomputed, abs=0.01)
    _trained(None)
    unlimited = Writer()
    log_stats(unlimited, 8, prefix="mm_")
    assert set(unlimited.written) == {f"mm_{name}" for name in _names(stats)} - {"mm_budget_bytes"}
    monkeypatch.setattr(budgets, "_last", None)
    none = Writer()
    log_stats(none, 9)
    assert not none.written


def test_shares_are_of_the_time_since_this_writers_last_call() -> None:
    training, first, second = Training(), Log(), Log()
    with training.budget():
        training.step()
        log_stats(first, 0)
        training.step()
        log_stats(first, 1)
        log_stats(first, 2)  # no time has gone by in which anything ran again
        log_stats(second, 2)  # of all the time until now
    assert first.written[1]["memmgr/recompute_percent"] > 0
    assert first.written[2]["memmgr/recompute_percent"] == 0
    assert second.written[2]["memmgr/recompute_percent"] > 0
    with training.budget():  # another budget: nothing of the one before counts
        log_stats(first, 3)
    assert all(0 <= first.written[3][f"memmgr/{name}"] <= 100 for name in SHARES)


class Log:
    """As a run of W&B, or an `Accelerator`; without a hash, as some people's own."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.written: dict[int, dict[str, float]] = {}

    def __eq__(self, other: object) -> bool:
        return self is other

    def log(self, data: dict[str, float], step: int) -> None:
        self.written[step] = data


def test_places_in_the_program_are_no_figures() -> None:
    log = Log()
    with memmgr.budget(None, quiet=True) as mm:
        seen = torch.randn(4096) * 2
        seen.numpy()
        assert any(name.startswith("escapes.") for name in mm.stats())
        log_stats(log, 0)
    assert not [name for name in log.written[0] if "escapes." in name] and log.written[0]["memmgr/escapes"] == 1


@pytest.mark.parametrize("nothing", [None, object(), "wandb"])
def test_what_takes_no_numbers_is_said(nothing: Any) -> None:
    with pytest.raises(TypeError, match=r"takes no numbers.*after wandb\.init"):
        log_stats(nothing, 0)


# ---- the packages themselves ---------------------------------------------------------------------------------------------


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed (the extra `tensorboard`)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    stats = _trained()
    with SummaryWriter(str(tmp_path)) as writer:
        log_stats(writer, 3)
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    read = {tag: found.Scalars(tag)[0] for tag in found.Tags()["scalars"]}
    assert set(read) == {f"memmgr/{name}" for name in _names(stats)}
    assert read["memmgr/evictions"].value == stats["evictions"] and read["memmgr/evictions"].step == 3


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    wandb = pytest.importorskip("wandb", reason="the package wandb is not installed")
    stats = _trained()
    settings = wandb.Settings(console="off", disable_git=True, silent=True)
    try:
        with wandb.init(mode="offline", dir=tmp_path, project="memmgr", settings=settings) as run:
            log_stats(wandb, 3)
            log_stats(wandb.run, 4)  # the figures of a step are kept when the next one begins
            written = dict(run.summary)
    finally:
        wandb.teardown()
    assert {f"memmgr/{name}" for name in _names(stats)} <= set(written)
    assert written["memmgr/evictions"] == stats["evictions"]


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the store that needs no database
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = pytest.importorskip("mlflow", reason="the package mlflow is not installed")
    stats = _trained()
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(tmp_path.as_uri())
    try:
        mlflow.set_experiment("memmgr")
        with mlflow.start_run() as run:
            log_stats(mlflow, 3)
        read = mlflow.get_run(run.info.run_id).data.metrics
    finally:
        mlflow.set_tracking_uri(before)
    assert set(read) == {f"memmgr/{name}" for name in _names(stats)}
    assert read["memmgr/evictions"] == stats["evictions"]


def _panels(writer: Any) -> None:
    """Two samples in a budget, and one after it."""
    training = Training()
    with training.budget():
        for step in (1, 2):
            training.step()
            log_panels(writer, step)
    log_panels(writer, 3)


def test_panels_of_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed (the extra `tensorboard`)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        _panels(writer)
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    layout = Layout()
    layout.ParseFromString(found.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    (category,) = layout.category
    charts = {chart.title: list(chart.multiline.tag) for chart in category.chart}
    assert category.title == "memmgr" and charts == {"memory": ["memmgr/memory/.*"], "slowness": ["memmgr/slowness/.*"]}
    scalars = found.Tags()["scalars"]
    assert {"memmgr/memory/resident_gb", "memmgr/memory/budget_gb", "memmgr/slowness/recompute_percent"} <= set(scalars)
    assert [event.step for event in found.Scalars("memmgr/memory/budget_gb")] == [1, 2, 3]
    holders = [event.tensor_proto.string_val[0].decode() for event in found.Tensors("memmgr/holders/text_summary")]
    assert len(holders) == 2 and "| parameter | 0.0.weight |" in holders[0], "none of a budget that is closed"


def test_panels_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    wandb = pytest.importorskip("wandb", reason="the package wandb is not installed")
    settings = wandb.Settings(console="off", disable_git=True, silent=True)
    try:
        with wandb.init(mode="offline", dir=tmp_path, project="memmgr", settings=settings) as run:
            _panels(wandb)
            written = dict(run.summary)
        tables = [path.read_text() for path in tmp_path.rglob("*.table.json")]
    finally:
        wandb.teardown()
    assert any("memory" in name for name in written), written
    assert any('"budget_gb"' in text for text in tables) and any('"0.0.weight"' in text for text in tables)


def test_panels_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = pytest.importorskip("mlflow", reason="the package mlflow is not installed")
    pytest.importorskip("matplotlib", reason="the package matplotlib is not installed")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(tmp_path.as_uri())
    try:
        mlflow.set_experiment("memmgr")
        with mlflow.start_run():
            _panels(mlflow)
    finally:
        mlflow.set_tracking_uri(before)
    found = {path.name: path for path in tmp_path.rglob("artifacts/memmgr/*")}
    assert set(found) == {"memory.png", "slowness.png", "why.txt", "holders.md"}
    assert found["memory.png"].stat().st_size > 5000 and "where the time went" in found["why.txt"].read_text()
    assert "0.0.weight" in found["holders.md"].read_text()


def test_a_logger_without_panels_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"has no panels.*log_stats writes numbers"):
        log_panels(Log(), 0)


def test_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="the package accelerate is not installed")
    from accelerate.tracking import GeneralTracker

    class Tracker(GeneralTracker):  # type: ignore[misc, valid-type]
        name = "notes"
        requires_logging_directory = False
        tracker = None

        def __init__(self) -> None:
            super().__init__()
            self.notes = Log()

        def store_init_configuration(self, values: dict[str, Any]) -> None: ...

        def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
            assert step is not None
            self.notes.log(values, step)

    tracker = Tracker()
    accelerator = accelerate.Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("memmgr")
    stats = _trained()
    log_stats(accelerator, 3)
    assert set(tracker.notes.written[3]) == {f"memmgr/{name}" for name in _names(stats)}


def test_a_logger_of_lightning(tmp_path: Path) -> None:
    loggers = pytest.importorskip("lightning.pytorch.loggers", reason="the package lightning is not installed")
    logger = loggers.CSVLogger(tmp_path)
    stats = _trained()
    log_stats(logger, 3)
    (row,) = logger.experiment.metrics
    assert set(row) == {"step"} | {f"memmgr/{name}" for name in _names(stats)} and row["step"] == 3
