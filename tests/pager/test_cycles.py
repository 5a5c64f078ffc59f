"""Hostile programs under plans that reach over the end of a period: the same bits, the budget, and plans that are plans."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from budget.there import bytes_already_there
from torch import nn

import memmgr
from memmgr.api import budget as budgets
from memmgr.native import binding

pytestmark = pytest.mark.filterwarnings("error:memmgr")

STEPS = 10
TICKS = 3000  # as in test_plans.py
WIDTH = 128


@pytest.fixture(autouse=True)
def _counted() -> Iterator[None]:
    """The time of an op depends on the op alone, not on other work of the machine."""
    native = binding.load()
    native.count_ticks(TICKS)
    yield
    native.count_ticks(0)


class Loop:
    """Layers, their AdamW and a batch; `between` happens before each step."""

    def __init__(self, between: Callable[[Loop, int], None] = lambda *_: None) -> None:
        self.model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(64, WIDTH)
        self.between = between
        self.others: list[Any] = []

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def step(self, number: int) -> float:
        self.between(self, number)
        self.optimizer.zero_grad()
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def all(self) -> list[torch.Tensor]:
        found: list[torch.Tensor] = [p.detach() for p in self.model.parameters()]
        found += [p.grad for p in self.model.parameters() if p.grad is not None]
        for values in self.optimizer.state.values():
            found += [v for v in values.values() if isinstance(v, torch.Tensor)]
        return found


def bits(tensors: list[torch.Tensor]) -> list[bytes]:
    return [t.clone().numpy().tobytes() for t in tensors]


def settled() -> list[str]:
    """Waits for the plan that is being made; returns the errors of all plans."""
    runtime: Any = budgets.current()
    runtime.plans.wait()
    return [text for text in runtime.plans.errors() if text != "no schedule fits"]


def trained(make: Callable[[], Any], steps: int = STEPS, each: Callable[[Any, int], None] = lambda *_: None) -> Any:
    torch.manual_seed(0)
    loop = make()
    losses = []
    for number in range(steps):
        losses.append(loop.step(number))
        each(loop, number)
    return loop, losses


def need(make: Callable[[], Any]) -> int:
    with memmgr.budget(None, quiet=True) as mm:
        trained(make, 2)
    return int(mm.stats()["unmanaged_peak_bytes"])


def limit_of(make: Callable[[], Any], share: float) -> int:
    """A budget of so much of its need, beyond the bytes left behind by other tests."""
    there = bytes_already_there()
    return int((need(make) - there) * share) + there


def same_bits(make: Callable[[], Any], share: float, policy: str = "offload", **options: Any) -> dict[str, Any]:
    """Trains with and without a budget and compares; the figures."""
    loop, want = trained(make)
    wanted = bits(loop.all())
    del loop
    limit = limit_of(make, share)
    wrong: list[str] = []
    with memmgr.budget(limit, quiet=True, policy=policy, **options) as mm:
        loop, got = trained(make, each=lambda *_: wrong.extend(settled()))
    assert got == want
    assert bits(loop.all()) == wanted
    assert not wrong
    figures = mm.stats()
    assert figures["resident_bytes.peak"] <= limit
    return figures


class Replaced:
    """Without an optimizer: each step makes parameters and momenta of those that are there, and lets these go."""

    def __init__(self) -> None:
        self.x = torch.randn(64, WIDTH)
        self.weights = [torch.randn(WIDTH, WIDTH).mul_(0.05).requires_grad_() for _ in range(10)]
        self.momenta = [torch.zeros(WIDTH, WIDTH) for _ in self.weights]

    def step(self, number: int) -> float:
        h = self.x
        for weight in self.weights:
            h = torch.tanh(h @ weight)
        loss = h.square().mean()
        gradients = torch.autograd.grad(loss, self.weights)
        with torch.no_grad():
            for i, gradient in enumerate(gradients):
                self.momenta[i] = self.momenta[i] * 0.9 + gradient
                self.weights[i] = (self.weights[i] - 0.1 * self.momenta[i]).requires_grad_()
        return loss.item()

    def all(self) -> list[torch.Tensor]:
        return [t.detach() for t in (*self.weights, *self.momenta)]


def test_parameters_that_each_step_makes_anew() -> None:
    assert same_bits(Replaced, 0.5)["offloads"] > 0


def two_buffers(loop: Loop, number: int) -> None:
    """Parameters take turns with a second set of storages."""
    if not loop.others:
        loop.others = [p.detach().clone() for p in loop.parameters()]
    for i, p in enumerate(loop.parameters()):
        p.data, loop.others[i] = loop.others[i], p.data


def other_storages(loop: Loop, number: int) -> None:
    if number in (4, 6, 7):
        for p in loop.parameters()[::2]:
            p.data = p.data.clone()
        weight = loop.parameters()[2]
        weight.grad = None
        torch.utils.swap_tensors(weight, nn.Parameter(weight.detach().clone()))
        state = copy.deepcopy(loop.optimizer.state_dict())
        loop.optimizer.state.clear()
        loop.optimizer.load_state_dict(state)


def interrupted(loop: Loop, number: int) -> None:
    """Backward ends in its middle, which ends the period there."""
    if number in (4, 7):

        def stop(_: torch.Tensor) -> None:
            raise KeyboardInterrupt

        handle = loop.parameters()[8].register_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            loop.model(loop.x).square().mean().backward()
        handle.remove()


@pytest.mark.parametrize("between", [two_buffers, other_storages, interrupted])
def test_storages_that_are_not_what_a_plan_takes_them_for(between: Callable[[Loop, int], None]) -> None:
    figures = same_bits(lambda: Loop(between), 0.5)
    assert figures["plans"] >= 1 and figures["offloads"] > 0


def test_forked_children_read_all_that_a_followed_cycle_has_away() -> None:
    wrong: list[int] = []

    def fork(loop: Loop, _: int) -> None:
        settled()
        child = os.fork()
        if child == 0:
            try:
                here = bits(loop.all())
                os._exit(0 if all(here) and len(here) == len(loop.all()) and sum_of(here) == sums[-1] else 1)
            finally:
                os._exit(2)
        wrong.append(os.waitpid(child, 0)[1])

    def sum_of(all_of_it: list[bytes]) -> int:
        return hash(b"".join(all_of_it))

    sums: list[int] = []
    trained(Loop, each=lambda loop, _: sums.append(sum_of(bits(loop.all()))))
    every, sums = sums, []
    with memmgr.budget(limit_of(Loop, 0.5), quiet=True, policy="offload") as mm:

        def each(loop: Loop, number: int) -> None:
            sums.append(every[number])
            fork(loop, number)

        trained(Loop, each=each)
    assert wrong == [0] * STEPS
    assert mm.stats()["planned_passes"] >= 2 and mm.stats()["reads_ahead"] > 0


@pytest.mark.parametrize("after", [3, 40])
def test_a_write_that_fails_while_a_cycle_is_followed(after: int) -> None:
    """A tensor whose write failed stays, and can be evicted another time."""

    def fail(loop: Loop, number: int) -> None:
        # Again in each step until one is met: the failed write may be one that no op waits for any more.
        if (runtime := budgets.current()) is not None and number >= 3 and not runtime.native.stats()["tier_errors"]:
            runtime.native.tier_inject(write=errno.ENOSPC, after_writes=after)

    figures = same_bits(lambda: Loop(fail), 0.55)
    assert figures["tier_errors"] > 0 and figures["planned_passes"] >= 1
