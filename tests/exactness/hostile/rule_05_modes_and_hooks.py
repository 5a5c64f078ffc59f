"""torch.func, other modes and hooks around recorded ops (rule 5)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .hole import WIDTH, hole, some


@hole
def torch_func_inside(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    def f(v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x @ v).tanh().square().sum()

    x = torch.randn(4, WIDTH)
    g = torch.func.grad(f)(w.detach(), x)
    per_sample = torch.func.vmap(torch.func.grad(f), in_dims=(None, 0))(w.detach(), x[:, None])
    noisy = torch.func.vmap(lambda r: F.dropout(r, 0.5) * r.exp(), randomness="different")(w)
    hessian = torch.func.jacrev(torch.func.jacfwd(lambda v: v.sin().prod()))(w.detach()[0, :4])
    through = torch.func.grad(lambda v: f(v, x))(w)  # differentiable: the outer graph goes through it
    _, jvp = torch.func.jvp(lambda v: v.exp().tanh(), (w.detach(),), (torch.ones_like(w),))
    vjp = torch.func.vjp(torch.sin, w)[1](jvp)[0]
    return (
        (w * (g + per_sample.sum(0)) + noisy * hessian.sum()).tanh().sum() + through.square().mean() + (vjp * w).mean()
    )


def _drawn_chain(w: nn.Parameter) -> torch.Tensor:
    h = F.dropout((some() @ w).tanh(), 0.3).exp()
    h = h * torch.empty_like(h).bernoulli_(0.7)
    return F.dropout((h @ w).sin(), 0.2).sigmoid() * h


@hole
def batched_gradients(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    """Backward runs inside vmap, whose layer must be off while the tensors that it reads are made again."""
    h = _drawn_chain(w)
    out = (h * h).sum(0)[:3]
    (rows,) = torch.autograd.grad(out, w, torch.eye(3), is_grads_batched=True, retain_graph=True)
    s.record.put(f"rows[{s.step}]", rows)
    return out.sum()


@hole
def backward_inside_vmap(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    h = _drawn_chain(w)
    out = (h * h).sum(0)[:3]
    rows = torch.func.vmap(lambda v: torch.autograd.grad(out, w, v, retain_graph=True)[0])(torch.eye(3))
    s.record.put(f"rows[{s.step}]", rows)
    return out.sum()


@hole
def users_own_saved_tensor_hooks(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    h = w.exp()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
        h = (h @ w).tanh() * h.sin()
    with torch.autograd.graph.save_on_cpu():
        h = F.dropout(h, 0.2).sigmoid() * h
    return (h * h.exp()).sum()


@hole
def hooks_disabled_by_the_user(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    h = w.exp()
    with torch.autograd.graph.disable_saved_tensors_hooks("not here") if step < 0 else torch.enable_grad():
        h = h.sin() * h
    return h.tanh().sum()


@hole
def users_own_dispatch_mode(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        h = F.dropout((some() @ w).tanh() @ w, 0.1).sigmoid()
    s.flops = counter.get_total_flops()
    return (h * h.exp()).sum()


@hole
def gradients_modified_by_hooks(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight.data.copy_(w.detach())
    h = w.exp().tanh()
    handles = [
        layer.register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,)),
        layer.register_full_backward_pre_hook(lambda m, go: (go[0].tanh(),)),
        h.register_hook(lambda g: F.dropout(g, 0.5) * 2),
        h.register_hook(lambda g: g.mul_(1.5)),
    ]
    h.retain_grad()
    y = layer(h) * h.sigmoid()
    handles += [
        y.grad_fn.register_prehook(lambda gs: (gs[0] + 1,)),
        torch.autograd.graph.register_multi_grad_hook(
            [h, y], lambda gs: s.__dict__.__setitem__("seen", s.__dict__.get("seen", 0) + 1)
        ),
    ]
    w.register_hook(lambda g: g.clamp(-1, 1)) if step == 0 else None
    # Else they and their graph hold one another for ever, in plain torch too.
    return y.square().mean(), lambda: [handle.remove() for handle in handles]


@hole
def saved_attributes_read_by_the_user(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    y = w.exp()
    z = y @ w.sin()
    node = z.grad_fn
    a, b = y.grad_fn._saved_result, node._saved_self
    return (z.tanh() * (a + b).detach()).sum(), lambda: s.record.put(f"saved[{s.step}]", node._saved_mat2)


@hole
def optimizer_step_in_a_hook_during_backward(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    """A late parameter is stepped in the middle of backward, after an early recipe read it through ``detach``."""
    late = (w.detach().clone()).requires_grad_()
    late.register_post_accumulate_grad_hook(lambda p: (p.data.sub_(p.grad), torch.no_grad()(p.add_)(0.1)) and None)
    h = (w + late.detach()).exp() * (w * 2 + late.detach().t()).sigmoid()  # needs late's old bytes to be made again
    h = h.tanh()
    return (h @ late).square().mean()
