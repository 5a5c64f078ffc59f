"""Storages that are emptied, resized, swapped (rule 4)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from .hole import hole, some


@hole
def root_emptied_and_refilled_as_fsdp_does(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    """A gathered parameter is freed after its forward and filled again when its gradient is due."""
    first = (w.detach() * 1.5).requires_grad_()
    second = (w.detach() * 0.5 + 0.1).requires_grad_()
    kept = {p: p.detach().clone() for p in (first, second)}

    def empty(p: torch.Tensor) -> None:
        p.untyped_storage().resize_(0)

    def refill(p: torch.Tensor) -> None:
        if p.untyped_storage().size() == 0:
            p.untyped_storage().resize_(kept[p].nbytes)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(p):
                p.copy_(kept[p])

    h = (some() @ first).sigmoid()
    h.register_hook(lambda g: refill(first))
    empty(first)
    h = (h @ second).exp().clamp(max=9)
    h.register_hook(lambda g: refill(second))
    empty(second)
    h = h.sin() * (h @ w).tanh()
    keep = [first, second]
    return h.mean(), lambda: s.__dict__.__setitem__("keep", keep)


@hole
def saved_input_emptied_and_filled_with_something_else(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    x = some()
    h = (w * x).tanh() + (w + x).exp()

    def between() -> None:
        if s.bad:
            size = x.untyped_storage().nbytes()
            x.untyped_storage().resize_(0)
            x.untyped_storage().resize_(size)
            x.data.fill_(0.5)

    return h.sum(), between


@hole
def storage_grown_after_saving(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    x, y = some(), w.exp()
    h = (w * x).tanh() * (x * 3).sigmoid() + y.sin()

    def between() -> None:
        x.untyped_storage().resize_(2 * x.untyped_storage().nbytes())
        y.untyped_storage().resize_(3 * y.untyped_storage().nbytes())

    return h.sum(), between


@hole
def swap_tensors_between_steps(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    """``swap_tensors`` refuses tensors that somebody holds weakly: we must not be that somebody."""
    if step == 0:
        s.a = nn.Parameter(some())
    fresh = nn.Parameter(some() + s.a.detach())
    torch.utils.swap_tensors(s.a, fresh)
    h = (w * s.a).tanh().exp()
    return (h * (w + s.a).sigmoid()).sum()


@hole
def set_to_another_storage(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    x, other = some(), some()
    y = (w + x).exp().tanh()
    x.set_(other)
    z = (w * x).sigmoid()
    return (y * z).sum()
