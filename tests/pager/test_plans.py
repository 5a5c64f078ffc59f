"""Measured periods, their plans, and the pager following them: the same bits, the budget, and what a plan is for."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from budget import models
from torch import nn

import memmgr
from memmgr import _budget

pytestmark = pytest.mark.filterwarnings("error:memmgr")

STEPS = 7


@pytest.fixture(autouse=True)
def _sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMMGR_PAGER_SMALL", "16384")


def bits(training: models.Training) -> list[bytes]:
    state = [p.detach().numpy().tobytes() for p in training.model.parameters()]
    for values in training.optimizer.state.values():
        state += [v.numpy().tobytes() for v in values.values() if isinstance(v, torch.Tensor)]
    return state


def settled() -> None:
    """The plan that is being made is there."""
    runtime: Any = _budget.current()
    runtime.plans.close()


def trained(make: Callable[[], models.Training], steps: int, each: Callable[[int], None] = lambda _: None) -> Any:
    torch.manual_seed(0)
    training = make()
    losses = []
    for i in range(steps):
        losses.append(training.step())
        each(i)
    return losses, bits(training)


def need(make: Callable[[], models.Training]) -> int:
    torch.manual_seed(0)
    training = make()
    with memmgr.budget(None, quiet=True) as mm:
        for _ in range(2):
            training.step()
    return int(mm.stats()["unmanaged_peak_bytes"])


def under(
    make: Callable[[], models.Training], share: float, policy: str = "auto", steps: int = STEPS, **options: Any
) -> tuple[Any, list[dict[str, Any]], int]:
    """Results, the figures after every step, the limit."""
    limit = int(need(make) * share)
    figures: list[dict[str, Any]] = []
    gc.collect()
    with memmgr.budget(limit, quiet=True, policy=policy, **options) as mm:

        def each(_: int) -> None:
            settled()
            figures.append(mm.stats())

        got = trained(make, steps, each)
    figures.append(mm.stats())
    return got, figures, limit


@pytest.mark.parametrize("policy", ["auto", "evict", "offload"])
@pytest.mark.parametrize("model", ["gpt", "unet", "lstm", "densenet"])
def test_a_plan_is_followed_with_the_same_bits(model: str, policy: str) -> None:
    make = models.MODELS[model]
    share = 0.7 if policy == "offload" else 0.55
    got, figures, limit = under(make, share, policy)
    assert got == trained(make, STEPS)
    last = figures[-1]
    assert last["plans"] >= 1 and last["planned_passes"] >= 2
    assert last["resident_bytes.peak"] <= limit
    if policy == "evict":
        assert last["offloads"] == 0
    if policy == "offload":
        assert last["recomputes"] == 0


def test_a_plan_makes_less_again_than_malloc_does_for_itself() -> None:
    """An LSTM's chains are what malloc's own order is bad at."""
    _, planned, _ = under(models.MODELS["lstm"], 0.5, "evict")
    _, alone, _ = under(models.MODELS["lstm"], 0.5, "evict", _plan=False)

    def of_the_last_step(figures: list[dict[str, Any]]) -> int:
        return int(figures[STEPS - 1]["recomputes"] - figures[STEPS - 2]["recomputes"])

    assert of_the_last_step(planned) < of_the_last_step(alone)
    assert alone[-1]["plans"] == 0


def test_a_fork_while_copies_are_under_way() -> None:
    """Nobody waits for the tier in a way that the fork has closed, and the child reads what it inherits."""
    make = models.MODELS["gpt"]
    children = []

    def fork(_: int) -> None:
        settled()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        children.append(pid)

    limit = int(need(make) * 0.6)
    torch.manual_seed(0)
    training = make()
    with memmgr.budget(limit, quiet=True, policy="offload", _throttle=60_000_000) as mm:
        handle = training.model.register_forward_hook(lambda *_: fork(0))
        for _ in range(5):
            training.step()
            fork(0)
        handle.remove()
    assert mm.stats()["write_backs"] > 0
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 10


def test_what_was_written_ahead_and_read_ahead() -> None:
    _, figures, _ = under(models.MODELS["gpt"], 0.7, "offload")
    last = figures[-1]
    assert last["reads_ahead"] > 0 and last["clean_drops"] > 0


class Alternating(models.Training):
    """Every other step has another length, so its period is another sequence."""

    def __init__(self) -> None:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(10)])
        self.turn = 0
        data = [torch.randn(1024, 128), torch.randn(1280, 128)]

        def loss() -> torch.Tensor:
            self.turn += 1
            return model(data[self.turn % 2]).square().mean()

        super().__init__(model, loss)


def test_two_sequences_have_a_plan_each() -> None:
    got, figures, _ = under(Alternating, 0.7, steps=11)
    assert got == trained(Alternating, 11)
    assert figures[-1]["plans"] >= 2 and figures[-1]["planned_passes"] >= 2


class Deviating(models.Training):
    """In some steps, in the middle of forward, something else happens."""

    def __init__(self) -> None:
        layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(10))
        x, self.step_number = torch.randn(1024, 128), 0

        def loss() -> torch.Tensor:
            self.step_number += 1
            h = x
            for i, layer in enumerate(layers):
                h = torch.tanh(layer(h))
                if i == 5 and self.step_number in (4, 6):
                    h = h * torch.sigmoid(h) + h.detach().clone()
            return h.square().mean()

        super().__init__(layers, loss)


@pytest.mark.parametrize("policy", ["auto", "evict"])
def test_a_period_that_deviates_is_finished_without_the_plan(policy: str) -> None:
    got, figures, limit = under(Deviating, 0.65, policy)
    assert got == trained(Deviating, STEPS)
    assert figures[3]["planned_passes"] == figures[2]["planned_passes"]
    assert figures[4]["planned_passes"] == figures[3]["planned_passes"] + 1
    assert figures[-1]["resident_bytes.peak"] <= limit


def test_a_plan_that_cannot_be_made_costs_nothing_but_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    from memmgr.runtime import planners

    def refuses(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(planners, "plan", refuses)
    got, figures, _ = under(models.MODELS["unet"], 0.6)
    assert got == trained(models.MODELS["unet"], STEPS)
    assert figures[-1]["plans"] == 0
