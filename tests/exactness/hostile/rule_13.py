"""Holes that need a loop of their own: leaving and entering (rule 13), deep chains (rule 10)."""

import gc
from collections.abc import Callable

import torch
from torch import nn

from exactness import cases
from exactness.harness import Record, Scope

from .hole import whole


@whole
def backward_after_leaving(seed: int, scope: Scope) -> Record:
    model, record = cases.MLP(), Record()
    with scope():
        for _ in range(3):
            model(torch.randn(128, 32)).square().mean().backward()
        loss = model(torch.randn(128, 32)).square().mean()
        other = model(torch.randn(64, 32)).abs().mean()
    loss.backward()
    record.losses(loss)
    del loss
    gc.collect()
    (other + model(torch.randn(64, 32)).mean()).backward()
    record.losses(other)
    return record.ended(model)


@whole
def graph_freed_after_leaving(seed: int, scope: Scope) -> Record:
    model, record = cases.MLP(), Record()
    with scope():
        for _ in range(3):
            model(torch.randn(128, 32)).square().mean().backward()
        loss = model(torch.randn(128, 32)).square().mean()
        graph = loss.grad_fn
    del loss
    gc.collect()
    model(torch.randn(128, 32)).square().mean().backward()
    del graph
    gc.collect()
    model(torch.randn(128, 32)).square().mean().backward()
    return record.ended(model)


@whole
def forward_before_entering(seed: int, scope: Scope) -> Record:
    model, record = cases.MLP(), Record()
    loss = model(torch.randn(128, 32)).square().mean()
    half = model(torch.randn(128, 32))
    with scope():
        loss.backward()
        del loss
        for _ in range(4):
            (model(half.detach()).square().mean()).backward()
        model(half).mean().backward()  # a graph of which half was recorded
    del half
    return record.ended(model)


@whole
def sparse_gradients_accumulated(seed: int, scope: Scope) -> Record:
    """Two backwards before a step, and a momentum that is sparse itself."""
    table, model, record = nn.Embedding(400, 32, sparse=True), cases.MLP(), Record()
    opt = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    with scope():
        for _ in range(3):
            for _ in range(3):
                loss = model(table(torch.randint(0, 400, (128,)))).square().mean()
                loss.backward()
                record.losses(loss.detach())
                del loss
            opt.step()
            opt.zero_grad(set_to_none=False)
    return record.ended(table, opt)


@whole
def exception_leaves_the_context(seed: int, scope: Scope) -> Record:
    model, record = cases.MLP(), Record()
    for where in ("forward", "backward"):
        try:
            with scope():
                for step in range(5):
                    h = model(torch.randn(128, 32))
                    if step == 4:
                        if where == "backward":
                            h.register_hook(cases._raise)
                            h.mean().backward()
                        raise ArithmeticError("in forward")
                    h.square().mean().backward()
        except ArithmeticError as e:
            record.put(where, str(e))
        model(torch.randn(128, 32)).square().mean().backward()
        h.square().mean().backward() if where == "forward" else None
    del h
    return record.ended(model)


def passes(scope: Scope, w: nn.Parameter, count: int, loss_of: Callable[[], torch.Tensor]) -> Record:
    """So many forwards and backwards, which add up in the gradient of `w`."""
    record = Record()
    with scope():
        for _ in range(count):
            loss = loss_of()
            loss.backward()
            record.losses(loss.detach())
            del loss
    record.put("grad", w.grad)
    return record


@whole
def rnn_of_3000_steps(seed: int, scope: Scope) -> Record:
    w = nn.Parameter(torch.randn(16, 16) * 0.2)

    def loss() -> torch.Tensor:
        h, x = torch.zeros(8, 16), torch.randn(3000, 8, 16)
        for step in x:
            h = torch.tanh(h @ w + step)
        return h.square().sum()

    record = passes(scope, w, 2, loss)
    record.rng()
    return record


@whole
def chain_of_5000_unsaved_ops(seed: int, scope: Scope) -> Record:
    """One saved tensor at the end of 5,000 ops that save nothing: its recipe is 5,000 deep."""
    w = nn.Parameter(torch.randn(32, 32))

    def loss() -> torch.Tensor:
        h = w + 0.0
        for i in range(5000):
            h = h + 1e-4 if i % 2 else h - 1e-4
        return h.exp().sin().sum()

    return passes(scope, w, 3, loss)


@whole
def chain_of_5000_views_and_writes(seed: int, scope: Scope) -> Record:
    """The same in place: one storage of 2,500 versions."""
    w = nn.Parameter(torch.randn(32, 32))

    def loss() -> torch.Tensor:
        h = w * 1.0
        for i in range(2500):
            h = h.t().add_(1e-4) if i % 3 else h.view(-1).mul_(0.9999).view(32, 32)
        return (h.exp().sin() * h.sigmoid()).sum()

    return passes(scope, w, 3, loss)


@whole
def shared_ancestors_stay_linear(seed: int, scope: Scope) -> Record:
    """Each op uses its ancestor twice: without sharing, one recompute takes 2**60 ops."""
    w = nn.Parameter(torch.randn(32, 32))

    def loss() -> torch.Tensor:
        h = w
        for _ in range(60):
            h = (h * 0.5) + (h * 0.5).clone()
        return (h.exp() * h.tanh()).sum()

    return passes(scope, w, 5, loss)
