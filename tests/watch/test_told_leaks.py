"""Leaks while a run goes on and in its summary: when they are told, and the variable that keeps them."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.machinery import SourceFileLoader

import pytest
import torch
from torch import nn

import memmgr
from memmgr.integrations._callback_budget import CallbackBudget
from memmgr.observe import keepers
from memmgr.observe.leaks import TOLD_PASSES
from memmgr.observe.source_lines import show
from memmgr.runtime.session import PagerRuntime

STEP = 256 * 64 * 4
"""The bytes that a step of `train` leaks."""


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    return model, torch.optim.AdamW(model.parameters())


def train(steps: int, keep: Callable[[list[torch.Tensor], torch.Tensor], None], after: Callable[[], None]) -> None:
    """Keeps results in a local variable, which is freed when it returns."""
    model, optimizer = _model()
    kept: list[torch.Tensor] = []
    for _ in range(steps):
        y = model(torch.randn(256, 64))
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        keep(kept, y)
        after()


@pytest.fixture
def every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaks are looked for after each pass, however long a look takes."""
    init = PagerRuntime.__init__

    def made(runtime: PagerRuntime, config: object) -> None:
        init(runtime, config)  # type: ignore[arg-type]
        runtime._look_for_leaks = lambda: (runtime._leaks.look(), True)[1]  # type: ignore[assignment]

    monkeypatch.setattr(PagerRuntime, "__init__", made)


@pytest.mark.usefixtures("every_pass")
@pytest.mark.parametrize("limit", ["6MB", "12GB", None])
def test_a_leak_is_told_within_ten_steps_whatever_the_budget(
    limit: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []
    with memmgr.budget(limit, device="cpu"):
        train(12, lambda kept, y: kept.append(y), lambda: told.append(capsys.readouterr().err))
    steps = [step for step, text in enumerate(told, 1) if text]
    assert len(steps) == 1 and steps[0] <= 10, told
    assert re.match(
        r"memmgr: a leak: \+65\.5 kB a step since step 1, made at .*, kept in the list `kept` of train\(\); ",
        told[steps[0] - 1],
    )


@pytest.mark.usefixtures("every_pass")
@pytest.mark.parametrize("steps", [7, 12])  # before a line is printed while it runs, and after
def test_the_summary_names_the_variable_of_a_function_that_has_returned(
    steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with memmgr.budget("12GB", device="cpu"):
        train(steps, lambda kept, y: kept.append(y), lambda: None)
        capsys.readouterr()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "a leak: " in line]
    assert ", kept in the list `kept` of train(); " in line


@pytest.mark.usefixtures("every_pass")
@pytest.mark.parametrize("limit", ["12GB", None])
@pytest.mark.parametrize("length", [1, 4, 7])
def test_a_history_that_stops_early_is_not_told(
    length: int, limit: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    def keep(kept: list[torch.Tensor], y: torch.Tensor) -> None:
        kept.append(y)
        del kept[:-length]

    with memmgr.budget(limit, device="cpu"):
        train(30, keep, lambda: None)
    assert "a leak" not in capsys.readouterr().err


@pytest.mark.usefixtures("every_pass")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("limit", ["12MB", None])
def test_the_history_of_an_optimizer_is_no_leak(
    limit: str | None, late: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """LBFGS keeps the directions of its last steps; `late`: it is made when the budget is open."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(256, 256), torch.randn(64, 256), torch.randn(64, 256)
    made: list[torch.optim.Optimizer] = []

    def optimizer() -> torch.optim.Optimizer:
        made.append(torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=50))
        return made[0]

    def loss() -> torch.Tensor:
        model.zero_grad()
        value = (model(x).tanh() - y).square().mean()
        value.backward()
        return value

    if not late:
        optimizer()
    with memmgr.budget(limit, device="cpu"):
        step = (made[0] if made else optimizer()).step
        for _ in range(20):
            step(loss)
    assert len(made[0].state[model.weight]["old_dirs"]) > TOLD_PASSES
    assert "a leak" not in capsys.readouterr().err


@pytest.mark.usefixtures("every_pass")
def test_a_test_can_fail_on_a_leak() -> None:
    with memmgr.budget(None, device="cpu", quiet=True) as mm:
        assert mm.leaks == []
        train(9, lambda kept, y: None, lambda: None)
        assert mm.leaks == []
        train(9, lambda kept, y: kept.append(y), lambda: None)
    (leak,) = mm.leaks
    assert leak["bytes_per_step"] == STEP and leak["kept"] == "in the list `kept` of train()"
    assert leak["file"] == show(__file__)
    assert memmgr.budget(None).leaks == []


@pytest.mark.usefixtures("every_pass")
def test_a_measuring_run_that_leaks_is_told_to_end_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A budget of its need so far would be too small a few steps later."""
    callback = CallbackBudget(None, {"device": "cpu"})
    callback.open()
    train(9, lambda kept, y: kept.append(y), lambda: None)
    callback.close()
    said = capsys.readouterr().err
    assert "what would help most: an end of the leak" in said
    assert "with a budget of" not in said


def test_a_script_that_has_ended_still_has_its_file() -> None:
    """Python takes `__file__` from `__main__` before the functions of `atexit` run."""
    loader = SourceFileLoader("__main__", __file__)
    assert keepers._place({"__name__": "__main__", "__loader__": loader}) == show(__file__)
    assert keepers._place({"__name__": "__main__"}) == "__main__"
