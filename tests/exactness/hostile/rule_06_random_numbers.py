"""Random numbers (rule 6)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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
