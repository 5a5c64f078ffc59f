"""What the shim runs again by itself, and what it leaves to Python because an op's arguments are not all that it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import memmgr
from memmgr import _budget, _replay
from memmgr.policies import Action

from .ways import recorder_only

pytestmark = recorder_only


@pytest.fixture
def native() -> Iterator[Any]:
    with memmgr.budget(8 << 30, policy="evict", quiet=True, _sleep=False, _plan=False):
        manager = _budget.current()
        assert manager is not None
        yield manager.native


def made_by(native: Any, op: str) -> Any:
    """The cell that autograd has of this op's result."""
    (cell,) = [c for c in native.handled() if c.recipe is not None and str(c.recipe.func) == op]
    return cell


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().view(torch.uint8).flatten().tolist())


PLAIN: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "a view": ("aten.addmm.default", lambda x: torch.addmm(x[0], x, x.t()).sin()),
    "a list": ("aten.cat.default", lambda x: torch.cat([x, x.t()], dim=1).sin()),
    "a keyword": ("aten.add.Tensor", lambda x: torch.add(x, x, alpha=3).sin()),
    "several results": ("aten.max.dim", lambda x: torch.max(x, 0).values.sin()),
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_only_reads_runs_again_in_the_shim(name: str, native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    op, step = PLAIN[name]
    x = torch.randn(48, 48, requires_grad=True)
    y = step(x)
    cells = [c for c in native.handled() if c.recipe is not None and str(c.recipe.func) == op]
    cell = max(cells, key=lambda c: c.nbytes)
    place = [c is cell for c in cell.recipe.outputs].index(True)
    before = bits(native.lease(cell))
    with native.Below():
        outputs = native.run_plain(cell.recipe)
    assert outputs is not None and bits(outputs[place].contiguous()) == before
    del outputs

    def elsewhere(*args: Any) -> Any:
        raise AssertionError("Python ran it")

    monkeypatch.setattr(_replay, "run_recipe", elsewhere)
    native.release(cell, Action.EVICT)
    assert cell.gone
    y.sum().backward()
    assert not cell.gone and x.grad is not None


def other_circumstances(native: Any) -> Any:
    x = torch.randn(32, 32, requires_grad=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - min(threads, 2))
    try:
        h = x * 2
        y = h.exp()
    finally:
        torch.set_num_threads(threads)
    return made_by(native, "aten.exp.default"), (h, y)


def drawn(native: Any) -> Any:
    y = torch.randn(32, 32, requires_grad=True).sin()
    mask = torch.rand_like(y)
    z = y * mask
    return made_by(native, "aten.rand_like.default"), (y, z)


def filled(native: Any) -> Any:
    y = torch.randn(32, 32, requires_grad=True)
    mask = torch.empty(32, 32)
    mask.fill_(3.0)
    z = y * mask
    return made_by(native, "aten.fill_.Scalar"), z


def written(native: Any) -> Any:
    y = torch.randn(32, 32, requires_grad=True)
    z = (y * 2).sigmoid_()
    cell = made_by(native, "aten.sigmoid_.default")
    (old,) = cell.recipe.inputs
    with native.Below():
        outputs = native.run_plain(old.recipe)
        native.fill(old, outputs[0])
    return cell, (z, outputs)


def gone_input(native: Any) -> Any:
    x = torch.randn(32, 32, requires_grad=True)
    y = (x * 2).exp()
    z = y.sin()
    w = z.tanh()
    cell, inner = made_by(native, "aten.tanh.default"), made_by(native, "aten.exp.default")
    del y, z
    native.release(inner, Action.EVICT)
    return cell, w


def written_unseen(native: Any) -> Any:
    x = torch.randn(32, 32, requires_grad=True)
    held = x.detach().clone()
    y = torch.mul(x, held).exp()
    cell = made_by(native, "aten.exp.default")
    first = cell.recipe.inputs[0].recipe
    with native.Below():
        held.mul_(2)
    return first, y


@pytest.mark.parametrize(
    "what", [other_circumstances, drawn, filled, written, gone_input, written_unseen], ids=lambda f: f.__name__
)
def test_what_needs_more_is_left_to_python(what: Callable[[Any], Any], native: Any) -> None:
    found, _graph = what(native)
    recipe = found if not hasattr(found, "recipe") else found.recipe
    state = torch.get_rng_state()
    present = all(c.present for c in recipe.inputs)
    assert present == (what is not gone_input)  # else that alone would be the reason
    with native.Below():
        assert native.run_plain(recipe) is None
    assert torch.equal(torch.get_rng_state(), state)
