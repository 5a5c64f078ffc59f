"""Trainings under plans: the same one with and without a budget, and the pager's counters."""

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from budget import models

import memmgr
from memmgr.api import budget as budgets
from memmgr.native import binding

STEPS = 7


TICKS = 3000  # about a microsecond for each look at the clock


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small tensors count, and the time of an op depends on the op alone, not on other work of the machine."""
    monkeypatch.setenv("MEMMGR_PAGER_SMALL", "16384")
    native = binding.load()
    native.count_ticks(TICKS)
    yield
    native.count_ticks(0)


def bits(training: models.Training) -> list[bytes]:
    state = [p.detach().numpy().tobytes() for p in training.model.parameters()]
    for values in training.optimizer.state.values():
        state += [v.numpy().tobytes() for v in values.values() if isinstance(v, torch.Tensor)]
    return state


def settled() -> None:
    """The plan that is being made is there."""
    runtime: Any = budgets.current()
    runtime.plans.wait()


def trained(make: Callable[[], models.Training], steps: int, each: Callable[[int], None] = lambda _: None) -> Any:
    training, losses = run(make, steps, each)
    return losses, bits(training)


def run(make: Callable[[], models.Training], steps: int, each: Callable[[int], None] = lambda _: None) -> Any:
    torch.manual_seed(0)
    training = make()
    losses = []
    for i in range(steps):
        losses.append(training.step())
        each(i)
    return training, losses


@functools.cache
def plain(make: Callable[[], models.Training]) -> Any:
    """The state after training without a budget."""
    return trained(make, STEPS)


@functools.cache
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

        training, losses = run(make, steps, each)
    figures.append(mm.stats())  # bits are read afterwards: numpy keeps tensors that it reads in memory
    return (losses, bits(training)), figures, limit
