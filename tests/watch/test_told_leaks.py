"""Leaks while a run goes on and in its summary: when they are told, and the variable that keeps them."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from typing import Any

import pytest
import torch
from torch import nn

import memmgr
from memmgr.integrations._callback_budget import CallbackBudget
from memmgr.observe import keepers, slowness
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
@pytest.mark.parametrize("item", [lambda y: y.detach(), lambda y: (0, {"y": y.detach()})], ids=["tensor", "record"])
def test_a_deque_with_a_length_is_no_leak(
    item: Callable[[torch.Tensor], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A buffer for replay. A list that has the same tensors is one."""
    model, optimizer = _model()

    def steps(count: int, *kept: Any) -> str:
        for _ in range(count):
            y = model(torch.randn(256, 64))
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            record = item(y)
            for one in kept:
                one.append(record)
        return capsys.readouterr().err

    buffer: deque[Any] = deque(maxlen=100)
    everything: deque[Any] = deque()
    with memmgr.budget("12GB", device="cpu") as mm:
        assert "a leak" not in steps(20, buffer) and mm.leaks == []
    assert "a leak" not in capsys.readouterr().err
    with memmgr.budget("12GB", device="cpu"):
        said = steps(20, buffer, everything)
    assert "a leak" in said and "buffer" not in said


@pytest.mark.usefixtures("every_pass")
def test_gradients_that_a_hook_keeps_are_told_with_the_line_of_the_backward(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = _model()
    gradients: list[torch.Tensor] = []
    with memmgr.budget("12GB", device="cpu"):
        for _ in range(12):
            hidden = model[0](torch.randn(256, 64))
            hidden.register_hook(lambda gradient: gradients.append(gradient))
            model[1:](hidden).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    said = capsys.readouterr().err
    assert re.search(r"made in the backward of \S*test_told_leaks\.py:\d+ \(", said), said
    assert "Keep numbers, as grad.norm().item()" in said


@pytest.mark.parametrize(
    ("words", "end"),
    [
        ("kept in the list `losses` of train.py", "as loss.item()"),
        ("kept in the dict `cache` of train.py", "Remove entries"),
        ("one tensor grows, ", "Keep only the part"),
        ("made in the backward of train.py:3 (mm)", "as grad.norm().item()"),
        (f"kept by {slowness.CYCLE} of `Node`, which gc.collect() frees", ""),
    ],
)
def test_the_end_of_a_leak_fits_its_keeper(words: str, end: str) -> None:
    said = slowness.end_of_leak([f"a leak: {words}"]).removeprefix(slowness.HELPS + slowness.LEAKED)
    assert end in said and bool(said) is bool(end)


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


def grow(steps: int, reset: int, after: Callable[[], None] = lambda: None) -> None:
    """Each step makes a larger tensor from that of the last one."""
    model, optimizer = _model()
    history = torch.empty(0, 64)
    for step in range(steps):
        if step % reset == 0:
            history = torch.empty(0, 64)
        y = model(torch.randn(256, 64))
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        history = torch.cat([history, y.detach()])
        after()


@pytest.mark.usefixtures("every_pass")
@pytest.mark.parametrize("limit", ["6MB", None])
def test_a_tensor_that_grows_by_cat_is_told_as_a_leak_within_twelve_steps(
    limit: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []
    found: list[dict[str, Any]] = []

    def look() -> None:
        told.append(capsys.readouterr().err)
        found[:] = mm.leaks

    with memmgr.budget(limit, device="cpu") as mm:
        grow(14, 100, look)
    (leak,) = found
    steps = [step for step, text in enumerate(told, 1) if text]
    assert len(steps) == 1 and steps[0] <= 12, told
    assert re.match(
        r"memmgr: a leak: one tensor grows, \+65\.5 kB a step since step [12], made at .*\(cat\), kept in `history` of grow\(\); ",
        told[steps[0] - 1],
    )
    assert leak["bytes_per_step"] == STEP and leak["ops"] == ["aten::cat"]


@pytest.mark.usefixtures("every_pass")
@pytest.mark.parametrize("reset", [1, 5, 8])
def test_a_cache_that_is_reset_is_no_leak(reset: int, capsys: pytest.CaptureFixture[str]) -> None:
    found: list[list[dict[str, Any]]] = []
    with memmgr.budget(None, device="cpu") as mm:
        grow(31, reset, lambda: found.append(mm.leaks))
    assert not any(found[reset + 1 :])  # the first sequence may be one
    assert "a leak" not in capsys.readouterr().err


@pytest.mark.usefixtures("every_pass")
def test_a_batch_that_grows_is_no_leak(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = _model()
    with memmgr.budget(None, device="cpu") as mm:
        for step in range(1, 21):
            batch = torch.cat([torch.randn(256, 64) for _ in range(step)])
            y = torch.cat([model(part) for part in batch.split(256)])
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not mm.leaks
    assert "a leak" not in capsys.readouterr().err


@pytest.mark.usefixtures("every_pass")
def test_outputs_of_a_validation_are_no_leak(capsys: pytest.CaptureFixture[str]) -> None:
    """They are kept until the validation ends, and put together there."""
    model, _ = _model()
    with memmgr.budget(None, device="cpu") as mm:
        for epoch in range(12):
            model(torch.randn(256, 64)).square().mean().backward()
            whole = torch.empty(0, 64)
            with torch.no_grad():
                for _ in range(8 + epoch):
                    whole = torch.cat([whole, model(torch.randn(256, 64))])
        assert not mm.leaks
    assert "a leak" not in capsys.readouterr().err


def test_parameters_of_a_model_that_does_not_fit_are_no_kept_results() -> None:
    """They are made in the budget, by one line."""
    with pytest.raises(memmgr.BudgetError) as caught, memmgr.budget("4MB", device="cpu", disk=False, quiet=True):
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(12)])
        model(torch.randn(2048, 256))
    assert "are kept" not in str(caught.value) and "parameters" in str(caught.value)


@pytest.mark.usefixtures("every_pass")
def test_an_error_beside_a_leak_names_its_line_and_no_budget_for_the_rest() -> None:
    with pytest.raises(memmgr.BudgetError) as caught, memmgr.budget("3MB", device="cpu", disk=False, quiet=True):
        grow(60, 100)
    text = str(caught.value)
    assert re.search(
        r"^A leak: one tensor grows, \+65\.5 kB a step .*\(cat\).*More budget only delays this error\.$", text, re.M
    )
    assert "should do for this step; later ones need more." in text


@pytest.mark.parametrize("graph", [True, False])
def test_an_inference_that_keeps_its_results_is_told_how_to_keep_less(graph: bool) -> None:
    model, _ = _model()
    kept: list[torch.Tensor] = []
    limit = memmgr.budget("12MB", device="cpu", disk=False, quiet=True, policy="offload")
    with pytest.raises(memmgr.BudgetError) as caught, limit, torch.set_grad_enabled(graph):
        for _ in range(300):
            kept.append(model(torch.randn(256, 64)))
    line = next(line for line in str(caught.value).splitlines() if " results of " in line)
    count = int(line.split()[0])
    assert abs(count - len(kept)) <= 1 and f"{show(__file__)}:" in line and "(addmm)" in line, line
    assert ("torch.no_grad() or .detach()" in line) == graph
    assert ("write each to a file" in line) != graph


def test_a_validation_that_keeps_its_results_is_told_so_after_passes_of_training() -> None:
    model, _ = _model()
    kept: list[torch.Tensor] = []
    with pytest.raises(memmgr.BudgetError) as caught, memmgr.budget("5MB", device="cpu", disk=False, quiet=True):
        for _ in range(6):
            model(torch.randn(256, 64)).square().mean().backward()
        with torch.no_grad():
            for _ in range(300):
                kept.append(model(torch.randn(256, 64)))
    assert re.search(r"^\d+ results of .*addmm\)? are kept: .* write each to a file", str(caught.value), re.M)


def test_the_summary_of_an_inference_that_keeps_graphs_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = _model()
    with memmgr.budget("3MB", device="cpu"):
        kept = [model(torch.randn(256, 64)) for _ in range(30)]
    told = capsys.readouterr().err
    assert f"{len(kept)} results of " in told and "Where no backward follows use torch.no_grad() or .detach()." in told


def test_the_first_forward_of_a_deep_model_keeps_no_results_of_its_own() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(30)))
    budget = memmgr.budget("12MB", device="cpu", disk=False, quiet=True, policy="offload")
    with pytest.raises(memmgr.BudgetError) as caught, budget:
        model(torch.randn(256, 256)).sum().backward()
    assert "saved for backward" in str(caught.value) or "other tensors" in str(caught.value)
    assert " results of " not in str(caught.value)


def test_a_cache_that_grows_in_an_inference_is_named_in_the_error() -> None:
    cache = torch.empty(0, 64)
    budget = memmgr.budget("3MB", device="cpu", disk=False, quiet=True)
    with pytest.raises(memmgr.BudgetError) as caught, torch.no_grad(), budget:
        for _ in range(60):
            cache = torch.cat([cache, torch.randn(256, 64)])
    assert re.search(
        rf"^One tensor grows with each call of {re.escape(show(__file__))}:\d+ \(cat\), by ", str(caught.value), re.M
    )


def test_a_script_that_has_ended_still_has_its_file() -> None:
    """Python takes `__file__` from `__main__` before the functions of `atexit` run."""
    loader = SourceFileLoader("__main__", __file__)
    assert keepers._place({"__name__": "__main__", "__loader__": loader}) == show(__file__)
    assert keepers._place({"__name__": "__main__"}) == "__main__"
