"""Rule 7: what is not known to reproduce is made again for nobody, whether autograd saved its result or not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memmgr
from memmgr import _recorder, _replay
from tests.budget.there import bytes_already_there

from .harness import HUGE_BYTES, Record, Scope, assert_same, managed, reference
from .ways import PAGER, recorder_only

ROWS = 67  # shapes that no other test has: kinds are remembered for as long as the process lives

Step = Callable[[torch.Tensor], torch.Tensor]


def functional(h: torch.Tensor) -> torch.Tensor:
    return h * 1.25 + 0.5


def in_place(h: torch.Tensor) -> torch.Tensor:
    y = h + 0.5
    y.mul_(1.25)
    return y


def batch_norm(h: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(h, torch.zeros(h.shape[1]), torch.ones(h.shape[1]), training=True)


def drawn(h: torch.Tensor) -> torch.Tensor:
    return h + torch.rand_like(h)


STEPS: dict[str, tuple[Step, tuple[str, ...]]] = {
    "functional": (functional, ("aten.mul.Tensor",)),
    "in place": (in_place, ("aten.mul_.Tensor",)),
    "batch norm": (batch_norm, ("aten.native_batch_norm.default", "aten._native_batch_norm_legit.no_stats")),
    "drawn": (drawn, ("aten.rand_like.default", "aten.uniform_.default")),
}


def training(step: Step, width: int) -> Callable[[int, Scope], Record]:
    def fn(seed: int, scope: Scope) -> Record:
        model = nn.Linear(width, width)
        x = torch.randn(ROWS, width)
        record = Record()
        with scope():
            for _ in range(3):
                h = model(x)
                for _ in range(4):
                    h = torch.tanh(step(h))  # autograd saves tanh's result, and nothing of the step
                loss = h.square().mean()
                loss.backward()
                record.losses(loss)
                del loss, h
        record.model(model)
        return record

    return fn


def spoil(outputs: list[Any]) -> list[Any]:
    """Other bytes than the op gave first."""
    for tensor in outputs:
        if tensor is not None and tensor.numel():
            torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())[0] ^= 1
    return outputs


@recorder_only
@pytest.mark.parametrize("known", ["refused", "unproven"])
@pytest.mark.parametrize("name", STEPS)
def test_what_is_not_known_to_reproduce_is_never_run_again(
    name: str, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, ops = STEPS[name]
    fn = training(step, 96 + 2 * list(STEPS).index(name) + (known == "refused"))
    want = reference(fn)
    again: list[str] = []
    tried, replayed = _recorder.run_recipe, _replay.Replayer._outputs

    def trial(native: Any, recipe: Any) -> list[Any]:
        outputs = tried(native, recipe)
        return spoil(outputs) if str(recipe.func) in ops else outputs

    def replay(self: Any, recipe: Any, *rest: Any) -> list[Any] | None:
        again.append(str(recipe.func))
        outputs = replayed(self, recipe, *rest)
        return spoil(outputs) if outputs is not None and str(recipe.func) in ops else outputs

    monkeypatch.setattr(_recorder, "run_recipe", trial)
    monkeypatch.setattr(_replay.Replayer, "_outputs", replay)
    if known == "unproven":
        wanted = _recorder.Recorder._proof_wanted
        monkeypatch.setattr(
            _recorder.Recorder, "_proof_wanted", lambda self, r: str(r.func) not in ops and wanted(self, r)
        )
    got = managed(fn, HUGE_BYTES, "torture", place="inside")
    assert_same(want, got.record, f"{name}, {known}")
    assert got.stats["evictions"] > 0 and again, "nothing was dropped, so nothing was tested"
    assert not set(again) & set(ops)


def narrowing() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i in range(12):  # each layer is of kinds of its own, and the late ones are met when memory is full
        layers += [nn.Linear(700 - 16 * i, 684 - 16 * i), nn.Sigmoid()]
    return nn.Sequential(*layers), torch.randn(3001, 700)


def test_room_is_made_to_prove_what_is_met_when_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was unproven could not be dropped, so without a tier the first pass ended where every later one would have run."""
    model, x = narrowing()
    with memmgr.budget(None, quiet=True, _sleep=False) as mm:  # proves nothing
        model(x).sum().backward()
    there = sum(p.nbytes for p in model.parameters()) * 2 + x.nbytes
    limit = there + (mm.stats()["resident_bytes.peak"] - there) * 6 // 10

    def first_pass() -> int:
        with memmgr.budget(limit, policy="evict", quiet=True, _plan=False) as mm:
            model(x).sum().backward()
        return int(mm.stats()["evictions"])

    if not PAGER:
        monkeypatch.setattr(_recorder, "MAX_ROOM", 0)
        with pytest.raises(memmgr.BudgetError):
            first_pass()
        monkeypatch.undo()
    assert first_pass() > 0


def test_a_trial_before_a_write_takes_nothing_that_the_write_would_strand() -> None:
    """What needs the old bytes is brought back before a write; room made for the write's own trial would take it again."""
    steps = 6

    def train(scope: Any, rows: int) -> bytes:
        torch.manual_seed(0)
        weight = torch.randn(1009, requires_grad=True)
        buffers = [torch.zeros(rows, 1009) for _ in range(steps)]
        x = torch.randn(rows * steps + 1009)
        with scope:
            total = weight.sum()
            for i, buffer in enumerate(buffers):
                total = total + torch.sigmoid_(buffer + weight * (i + 1)).sum()
                buffer.copy_(x.as_strided((rows, 1009), (i + 1, 1)))  # a kind of its own
            buffers.clear()
            del buffer  # backward needs less than the last write
            total.backward()
        assert weight.grad is not None
        return weight.grad.numpy().tobytes()

    fitted = 0
    for units in range(23, 28):
        rows = 100 + 8 * units  # kinds are remembered for as long as the process lives
        want = train(contextlib.nullcontext(), rows)
        there = bytes_already_there()
        with contextlib.suppress(memmgr.BudgetError):
            budget = memmgr.budget(there + units * rows * 1009 * 2, policy="evict", quiet=True, _plan=False)
            assert train(budget, rows) == want
            fitted += 1
    assert fitted
