"""Copies of the model, nothing that is kept alive, and memory that code outside of ops can write (rule 9)."""

import copy
import ctypes
import io
import pickle
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.dlpack import to_dlpack

from .hole import WIDTH, hole, some


@hole
def saved_copied_pickled_between(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    layer = nn.Linear(WIDTH, WIDTH)
    h = F.dropout((layer(some()) @ w).tanh(), 0.1)
    held = h.exp()
    y = held.sin() * h

    def between() -> None:
        buffer = io.BytesIO()
        torch.save({"w": w, "layer": layer.state_dict(), "held": held.detach()}, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)
        twin = copy.deepcopy(layer)
        again = pickle.loads(pickle.dumps(held.detach()))
        s.record.put(
            f"copies[{s.step}]",
            loaded["w"].double().sum()
            + twin.weight.double().sum()
            + again.double().sum()
            + loaded["held"].double().sum(),
        )
        assert type(loaded["w"]) in (torch.Tensor, nn.Parameter) and type(again) is torch.Tensor

    return y.square().mean(), between


@hole
def nothing_kept_alive(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    """Tensors and storages die when they would have died: recording holds no Python object of the user's."""
    a = torch.randn(WIDTH, WIDTH)
    b = w + a
    c = b * 1.0
    dead = [weakref.ref(t) for t in (a, b, c)]
    loss = (c + 1).sum() + w.exp().sum()
    del a, b, c
    s.record.put(f"alive[{step}]", sum(r() is not None for r in dead))
    return loss


LARGE = 320  # a square of so many floats is larger than the limit of copies in a recipe (256 KiB)


def _floats(pointer: int, count: int) -> Any:
    return (ctypes.c_float * count).from_address(pointer)


def _use(w: nn.Parameter, x: torch.Tensor) -> torch.Tensor:
    """Saves only tensors made from `x`, so that a replay has to read it."""
    return ((w + x).exp() * (w * 2 + x).sigmoid()).sum()


@hole
def numpy_view_older_than_an_unrecorded_write(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    """Exposure belongs to the memory, not to the version that was there when the pointer was taken."""
    if step == 0:
        s.static = torch.zeros(WIDTH, WIDTH)
        s.arrays = [s.static.numpy()]
    with torch.no_grad():
        s.static.add_(1)
    return _use(w, s.static), lambda: s.arrays[0].fill(7) if s.bad else None


@hole
def numpy_view_older_than_an_unseen_write(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    if step == 0:
        s.static = torch.zeros(WIDTH, WIDTH)
        s.arrays = [s.static.numpy()]
    torch._C._autograd._unsafe_set_version_counter((s.static,), (s.static._version + 1,))
    return _use(w, s.static), lambda: s.arrays[0].fill(7) if s.bad else None


@hole
def raw_pointer_older_than_an_unrecorded_write(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    """The same with a pointer, of which torch itself takes no note."""
    if step == 0:
        s.static = torch.zeros(WIDTH, WIDTH)
        s.views = [_floats(s.static.data_ptr(), WIDTH * WIDTH)]
    with torch.no_grad():
        s.static.add_(1)

    def between() -> None:
        if s.bad:
            s.views[0][7:77] = [2.0] * 70

    return _use(w, s.static), between


@hole
def numpy_view_of_what_was_not_known(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    with torch.no_grad():
        x = torch.randn(WIDTH, WIDTH)
    array = x.numpy()
    return _use(w, x), lambda: array.fill(7) if s.bad else None


@hole
def pointer_to_a_storage_that_was_not_known(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    with torch.no_grad():
        x = torch.randn(WIDTH, WIDTH)
    view = _floats(x.untyped_storage().data_ptr(), WIDTH * WIDTH)
    held = x

    def between() -> None:
        if s.bad:
            assert held is not None
            view[7:77] = [2.0] * 70

    return _use(w, x), between


@hole
def array_rewritten_while_only_the_graph_has_its_tensor(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    """A copy of foreign memory would be wrong: backward reads the array's contents at that time."""
    if step == 0:
        s.arrays = [np.zeros((WIDTH, WIDTH), dtype=np.float32)]
    s.arrays[0][:] = np.random.randn(WIDTH, WIDTH).astype(np.float32)
    h = (torch.from_numpy(s.arrays[0]) * w).tanh()
    for _ in range(4):
        h = h.sin().exp()  # moments at which everything that may leave does
    return h.sum(), lambda: s.arrays[0].fill(0.125) if s.bad else None


@hole
def shared_memory_rewritten_while_only_the_graph_has_its_tensor(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    def used() -> torch.Tensor:
        x = torch.randn(WIDTH, WIDTH).share_memory_()
        # As another process would: a second tensor over the same memory, which torch does not know for the same.
        s.alias = [torch.frombuffer(_floats(x.untyped_storage().data_ptr(), WIDTH * WIDTH), dtype=torch.float32)]
        return (x * w).tanh()

    h = used()
    for _ in range(4):
        h = h.sin().exp()
    return h.sum(), lambda: s.alias[0].fill_(0.5) if s.bad else None


@hole
def shared_memory_written_and_used_again(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    if step == 0:
        s.static = torch.zeros(WIDTH, WIDTH).share_memory_()
        s.views = [_floats(s.static.untyped_storage().data_ptr(), WIDTH * WIDTH)]
    with torch.no_grad():
        s.static.add_(1)

    def between() -> None:
        if s.bad:
            s.views[0][5:500] = [3.0] * 495

    return _use(w, s.static), between


@hole
def numpy_of_dlpack_and_back(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    x = torch.randn(WIDTH, WIDTH)
    alias = torch.from_numpy(np.from_dlpack(x))
    loss = _use(w, x) + (alias * w).tanh().sum()

    def between() -> None:
        if s.bad:
            alias.data[3] = 2.0

    return loss, between


def _dlpack_door(name: str, export: Any) -> None:
    def f(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
        with torch.no_grad():
            x = torch.randn(WIDTH, WIDTH)
        alias = torch.from_dlpack(export(x))

        @torch.no_grad()
        def between() -> None:
            if s.bad:
                alias.fill_(2.0)

        return _use(w, x), between

    f.__name__ = name
    hole(f)


_dlpack_door("dlpack_alias_of_what_was_not_known", lambda x: x)
_dlpack_door("capsule_by_the_name_that_a_module_imported", lambda x: to_dlpack(x))
_dlpack_door("capsule_by_its_name_in_torch", lambda x: torch.to_dlpack(x))
_dlpack_door("capsule_by_its_name_in_torch_utils", lambda x: torch.utils.dlpack.to_dlpack(x))
_dlpack_door("capsule_of_torchs_own", lambda x: torch._C._to_dlpack(x))
_dlpack_door("versioned_capsule", lambda x: torch._C._to_dlpack_versioned(x))


@hole
def large_array_rewritten_before_backward(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    """Too large for a copy: no recipe names it, so tensors made from it are kept or offloaded."""
    if step == 0:
        s.arrays = [np.zeros((LARGE, LARGE), dtype=np.float32)]
    s.arrays[0][:] = np.random.randn(LARGE, LARGE).astype(np.float32)
    x = torch.from_numpy(s.arrays[0])
    h = (w.repeat(5, 5) + x).exp() * (w.repeat(5, 5) * 2 + x).sigmoid()
    return h.sum(), lambda: s.arrays[0].fill(0.125) if s.bad else None
