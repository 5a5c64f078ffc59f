"""Modes, hooks, kinds of tensors and of ops (rule 5)."""

import warnings
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


@hole
def multi_output_ops(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    h = (some() @ w).tanh()
    a, b, c = h.split([16, 16, 32], 1)
    u = h.unbind(1)
    top, at = h.topk(5, 1)
    big, where = h.max(1)
    ordered, order = torch.sort(h, dim=0, stable=True)
    cm, ci = h.cummax(0)
    var, mean = torch.var_mean(h, 1)
    spread, middle = torch.std_mean(h, 1)
    parts = a * b + c.chunk(2, 1)[1] * (u[3] * u[5])[:, None]
    return (
        parts.exp().sum()
        + (top.exp() * at).sum()
        + (big * where).sin().sum()
        + (ordered * ordered.roll(1) * order.sin()).sum()
        + (cm.exp() * ci).mean()
        + (var * mean.exp()).sum()
        + (spread * middle.exp()).sum()
        + h.kthvalue(3)[0].exp().sum()
        + h.mode(0)[0].sin().sum()
        + h.median(1)[0].square().sum()
    )


@hole
def decompositions(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    a = w[:16, :16] + 2 * torch.eye(16)
    sym = a @ a.mT + torch.eye(16)
    u, sv, vh = torch.linalg.svd(a, full_matrices=False)
    ev, vec = torch.linalg.eigh(sym + torch.diag(torch.arange(16.0)))
    q, r = torch.linalg.qr(a)
    sign, logabs = torch.linalg.slogdet(a)
    chol = torch.linalg.cholesky(sym)
    return (
        ((u * sv) @ vh).exp().sum()
        + (vec * ev).square().sum()
        + (q @ r.tanh()).sum()
        + logabs
        + chol.sin().sum()
        + torch.linalg.solve(sym, a).sum()
        + w.exp().mean()
    )


@hole
def saved_by_two_ops(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    h = w.exp()
    return (h * h.detach() + h.sin() + h @ h + torch.sigmoid(h) + h.t() * h[0] + h.square()).tanh().sum()


@hole
def complex_and_conjugate_views(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    z = torch.view_as_complex(w.view(WIDTH, WIDTH // 2, 2)) * (1 + 2j)
    c = z.conj()
    h = (c * z.exp()) + (z @ z.mH).mean(0)[:32] + c.mT.conj().mT.sin()
    n = c.imag * z.real + torch._neg_view(z.real) * z.imag
    f = torch.fft.rfft(h.real).abs() * torch.fft.fft2(h).angle()[:, :17]
    return (h.abs().tanh() * n.sigmoid()).sum() + f.mean() + torch.polar(n.abs(), n).real.mean()


@hole
def odd_values(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    """NaN payloads, infinities, -0.0, denormals and empty tensors pass through offload and recompute unchanged."""
    raw = torch.randint(-(2**31), 2**31 - 1, (WIDTH, WIDTH), dtype=torch.int32).view(torch.float32)
    x = torch.where(raw.isfinite() & (raw.abs() < 1e30), raw, raw.new_tensor(-0.0))
    weird = raw * 1.0
    mask = weird.isnan() | weird.isinf()
    h = (w * x).tanh() + (w * weird).masked_fill(mask, 0.0).clamp(-1, 1).sin()
    e = w[:0].exp() * w[:0]
    z = (w.sum() * 0.01).exp() * w[0, 0].expand(WIDTH, WIDTH).sin()
    return h.nan_to_num().sum() + e.sum() + (z * z).sum()


@hole
def many_dtypes(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    total = w.double().exp().sum().float()
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        h = w.to(dtype)
        total = total + (h.exp() * h.sigmoid()).float().tanh().sum()
    low = w.detach().to(torch.float8_e4m3fn)
    keep, ids = torch.rand_like(w) > 0.3, torch.randint(0, WIDTH, (WIDTH,), dtype=torch.int32)
    total = total + (w.masked_fill(keep, 0) * (low.float() * 2).exp()).sum() + w.index_select(0, ids).exp().sum()
    return (
        total
        + w.where(keep & ~keep.t(), w.exp()).sin().sum()
        + (w * torch.randint(0, 9, (WIDTH, 1), dtype=torch.uint8)).tanh().sum()
    )


@hole
def sparse_embedding_gradients(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    ids = torch.randint(0, WIDTH, (96,))
    h = F.embedding(ids, w, sparse=True)
    return (h.exp() * F.dropout(h.tanh(), 0.1)).sum()


@hole
def sparse_layouts(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dense = some() * (torch.rand(WIDTH, WIDTH) > 0.8)
        coo, csr = dense.to_sparse(), dense.to_sparse_csr()
        h = torch.sparse.mm(coo, w).tanh() + (csr @ w).sigmoid()
        return (h * torch.sparse.sum(coo * 2.0, 0).to_dense().exp()).sum()


@hole
def nested_tensors(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = [torch.randn(n, WIDTH) for n in (3, 9, 5 + step)]
        nt = torch.nested.nested_tensor(rows, layout=torch.jagged)
        h = torch.sigmoid(F.linear(nt, w))
        return (h * h.sin()).values().exp().sum() + w.exp().mean()


@hole
def tensor_subclass(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    h = some().as_subclass(Tagged) * w
    assert type(h) is Tagged
    y = F.dropout(h.exp().tanh(), 0.1) * h
    assert type(y) is Tagged
    return y.as_subclass(torch.Tensor).sum()


class Tagged(torch.Tensor):
    pass


@hole
def foreach_in_forward(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    parts = list(w.chunk(8))
    a = torch._foreach_exp(torch._foreach_mul(parts, 0.5))
    b = torch._foreach_addcmul(parts, list(a), [p.tanh() for p in a])
    scratch = [t.detach().clone() for t in b]
    torch._foreach_mul_(scratch, 2.0)
    return sum((t * u).sin().sum() for t, u in zip(b, scratch, strict=True))


@hole
def views_of_a_base_written_later(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    base = torch.zeros(4, WIDTH, WIDTH)
    pieces = []
    for i in range(4):
        base[i] = (w * (i + 1)).sin()  # in place, differentiable, through a view
        pieces.append((base[i].exp() * w.t()).mean())  # exp saves its result, not the base
    flat = base.view(-1)
    flat[::7] = 0.5
    return base.square().mean() + torch.stack(pieces).exp().sum()


@hole
def relu_and_dropout_inplace_chain(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    h = some() @ w
    for _ in range(3):
        h = F.dropout(F.relu(h.mul(1.1), inplace=True) + 0.01, 0.2, inplace=True)
        h = F.hardtanh(h + 0.1, -1, 4, inplace=True)
        h = h - h.detach().mean()
        h.sub_(0.1).neg_()
    return h.square().mean()
