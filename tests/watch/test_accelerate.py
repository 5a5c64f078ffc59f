"""accelerate with a tracker and nothing else: the same losses and parameters as without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import memmgr
from memmgr.api import budget as budgets

accelerate = pytest.importorskip("accelerate", reason="the package accelerate is not installed")
FIGURES = {"memmgr/peak_gb", "memmgr/recompute_percent", "memmgr/stall_percent"}


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    yield
    accelerate.state.AcceleratorState._reset_state(True)
    if budgets.current() is not None:  # of a test that failed; the next one shall not
        budgets._current.close(report=False, failed=True)  # type: ignore[union-attr]
        budgets._current = None


def _notes() -> Any:
    class Notes(accelerate.tracking.GeneralTracker):  # type: ignore[misc, name-defined]
        name = "notes"
        requires_logging_directory = False
        tracker = None

        def __init__(self) -> None:
            super().__init__()
            self.lines: list[dict[str, Any]] = []

        def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
            self.lines.append(dict(values))

    return Notes()


def _train(trackers: list[Any]) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True, log_with=trackers or None)
    accelerator.init_trackers("here")
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.GELU(), torch.nn.Linear(512, 128)) for _ in range(3))
    )
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    losses = []
    for step in range(3):
        loss = model(torch.randn(1024, 128, generator=torch.Generator().manual_seed(step))).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        accelerator.log({"loss": losses[-1]}, step)
    accelerator.end_training()
    return losses, [p.detach().clone() for p in model.parameters()]


def test_a_tracker_opens_the_budget_and_the_next_ones_get_its_figures(
    capfd: pytest.CaptureFixture[str], beyond: Callable[[str], int]
) -> None:
    from memmgr.integrations import MemmgrTracker

    plain, first = _train([])
    budget = beyond("16MB")
    before, ours, behind = _notes(), MemmgrTracker(budget, disk=False), _notes()
    managed, second = _train([before, ours, behind])
    assert managed == plain and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert memmgr.stats() == ours.stats() and ours.stats()["evictions"] > 0 and ours.stats()["budget_bytes"] == budget
    assert [set(line) for line in behind.lines] == [{"loss"} | FIGURES] * 3
    assert [set(line) for line in before.lines] == [{"loss"}] * 3
    assert 0 < behind.lines[-1]["memmgr/peak_gb"] <= budget / 1e9 and behind.lines[-1]["memmgr/recompute_percent"] > 0
    assert budgets.current() is None and capfd.readouterr().err.count("memmgr: peak ") == 1


def test_a_training_that_failed_is_closed_by_the_next_and_a_rank_that_is_not_the_main_one_is_silent(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from memmgr.integrations import MemmgrTracker

    ours = MemmgrTracker("1GB")
    ours.start()
    opened = budgets.current()
    assert opened is not None and str(opened.config.device) == "cpu"
    monkeypatch.setattr(type(accelerate.PartialState()), "is_main_process", property(lambda self: False))
    ours.start()
    assert budgets.current() not in (None, opened)
    capfd.readouterr()
    ours.finish()
    assert budgets.current() is None and "everything fitted" not in capfd.readouterr().err


def test_what_is_wrong_with_a_budget_is_said_at_once() -> None:
    from memmgr.integrations import MemmgrTracker

    with pytest.raises(ValueError, match="was 12GB meant"):
        MemmgrTracker("12")
