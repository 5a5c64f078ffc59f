"""Random numbers (rule 6), circumstances that change bits (rule 7), ops that are not trusted (rule 8)."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .hole import WIDTH, hole, some


@hole
def explicit_generator(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    g = s.__dict__.setdefault("g", torch.Generator().manual_seed(7))
    keep = torch.bernoulli(torch.full((WIDTH, WIDTH), 0.7), generator=g)
    noise = torch.randn(WIDTH, WIDTH, generator=g) * torch.rand(WIDTH, WIDTH)
    h = (w * keep + noise).tanh() * torch.empty_like(w).normal_(generator=g).exp()
    return h[torch.randperm(WIDTH, generator=g)].sin().square().sum()


@hole
def explicit_generator_moved_before_backward(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    g = s.__dict__.setdefault("g", torch.Generator().manual_seed(7))
    h = (w * torch.rand(WIDTH, WIDTH, generator=g)).exp() * torch.rand(WIDTH, WIDTH, generator=g).sigmoid()
    return h.sum(), lambda: (torch.rand(step + 1, generator=g), g.manual_seed(step) if step % 2 else None)


@hole
def reseeded_between_forward_and_backward(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    h = F.dropout(F.dropout(w, 0.3).exp(), 0.2).sigmoid()
    return h.sum(), lambda: (torch.manual_seed(100 + step), torch.rand(3))


@hole
def fork_rng_in_forward(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    state = torch.get_rng_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(step)
        h = F.dropout(w.exp(), 0.3)
    h = F.dropout(h.sin(), 0.3)
    torch.set_rng_state(state)
    return (F.dropout(h.tanh(), 0.3) * h).sum()


@hole
def empty_like_bernoulli(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    keep = torch.empty_like(w).bernoulli_(0.8)
    noise = torch.empty(WIDTH, WIDTH).uniform_(-1, 1)
    noise[::2].exponential_()
    return ((w * keep.div_(0.8)).exp() * noise).sin().sum()


@hole
def every_random_op(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    p = w.detach().sigmoid()
    h = w.exp() * torch.bernoulli(p) + w.tanh() * torch.poisson(p * 4) + w.sin() * torch.normal(p, p)
    h = F.alpha_dropout(h, 0.1) * torch.empty_like(p).cauchy_().atan() * torch.empty_like(p).log_normal_().tanh()
    h = F.feature_alpha_dropout(h[None, :, :, None], 0.1)[0, :, :, 0] * torch.empty_like(p).geometric_(0.4)
    h = F.rrelu(h, training=True) * torch.randint_like(p, 5) * torch.empty_like(p).random_(3)
    h = h[torch.multinomial(p, 5)[:, 0]] * torch.rand_like(p) * torch.binomial(p.round() * 9, p)
    return F.fractional_max_pool2d(h[None, None], 2, output_ratio=(0.5, 0.5)).tanh().mean()


@hole
def dropout_twice_differentiated(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    x = some().requires_grad_()
    h = F.dropout((x @ w).tanh(), 0.3)
    (g,) = torch.autograd.grad(h.square().sum(), x, create_graph=True)
    (g2,) = torch.autograd.grad(F.dropout(g, 0.2).square().sum(), x, create_graph=True)
    return g2.square().mean() + F.dropout(g, 0.5).abs().mean()


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
