"""Writes (rule 4)."""

from __future__ import annotations

import ctypes
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from exactness.harness import Record, Scope

from .hole import HOLES, WIDTH, Hole, drive, hole, some, whole


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
