"""An op that is not known is never run twice (rule 8)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from .hole import WIDTH, hole

_calls = {"custom_op": 0, "mutating_op": 0, "function": 0}


@torch.library.custom_op("memmgr_exactness::stateful", mutates_args=())
def _stateful(x: torch.Tensor) -> torch.Tensor:
    _calls["custom_op"] += 1
    return x * float(_calls["custom_op"])


@_stateful.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_stateful.register_autograd(
    lambda ctx, grad: grad * ctx.factor,
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", float(_calls["custom_op"])),
)


@torch.library.custom_op("memmgr_exactness::accumulate", mutates_args=("into",))
def _accumulate(into: torch.Tensor, x: torch.Tensor) -> None:
    _calls["mutating_op"] += 1
    into.add_(x)


@torch.library.custom_op("memmgr_exactness::lying", mutates_args=())
def _lying(x: torch.Tensor) -> torch.Tensor:
    """Writes into its input although its schema says that it does not."""
    x.data.add_(0.5)
    return x.sum(0)


class Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        _calls["function"] += 1
        y = x.exp() * _calls["function"]
        ctx.save_for_backward(y)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0]


@hole
def stateful_custom_op(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    if step == 0:
        _calls["custom_op"] = _calls["mutating_op"] = _calls["function"] = 0
        s.sum = torch.zeros(WIDTH, WIDTH)
    h = _stateful(w.tanh())
    h = h.exp() * torch.sigmoid(h)
    _accumulate(s.sum, h.detach())
    h = Counted.apply(h.sin()) * (w + s.sum).tanh()
    s.calls, s.writes, s.functions = _calls["custom_op"], _calls["mutating_op"], _calls["function"]
    return (h * Counted.apply(h.cos())).tanh().sum()


@hole
def custom_op_that_lies_about_its_writes(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    t = w.detach().exp()  # a recorded op made it
    u = (w * t).tanh()  # saved before
    row = _lying(t)
    return (u * (t * w).sigmoid() * row).sum()  # saved after


@hole
def callback_op_of_numpy(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    """A detour through numpy and back, whose result nobody recorded."""
    h = w.exp()
    back = torch.from_numpy(np.cumsum(h.detach().numpy(), axis=1)).tanh()
    return (h * back * torch.tensor(h.detach().numpy().mean(0)) + torch.tensor(h.detach().tolist())).sin().sum()
