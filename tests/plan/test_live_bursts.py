"""What a plan makes again in one go is made in one go: what several share, and nobody saved, runs once."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memmgr
from memmgr import _budget, _plans, _replay, _shim
from memmgr.policies import Action
from tests.budget.there import bytes_already_there

try:
    _native = _shim.load()
except _shim.NoShim as why:
    pytest.skip(f"plans are followed by the shim: {why}", allow_module_level=True)

WIDTHS = (36, 40, 44, 48, 52, 56, 60, 64)
ROWS = 1024
PASSES = 8


class Projections(nn.Module):
    """Each layer's three parts are saved; what they are parts of is not."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.ModuleList(nn.Linear(32, 3 * w) for w in WIDTHS)
        self.back = nn.ModuleList(nn.ModuleList(nn.Linear(w, 32) for _ in range(3)) for w in WIDTHS)

    def forward(self, x: Tensor) -> Tensor:
        for whole, back in zip(self.whole, self.back, strict=True):
            for part, down in zip(whole(x).chunk(3, -1), back, strict=True):
                x = x + down(part.tanh())
        return x.square().mean()


def all_away(trace: Any, *_: Any) -> _plans.Made:
    """Every saved part of a layer is dropped, and made again with the first of them that backward asks for."""
    first: dict[int, int] = {}
    for k, op in enumerate(trace.ops):
        for s in op.uses:
            first.setdefault(s, k)
    wanted = {4 * ROWS * w for w in WIDTHS}
    parts = [s for s in first if trace.storages[s].size_bytes in wanted and not trace.storages[s].name.startswith("c.")]
    sizes = {trace.storages[s].size_bytes for s in parts}
    back = {n: min(first[s] for s in parts if trace.storages[s].size_bytes == n) for n in sizes}
    return _plans.Made([(s, Action.EVICT, back[trace.storages[s].size_bytes]) for s in sorted(parts)])


def one_by_one(trace: Any, *_: Any) -> _plans.Made:
    """The same, each with its own use; what they are parts of is kept from the first that is made to the others."""
    made = all_away(trace)
    first: dict[int, int] = {}
    for k, op in enumerate(trace.ops):
        for s in op.uses:
            first.setdefault(s, k)
    away = [(s, action, first[s]) for s, action, _ in made.away]
    bursts: dict[int, list[int]] = {}
    for s, _, back in away:
        bursts.setdefault(trace.storages[s].size_bytes, []).append(back)
    carried = [(3 * size, min(backs), back) for size, backs in bursts.items() for back in backs if back > min(backs)]
    return _plans.Made(away, None, carried)


def train(limit: int | None, **options: Any) -> tuple[str, dict[str, Any]]:
    torch.manual_seed(0)
    model = Projections()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    sha = hashlib.sha256()
    with memmgr.budget(limit, quiet=True, **options) as mm:
        for _ in range(PASSES):
            loss = model(torch.randn(ROWS, 32))
            loss.backward()
            sha.update(repr(loss.item()).encode())
            del loss
            optimizer.step()
            optimizer.zero_grad()
            manager = _budget.current()
            assert manager is not None
            thread = manager.plans.thread
            if thread is not None:
                thread.join()
        stats = mm.stats()
    for parameter in model.parameters():
        sha.update(parameter.detach().numpy().tobytes())
    return sha.hexdigest(), stats


@pytest.fixture
def projections(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops that run again, by name."""
    monkeypatch.setitem(_plans.PLANNERS, "plan", all_away)
    ran: list[str] = []
    original = _replay.run_recipe

    def noted(native: Any, recipe: Any) -> list[Any]:
        ran.append(str(recipe.func))
        return original(native, recipe)

    monkeypatch.setattr(_replay, "run_recipe", noted)
    return ran


def limit_bytes() -> int:
    there = bytes_already_there()
    _, free = train(None)
    return there + int((free["resident_bytes.peak"] - there) * 0.6)


def in_planned_passes(ran: list[str], limit: int) -> tuple[str, float]:
    """The digest, and how many projections ran again per pass once the plan was there."""
    ran.clear()
    counts: list[tuple[int, int]] = []
    original = _plans.Plans.end_of_pass

    def ended(self: Any, *args: Any) -> None:
        original(self, *args)
        counts.append((self.counts.followed, sum(name == "aten.addmm.default" for name in ran)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_plans.Plans, "end_of_pass", ended)
        digest, stats = train(limit, policy="evict")
    assert stats["resident_bytes.peak"] <= limit
    planned = [(b[1] - a[1]) for a, b in zip(counts, counts[1:], strict=False) if b[0] > a[0]]
    assert len(planned) >= 3
    return digest, float(np.mean(planned))


def test_what_they_share_runs_once(projections: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    limit = limit_bytes()
    plain, _ = train(None)
    digest, together = in_planned_passes(projections, limit)
    assert digest == plain
    monkeypatch.setattr(_native, "plan_together", lambda cell: None)
    digest, one_by_one = in_planned_passes(projections, limit)
    assert digest == plain
    assert 0 < together <= len(WIDTHS) < one_by_one


def test_what_a_later_burst_needs_is_kept(projections: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_plans.PLANNERS, "plan", one_by_one)
    limit = limit_bytes()
    plain, _ = train(None)
    digest, kept = in_planned_passes(projections, limit)
    assert digest == plain
    monkeypatch.setitem(_plans.PLANNERS, "plan", lambda *args: _plans.Made(one_by_one(*args).away))
    digest, forgotten = in_planned_passes(projections, limit)
    assert digest == plain
    assert 0 < kept <= len(WIDTHS) < forgotten


def test_what_is_kept_goes_when_memory_is_short() -> None:
    with memmgr.budget("64MB", quiet=True):
        manager = _budget.current()
        assert manager is not None
        for ask in (lambda: manager.surprise(1), manager._retry):
            manager.replayer._kept = {3: [torch.ones(1000)]}
            assert ask()
            assert not manager.replayer._kept
        manager.replayer._kept = {3: [torch.ones(1000)]}
    assert not manager.replayer._kept


def test_others_that_fail_do_not_matter(projections: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No room for the others, or anything else about them: the one that was asked for is made all the same."""
    original = _replay.Replayer._make
    failed = []

    def make(self: Any, target: Any, wanted: list[Any], later: Any = ()) -> None:
        if len(wanted) > 1:
            failed.append(target.nbytes)
            raise torch.OutOfMemoryError("no room")
        original(self, target, wanted, later)

    monkeypatch.setattr(_replay.Replayer, "_make", make)
    limit = limit_bytes()
    plain, _ = train(None)
    digest, _ = in_planned_passes(projections, limit)
    assert digest == plain and failed


def test_a_burst_is_what_comes_back_before_the_same_op() -> None:
    class Measured:
        save_index = {10: 0, 11: 1, 12: 2, 13: 3, 14: 4, 15: 5}  # noqa: RUF012 - read only

    away = [(10, Action.EVICT, 7), (11, Action.OFFLOAD, 7), (12, Action.EVICT, 9), (13, Action.EVICT, 7)]
    away += [(12, Action.EVICT, 7), (14, Action.EVICT, 8), (99, Action.EVICT, 7)]
    made: Any = _plans.Made(away)
    measured: Any = Measured()
    numbers, _ = _plans.bursts(made, measured, _plans.decisions(made, measured, 6))
    assert numbers.tolist() == [0, -1, 1, 0, 2, -1]
