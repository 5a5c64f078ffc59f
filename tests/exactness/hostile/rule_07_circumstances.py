"""The same circumstances (rule 7)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .hole import WIDTH, hole, some


def _circumstances(
    name: str, enter: Callable[[], Callable[[], None]], make: Callable[[nn.Parameter], torch.Tensor]
) -> None:
    def f(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
        leave = enter()
        try:
            h = make(w)
        finally:
            leave()
        return h.sum()

    f.__name__ = f"forward_inside_{name}"
    hole(f)


def _mkldnn_off() -> Callable[[], None]:
    flags = torch.backends.mkldnn.flags(enabled=False)
    flags.__enter__()
    return lambda: flags.__exit__(None, None, None)


def _setting(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Callable[[], Callable[[], None]]:
    def enter() -> Callable[[], None]:
        old = get()
        put(value)
        return lambda: put(old)

    return enter


def convolutions(w: nn.Parameter) -> torch.Tensor:
    h = F.conv2d(torch.randn(4, 1, 24, 24), w[:, :9].reshape(64, 1, 3, 3)).tanh()
    h = F.conv2d(h, w[:8, :].reshape(8, 64, 1, 1)).sigmoid()
    return F.linear(h.flatten(1)[:, :WIDTH], w).exp().clamp(max=5) * (w @ w.t()).sin()[:4]


def products(w: nn.Parameter) -> torch.Tensor:
    h = (torch.randn(256, WIDTH) @ w).tanh()
    return (h @ w.t()).sigmoid().mul(h).exp()


def reductions(w: nn.Parameter) -> torch.Tensor:
    big = torch.randn(256, 2048)
    row = (big * w.sum()).sum(0).tanh()[:WIDTH] + big.var() + big.logsumexp(1)[:WIDTH] + big.flatten().cumsum(0)[-1]
    return ((w + row).sigmoid() * (w @ w).tanh()).exp()


def tiny_numbers(w: nn.Parameter) -> torch.Tensor:
    small = (w.detach() * 1e-20) * 1e-19  # denormal: gone if they are flushed
    back = (small * 1e19) * 1e20
    return (w * back).tanh() + (w + back).exp()


def factories(w: nn.Parameter) -> torch.Tensor:
    """Default dtype enters through ops whose recorded arguments do not show it."""
    noise = (
        torch.rand(WIDTH, WIDTH)
        + torch.full((WIDTH, WIDTH), 0.1)
        + torch.linspace(0, 1, WIDTH)
        + torch.arange(0.0, 64.0, 1.0)
    )
    ratio = (
        torch.arange(1, WIDTH + 1) / torch.arange(2, WIDTH + 2)
        + torch.ones(WIDTH, dtype=torch.int32).sqrt()
        + torch.eye(WIDTH)
    )
    return ((w + noise).exp().tanh() * (w * ratio).sigmoid()).to(torch.float32)


def _flush(on: bool) -> None:
    assert torch.set_flush_denormal(on) or not on, "this CPU cannot flush denormals"


_circumstances("mkldnn_off", _mkldnn_off, convolutions)
_circumstances(
    "matmul_precision",
    _setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    products,
)
# One thread, where there are more; two in `make test`, whose processes have one.
_circumstances(
    "other_threads",
    _setting(torch.get_num_threads, torch.set_num_threads, 1 if torch.get_num_threads() > 1 else 2),
    reductions,
)
_circumstances("flush_denormal", _setting(lambda: False, _flush, True), tiny_numbers)
_circumstances(
    "deterministic_algorithms",
    _setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    reductions,
)
_circumstances("default_dtype", _setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64), factories)


@hole
def inference_mode_tensors(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    with torch.inference_mode():
        t = torch.randn(WIDTH, WIDTH) * 2
        ids = torch.randint(0, WIDTH, (WIDTH,))
    h = (w + t).exp()
    with torch.inference_mode():
        t.mul_(0)  # no version counter tells of this
    return (h.tanh() * h * t.clone().add(1) * w[ids.clone()].sin()).sum()


@hole
def anomaly_mode(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.set_detect_anomaly(True, check_nan=True):
            h = F.dropout((some() @ w).tanh(), 0.1).exp() * w.sigmoid()
            loss = h.sum()
            torch.autograd.grad(loss, w, retain_graph=True)
    return loss
