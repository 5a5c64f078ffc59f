"""Writes; storages that are emptied, resized, swapped; errors of writes in place stay errors (rule 4)."""

import ctypes
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from exactness import cases
from exactness.harness import Record, Scope

from .hole import HOLES, WIDTH, Hole, drive, error, hole, some, whole


@hole
def batch_norm_running_stats(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    if step == 0:
        s.mean, s.var, s.imean, s.ivar = torch.zeros(WIDTH), torch.ones(WIDTH), torch.zeros(8), torch.ones(8)
    h = F.batch_norm(some() @ w, s.mean, s.var, training=True, momentum=0.2).sigmoid()
    h = F.batch_norm((h @ w).exp(), s.mean, s.var, training=True, momentum=0.2).tanh()  # the same buffers again
    h = F.batch_norm(h, s.mean, s.var, training=False) * s.var.sqrt()
    h = F.instance_norm(h.view(8, 8, 64), s.imean, s.ivar, use_input_stats=True).sin()
    return (h * s.ivar.detach().clone()[:, None]).square().sum()


@hole
def embedding_max_norm(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    """The forward renormalises the weight in place, under its own no_grad."""
    ids = torch.randint(0, WIDTH, (128,))
    h = F.embedding(ids, w, max_norm=0.5 + 0.1 * step)
    return (h.exp() * h.tanh()).sum()


@hole
def inplace_while_nothing_was_recorded(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    a = torch.randn(WIDTH, WIDTH)
    h = (w + a).exp() * (w.sin() + a * 2).tanh()
    b = a * 3  # recorded: a recipe of the new version's neighbour
    h = h + (w + b).sigmoid()
    if s.bad:
        with torch.no_grad():
            a.zero_()
            b.add_(1).t_().mul_(5)
    return h.sum()


@hole
def inplace_on_a_buffer_before_backward(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    if step == 0:
        s.buffer = torch.randn(WIDTH, WIDTH)
    h = (w + s.buffer).exp() * (w - s.buffer.t()).sigmoid()

    @torch.no_grad()
    def between() -> None:
        if s.bad:
            s.buffer.mul_(0.5)
            torch._foreach_add_([s.buffer, s.buffer[1:]], 1.0)
            torch.add(s.buffer, 1.0, out=s.buffer)

    return h.sum(), between


@hole
def out_variants_into_a_reused_buffer(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    if step == 0:
        s.out, s.idx = torch.zeros(WIDTH, WIDTH), torch.zeros(WIDTH, dtype=torch.long)
    total = torch.zeros(())
    for i in range(3):
        torch.mul(some(), i + 1.0, out=s.out)
        total = total + (w + s.out).exp().sum()  # only the sum is saved, and it must be made of this round's bytes
        values = torch.empty(WIDTH)
        torch.max(s.out, 1, out=(values, s.idx))
        total = total + (w.detach().index_select(0, s.idx.clone()) + w).tanh().square().sum() * values.sum().sigmoid()
    return total


@hole
def out_that_fills_a_part_of_its_storage(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    """How much is written depends on values: the rest stays as it was, and no second run knows it."""
    if step == 0:
        s.found, s.chosen = torch.zeros(WIDTH * WIDTH, 2, dtype=torch.long), torch.zeros(WIDTH * WIDTH)
    mask = torch.rand(WIDTH, WIDTH) > (-1 if step == 0 else 0.5)  # first all of it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nonzero(mask, out=s.found[:])
        torch.masked_select(w.detach().sin(), mask, out=s.chosen[:])
    h = w.exp().sin() * s.found.view(2, WIDTH, WIDTH).sum(0)
    return (h * s.chosen.view(WIDTH, WIDTH)).tanh().sum()


@whole
def out_that_is_added_to(seed: int, scope: Scope) -> Record:
    """First to zeros, as the fresh memory of the second run is."""
    w, record = nn.Parameter(torch.randn(WIDTH, WIDTH)), Record()
    with scope():
        for step in range(5):
            out = torch.zeros(2, WIDTH, WIDTH)
            if step:
                out = torch.ones(2, WIDTH, WIDTH) * step + w.detach().sum() * 0
            torch._compute_linear_combination(torch.stack([w.detach()] * 3), torch.ones(2, 3), out=out)
            (w.sin() * w.exp()).cos().mul(out[0]).sum().backward()
            record.losses(out.sum())
    record.put("grad", w.grad)
    return record


@hole
def parameter_rebound_by_data(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    """``p.data = other`` between forward and backward: autograd keeps the old storage."""
    h = (some() @ w).exp().clamp(max=3) * w.tanh()

    def between() -> None:
        w.data = w.data * 1.5 + 1

    return (h * h).mean(), between


@hole
def data_add_on_an_input(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    """``.data`` has its own version counter: autograd does not notice and reads the new bytes."""
    x = some()
    y = (w + x).exp()  # made of the old bytes, and stays so
    h = (x * w).tanh() + y.sigmoid() * y

    def between() -> None:
        if s.bad:
            x.data.add_(1.0)

    return h.sum(), between


@hole
def data_add_on_a_held_activation(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    y = w * 2
    z = y.exp()
    h = (y * z.tanh()).sum() + (y + 1).square().sum()

    def between() -> None:
        if s.bad:
            y.data.add_(1.0)
            z.data[3].zero_()

    return h, between


@hole
def data_add_on_a_parameter(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    h = (some() @ w).tanh() * w.exp()
    return h.sum(), lambda: w.data.mul_(1.01) if s.bad else None


@hole
def numpy_write_to_an_input(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    x = some()
    y = (w + x).exp()
    h = (x * w).tanh() + y * (x * 2).sigmoid()

    def between() -> None:
        if s.bad:
            x.numpy()[0] = 5

    return h.sum(), between


@hole
def numpy_view_taken_before_forward(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    x = some()
    array = x.numpy()
    del x.__dict__
    y = (w + x).exp()
    h = (x * w).tanh() + y * (x * 2).sigmoid()
    del x, y

    def between() -> None:
        if s.bad:
            array[1] = 3

    return h.sum(), between


@hole
def numpy_write_to_an_activation(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    y = w.exp()
    z = y.sin() * y
    array = y.detach().numpy()
    h = (y * y + z).tanh()
    del y, z

    def between() -> None:
        if s.bad:
            array[:] = 0.25

    return h.sum(), between


def _from_numpy(nasty: bool) -> Hole:
    def f(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
        if step == 0:
            s.array = np.zeros((WIDTH, WIDTH), dtype=np.float32)
        s.array[:] = np.random.randn(WIDTH, WIDTH).astype(np.float32)
        x = torch.from_numpy(s.array)
        h = (w + x).exp() * (x * w).tanh() * (x * 2).sigmoid()

        def between() -> None:
            if nasty and s.bad:
                s.array[:] = 0.125

        return h.sum(), between

    return f


HOLES["from_numpy_rewritten_each_step"] = drive(_from_numpy(False))
HOLES["from_numpy_rewritten_before_backward"] = drive(_from_numpy(True))


@hole
def frombuffer_rewritten_before_backward(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    raw = bytearray(np.random.randn(WIDTH, WIDTH).astype(np.float32).tobytes())
    x = torch.frombuffer(raw, dtype=torch.float32).view(WIDTH, WIDTH)
    h = (w + x).exp() * (x * w).tanh()

    def between() -> None:
        if s.bad:
            raw[:4096] = bytes(4096)

    return h.sum(), between


@hole
def raw_pointer_kept_from_an_earlier_step(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    """The pointer to a static input buffer is taken once; later writes pass nothing that could be watched."""
    if step == 0:
        s.static = torch.zeros(WIDTH, WIDTH)
        s.pointer = None
        s.view = (ctypes.c_float * (WIDTH * WIDTH)).from_address(s.static.data_ptr())
    s.view[: WIDTH * WIDTH // 2] = np.random.randn(WIDTH * WIDTH // 2).tolist()
    h = (w + s.static).exp() * (w * s.static).tanh()

    def between() -> None:
        if s.bad:
            s.view[7:77] = [2.0] * 70

    return h.sum(), between


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
