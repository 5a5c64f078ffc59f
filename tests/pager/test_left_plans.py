"""Passes that leave a plan: the op at which they do, its module and its difference, in words."""

import functools
import gc
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from budget import models
from torch import nn

import memmgr
from memmgr.api import budget as budgets

from .planned import bits, need, settled, sizes, trained

__all__ = ["sizes"]  # a fixture

pytestmark = pytest.mark.usefixtures("sizes")

STEPS, PLANNED = 12, 5


class Layers(nn.Module):
    """Ten layers; before the sixth some steps do something else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(10))
        self.extra = nn.Sigmoid()

    def forward(self, x: torch.Tensor, change: str, times: int) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            for _ in range(times * (i == 5 and change == "op")):
                x = self.extra(x)
            if i == 5 and change == "size":
                x = torch.cat([x, x[:times]])
            x = torch.tanh(layer(x))
        return x.square().mean()


class Changing(models.Training):
    """Every second step from the sixth on differs, each in its own way, from one op on."""

    def __init__(self, change: str = "op") -> None:
        model, x, self.step_number = Layers(), torch.randn(1024, 128), 0

        def loss() -> torch.Tensor:
            self.step_number += 1
            differs = self.step_number > PLANNED and self.step_number % 2 == 0
            rows = x[: 512 - self.step_number] if change == "batch" and differs else x
            return model(rows.clone(), change if differs else "", self.step_number)

        super().__init__(model, loss)


CHANGES = {
    "op": r"`aten::sigmoid` in `Layers\.extra`: in the place of `aten::addmm`",
    "size": r"`aten::cat` in `Layers`: in the place of `aten::addmm`",
    "batch": r"`aten::clone`: a new size, 25\d kB for 524 kB",
}


def trained_under(
    change: str, steps: int = STEPS, named: bool = False, **options: Any
) -> tuple[Any, dict[str, Any], list[str]]:
    """The bits, the figures and the lines about plans that were left. No hook stays. `named`: modules are named at the end."""
    make = functools.partial(Changing, change)
    limit = int(need(Changing) * 0.65)
    gc.collect()  # a second model would be in the names of the modules
    torch.manual_seed(0)
    with memmgr.budget(limit, policy="offload", **options) as mm:  # which plans in a fifth of auto's time
        training, losses = make(), []
        for _ in range(steps):
            losses.append(training.step())
            settled()
        runtime: Any = budgets.current()
        stats = mm.stats()
        lines = runtime.plans.left.lines(stats["left_passes"], stats["passes"])
        learning = bool(nn.modules.module._global_forward_hooks)
    assert not nn.modules.module._global_forward_hooks
    assert learning == (named and stats["left_passes"] == 1)
    return (losses, bits(training)), stats, lines


@pytest.mark.parametrize("change", CHANGES)
def test_the_op_that_differs_is_named_with_its_module(change: str) -> None:
    got, stats, lines = trained_under(change, quiet=True)
    assert got == trained(functools.partial(Changing, change), STEPS)
    assert stats["left_passes"] >= 3 and stats["planned_passes"] > 0
    assert re.fullmatch(
        rf"{stats['left_passes']} of 12 passes left a plan, \d+ of them at op \d+ of \d+, {CHANGES[change]}", lines[0]
    )


def test_the_summary_and_the_log_say_why_passes_leave_a_plan(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trained_under("op", log=tmp_path / "run.jsonl")
    assert "passes left a plan" in capfd.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    told = [line["text"] for line in lines if line.get("what") == "left_plan"]
    assert any("`aten::sigmoid`" in text for text in told)
    assert len(told) == len(set(told))


def test_a_budget_that_closes_while_modules_are_named_leaves_no_hook() -> None:
    """One pass has left a plan. On a busy machine a plan may be followed a step later than on an idle one."""
    steps = 2 * (PLANNED + 1, PLANNED + 2, PLANNED + 3)
    assert any(trained_under("op", number, named=True, quiet=True)[1]["left_passes"] == 1 for number in steps)


def test_modules_are_not_named_in_a_process_that_has_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch._dynamo.utils.counters, "frames", Counter(total=1))
    trained_under("op", PLANNED + 1, quiet=True)


def test_passes_that_follow_their_plan_are_not_mentioned() -> None:
    _, stats, lines = trained_under("")
    assert stats["left_passes"] <= 1 and lines == []
