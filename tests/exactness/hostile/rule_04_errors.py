"""Errors of writes in place stay errors (rule 4)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from exactness import cases

from .hole import WIDTH, error, some


@error
def output_of_sigmoid_written(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    y = (w * 2).sigmoid()
    h = y.exp()
    if s.bad:
        y.add_(1)
    return h.sum()


@error
def saved_input_written_under_no_grad(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    x = some()
    h = (w * x).tanh()
    if s.bad:
        with torch.no_grad():
            x.mul_(2)
    return h.sum()


@error
def saved_input_written_before_backward(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    x = some()
    return (w @ x).sigmoid().sum(), lambda: x.zero_() if s.bad else None


@error
def saved_tensor_written_through_a_view(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    y = w.exp()
    loss = (y * y.sin()).sum()
    return loss, lambda: y.detach().view(-1)[3:5].fill_(0) if s.bad else None


@error
def parameter_stepped_before_backward(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    h = (some().requires_grad_() @ w).tanh() @ w
    opt = torch.optim.SGD([w], lr=0.1)
    w.grad = torch.ones_like(w)
    return h.sum(), opt.step if s.bad else None


@error
def saved_tensor_resized(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    x = some()
    return (w * x).tanh().sum(), lambda: x.resize_(2, 2) if s.bad else None


@error
def saved_by_a_function_and_written(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    x = w.exp()
    h = cases.SavesTemporary.apply(x)
    if s.bad:
        x.mul_(2)
    return h.sum()


@error
def backward_twice(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    loss = (w.exp() * w.tanh()).sum()
    if s.bad:
        loss.backward()
    return loss


@error
def inference_tensor_saved(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    with torch.inference_mode():
        t = some()
    return (w * (t if s.bad else t.clone())).sum()


@error
def wrong_shapes(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    h = w.exp().tanh()
    return (h @ torch.randn(3 if s.bad else WIDTH, 5)).sum()


@error
def written_then_needed_by_a_second_backward(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    y = w.exp()
    loss = (y * y).sum()
    loss.backward(retain_graph=True)
    return loss, lambda: y.detach().add_(1) if s.bad else None
