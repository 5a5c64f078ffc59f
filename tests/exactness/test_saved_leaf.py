"""A custom Function gets from `ctx.saved_tensors` the leaf that it saved, not a tensor with the same bytes."""

import gc
from typing import Any

import pytest
import torch
from torch import nn

import memmgr

from .harness import HUGE_BYTES

WIDTH = 64
POLICIES = ("auto", "torture", "evict")


class Fused(torch.autograd.Function):
    """As Megatron's linear layer: the gradient is accumulated into an attribute of the weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w, None, frozen)
        return (x @ w) * frozen.scale

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, w, nothing, frozen = ctx.saved_tensors
        assert nothing is None and isinstance(w, nn.Parameter) and not frozen.requires_grad
        g = g * frozen.scale
        w.main_grad += x.t() @ g
        w.grad = torch.ones_like(w)
        assert w.grad_fn is None and w.is_leaf
        w.seen = frozen.seen = True
        return g @ w.t(), None, None


def _train(w: nn.Parameter, steps: int = 3) -> torch.Tensor:
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    frozen.scale = 2.0
    w.main_grad = torch.zeros_like(w)
    for _ in range(steps):
        h = torch.randn(WIDTH, WIDTH).tanh().requires_grad_()
        h = Fused.apply(h.exp(), w, frozen)
        Fused.apply(h.sin() * h, w, frozen).sum().backward()
    assert w.seen and frozen.seen
    return w.main_grad


def _weight() -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)


@pytest.mark.parametrize("policy", POLICIES)
def test_attributes_of_a_leaf_are_written_in_backward(policy: str) -> None:
    want, w = _train(_weight()), _weight()
    with memmgr.budget(HUGE_BYTES, policy=policy, quiet=True):
        got = _train(w)
    assert torch.equal(got, want)
    assert w.grad is not None and bool((w.grad == 1).all())


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(*kept)
        ctx.given = [id(t) for t in kept]
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        found = ctx.saved_tensors
        assert [id(t) for t in found] == ctx.given
        return g * 2, None


@pytest.mark.parametrize("policy", POLICIES)
def test_every_kind_of_leaf(policy: str) -> None:
    """Parameters, inputs, buffers, and one that the function was not given."""
    w, x = _weight(), torch.randn(WIDTH, requires_grad=True)
    kept = [w, x, torch.ones(3), nn.Parameter(torch.ones(2), requires_grad=False), torch.arange(4)]
    with memmgr.budget(HUGE_BYTES, policy=policy, quiet=True):
        loss = Identity.apply(x, kept).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


def test_a_leaf_that_was_written_is_still_an_error() -> None:
    w, x = _weight(), torch.randn(WIDTH, requires_grad=True)
    with memmgr.budget(HUGE_BYTES, quiet=True):
        loss = Identity.apply(x, [w]).sum()
        with torch.no_grad():
            w.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_the_handle_keeps_no_leaf_alive() -> None:
    """It may be evicted once the program has dropped it."""
    x = torch.randn(WIDTH * WIDTH, requires_grad=True)
    with memmgr.budget(HUGE_BYTES, policy="torture", quiet=True) as mm:
        loss = (torch.full((WIDTH * WIDTH,), 3.0) * x).exp().sum()
        gc.collect()
        loss.backward()
        assert mm.stats()["evictions"] + mm.stats()["offloads"] > 0


def test_the_attribute_is_torchs_again() -> None:
    before = torch.autograd.function.BackwardCFunction.saved_tensors
    with memmgr.budget(HUGE_BYTES, quiet=True):
        pass
    assert torch.autograd.function.BackwardCFunction.saved_tensors is before
    assert "saved_tensors" not in vars(torch.autograd.function.BackwardCFunction)
