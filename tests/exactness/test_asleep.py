"""Asleep nothing is recorded; a surprise is met by giving autograd's saved tensors their hooks after the fact (rules 1, 3, 8).

In the tests of training cases and holes a surprise comes before every backward that begins asleep: what malloc's last resort
does is done there, and everything that may leave is offloaded. `test_a_larger_pass` meets one as it comes, in the allocator.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memmgr
from memmgr import _budget
from memmgr._manager import Manager
from memmgr._sleep import CALM_PASSES

from . import cases, exposed, test_hostile
from .harness import HUGE_BYTES, CaseFunction, Record, Scope, assert_same, managed, outcome, reference, unmanaged
from .ways import recorder_only

EVICT, OFFLOAD = 1, 2

pytestmark = [
    recorder_only,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TF32 acceleration"),
    pytest.mark.filterwarnings("error:memmgr"),
]

NEVER_ASLEEP = {  # no two passes in a row before the one that counts
    "exception_leaves_the_context",
    "forward_before_entering",
    "rnn_of_3000_steps",
}
HEAVY = {
    "chain_of_5000_unsaved_ops",
    "chain_of_5000_views_and_writes",
}  # seconds each; how long a chain is tests recipes, and asleep
# there are none
MODELS = ("mlp", "hf_gpt2", "inplace_ops", "views_saved", "checkpoint_reentrant", "retain_graph", "tree_lstm")


def offload_everything(manager: Manager) -> int:
    """What malloc does when the vault is empty and the recorder sleeps."""
    adopted = manager.surprise(1 << 40)
    for cell in manager.native.handled():
        manager.native.release(cell, OFFLOAD)
    return adopted


@pytest.fixture
def surprises(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Before each backward that begins asleep everything that may leave is offloaded; how many tensors were found each time."""
    met: list[int] = []
    scope = Manager.backward_scope

    @contextlib.contextmanager
    def surprised(self: Manager, *, outermost: bool, create_graph: bool) -> Iterator[None]:
        if outermost and self.sleeper.asleep:
            met.append(offload_everything(self))
            self.sleeper.surprises = 0  # it goes on sleeping, so that every later pass is met like this, too
        with scope(self, outermost=outermost, create_graph=create_graph):
            yield

    monkeypatch.setattr(Manager, "backward_scope", surprised)
    return met


@pytest.mark.parametrize("name", [n for n in [*test_hostile.HOLES, *exposed.HOLES] if n not in NEVER_ASLEEP | HEAVY])
def test_hole(name: str, surprises: list[int]) -> None:
    fn = (test_hostile.HOLES | exposed.HOLES)[name]
    assert_same(reference(fn), managed(fn, HUGE_BYTES, "auto", place="loop").record, "asleep")
    assert surprises, "it never slept, so nothing was tested"


@pytest.mark.parametrize("name", MODELS)
def test_training(name: str, surprises: list[int]) -> None:
    fn = cases.CASES[name].fn
    got = managed(fn, HUGE_BYTES, "auto", place="loop")
    assert_same(reference(fn), got.record, "asleep")
    assert surprises and got.stats["offloads"] > 0, "nothing left, so nothing was tested"


@pytest.mark.parametrize("name", test_hostile.ERRORS)
def test_the_same_error(name: str, surprises: list[int]) -> None:
    """A tensor that was written before its hooks came is autograd's error all the same."""
    fn = test_hostile.ERRORS[name]
    plain = outcome(lambda: unmanaged(fn))
    assert isinstance(plain.error, RuntimeError)
    outcome(lambda: managed(fn, HUGE_BYTES, "auto")).same_as(plain, "asleep")
    assert surprises, "it never slept, so nothing was tested"


# --- surprises as they come -------------------------------------------------------------------------------------------

SMALL, LARGE = 32, 512
CALM = CALM_PASSES + 1


def _larger(forward: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> CaseFunction:
    """Small passes, until the recorder sleeps, then a large one; and both once more."""

    def fn(seed: int, scope: Scope) -> Record:
        rows = [*[SMALL] * CALM, LARGE, *[SMALL] * CALM, LARGE]
        return cases.train(cases.MLP(depth=3), (torch.randn(n, 32) for n in rows), forward, scope, cases.sgd)

    return fn


def _mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def _writes_as_it_goes(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    h = model(x)
    for _ in range(4):
        h = (h * 1.5).clamp_(max=2.0)
        h = F.dropout(h.sin().mul_(0.5), 0.1)
    return h.square().mean()


def _held_and_written_through_data(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """`.data` moves no counter: autograd reads the new bytes, whatever was copied before."""
    held = model(x).exp()
    h = (held * held.tanh()).sin()
    for _ in range(6):
        h = h.sigmoid() * 1.5
    held.data.mul_(0.5)
    return h.square().mean()


def _inside_a_function(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return cases.SavesTemporary.apply(cases.HoldsOnCtx.apply(model(x)).tanh()).square().mean()


def _with_hooks_of_its_own(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
        h = model(x)
    return model(h.tanh()).square().mean()


LARGER = {
    f.__name__.strip("_"): _larger(f)
    for f in (
        _mean_square,
        _writes_as_it_goes,
        _held_and_written_through_data,
        _inside_a_function,
        _with_hooks_of_its_own,
    )
}


@pytest.mark.parametrize("name", LARGER)
def test_a_larger_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the large pass has too much goes to the tier from inside malloc; the same bits, inside the budget."""
    fn = LARGER[name]
    want = reference(fn)
    measured = managed(fn, HUGE_BYTES, "keep", _sleep=False).stats  # asleep nobody sees the large pass's floor
    limit = max(measured["unmanaged_peak_bytes"] // 2, int(1.15 * measured["floor_bytes"]))
    met: list[int] = []
    surprise = Manager.surprise

    def counted(self: Manager, wanted: int) -> int:
        if self.sleeper.asleep:
            met.append(wanted)
        return surprise(self, wanted)

    monkeypatch.setattr(Manager, "surprise", counted)
    got = managed(fn, limit, "auto")
    assert_same(want, got.record, "half")
    assert met and got.stats["offloads"] > 0, "no surprise came, so nothing was tested"


def test_a_larger_pass_asleep_is_told() -> None:
    """Nobody sees then what it needs at once, so `floor_bytes` is not about it."""
    stats = managed(LARGER["mean_square"], HUGE_BYTES, "keep").stats
    awake = managed(LARGER["mean_square"], HUGE_BYTES, "keep", _sleep=False).stats
    assert awake["recorded_peak_bytes"] == awake["unmanaged_peak_bytes"]
    assert stats["recorded_peak_bytes"] < 0.9 * stats["unmanaged_peak_bytes"]
    assert stats["floor_bytes"] < awake["floor_bytes"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_write_before_the_hooks_came_is_no_less_an_error(when: str) -> None:
    """The hooks of a surprise know no version of the time of saving, so what was written by then must not get them."""
    w = nn.Parameter(torch.randn(64, 64))
    with memmgr.budget("1GB", quiet=True):
        manager = _budget.current()
        assert manager is not None
        for _ in range(CALM):
            w.exp().sin().sum().backward()
        assert manager.sleeper.asleep
        y = w.exp()
        z = y.sin() * y.tanh()
        if when == "before":
            y.add_(1.0)
        assert offload_everything(manager) > 0
        if when == "after":
            y.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()
    del y, z
    gc.collect()


@pytest.mark.parametrize("dropped", ["before", "after"])
def test_a_graph_from_before_survives_writes_that_nobody_saw(dropped: str) -> None:
    """What was recorded before the sleep can only be made again from what it was made of; dropped before it or after it."""

    def let_go(action: int) -> None:
        manager = _budget.current()
        if manager is not None:
            for cell in manager.native.handled():
                manager.native.release(cell, action)

    def fn(seed: int, scope: Scope) -> Record:
        w, b, v, record = nn.Parameter(torch.randn(64, 64)), torch.randn(64, 64), nn.Parameter(torch.randn(8)), Record()
        with scope():
            for _ in range(2):  # the second time kinds are known
                other = v.exp().sin().sum()
                let_go(OFFLOAD)  # as long as something is gone the mode stays on in backward, and recipes are kept
                kept = ((w + b).exp() * (w * 2 - b).sigmoid()).sin().sum()
                if dropped == "before":
                    let_go(EVICT)
                v.exp().sum().backward()
            for _ in range(2 * CALM):
                v.exp().sin().sum().backward()
            with torch.no_grad():
                b.add_(1.0)
            manager = _budget.current()
            if manager is not None and manager.sleeper.asleep:
                manager.sleeper.wake()
            if dropped == "after":
                let_go(EVICT)
            kept.backward()
            other.backward()
        record.put("grad", w.grad)
        return record

    got = managed(fn, HUGE_BYTES, "auto", place="loop")
    assert_same(reference(fn), got.record, dropped)
    if dropped == "before":
        assert got.stats["evictions"] > 0, "nothing was dropped, so nothing was tested"
