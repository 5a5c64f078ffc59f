"""What a plan makes again in one go is made in one go: what several share, and nobody saved, runs once."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memmgr
from memmgr import _budget, _plans, _replay, _shim
from memmgr.policies import Action
from memmgr.policies.trace import TraceBuilder
from memmgr.policies.trace.live_terms import Made, bursts, decisions
from tests.budget.there import bytes_already_there

_native = _shim.load()

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


class Sums(nn.Module):
    """Each layer saves something of each of two products and of their sum, but neither product."""

    def __init__(self) -> None:
        super().__init__()
        self.products = nn.ModuleList(nn.ModuleList(nn.Linear(32, w) for _ in range(2)) for w in WIDTHS)
        self.back = nn.ModuleList(nn.ModuleList(nn.Linear(w, 32) for _ in range(3)) for w in WIDTHS)

    def forward(self, x: Tensor) -> Tensor:
        for products, back in zip(self.products, self.back, strict=True):
            first, second = (product(x) for product in products)
            for part, down in zip((first + second, first, second), back, strict=True):
                x = x + down(part.tanh())
        return x.square().mean()


def parts_of(trace: Any) -> dict[int, list[tuple[int, int]]]:
    """Of each layer, by the size of its saved parts: (op for which backward asks for it, part), in that order."""
    wanted = {4 * ROWS * w for w in WIDTHS}
    first: dict[int, int] = {}
    for k, op in enumerate(trace.ops):
        for s in op.uses:
            if trace.storages[s].size_bytes in wanted and not trace.storages[s].name.startswith("c."):
                first.setdefault(s, k)
    layers: dict[int, list[tuple[int, int]]] = {}
    for s, k in first.items():
        layers.setdefault(trace.storages[s].size_bytes, []).append((k, s))
    return {size: sorted(parts) for size, parts in layers.items()}


def all_away(trace: Any, *_: Any) -> Made:
    """Every saved part of a layer is dropped, and made again with the first of them that backward asks for."""
    away = [(s, Action.EVICT, parts[0][0]) for parts in parts_of(trace).values() for _, s in parts]
    return Made(sorted(away))


def one_by_one(trace: Any, *_: Any) -> Made:
    """The same, each with its own use; what they are parts of is kept from the first that is made to the others."""
    layers = parts_of(trace)
    away = sorted((s, Action.EVICT, k) for parts in layers.values() for k, s in parts)
    carried = [(3 * size, parts[0][0], k) for size, parts in layers.items() for k, _ in parts[1:]]
    return Made(away, None, carried)


def two_for_one(trace: Any, *_: Any) -> Made:
    """Of `Sums`: each product is kept, from the part of it that is made, to the part of the sum, which is made last."""
    layers = parts_of(trace)
    away = sorted((s, Action.EVICT, k) for parts in layers.values() for k, s in parts)
    carried = [(size, k, parts[-1][0]) for size, parts in layers.items() for k, _ in parts[:-1]]
    return Made(away, None, carried)


def train(limit: int | None, net: type[nn.Module] = Projections, **options: Any) -> tuple[str, dict[str, Any]]:
    torch.manual_seed(0)
    model = net()
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
def projections(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The products that run again, by their recipes."""
    monkeypatch.setitem(_plans.PLANNERS, "plan", all_away)
    ran: list[int] = []
    original = _replay.Replayer._outputs

    def noted(self: Any, recipe: Any, *rest: Any) -> list[Any] | None:
        if str(recipe.func) == "aten.addmm.default":
            ran.append(id(recipe))
        return original(self, recipe, *rest)

    monkeypatch.setattr(_replay.Replayer, "_outputs", noted)
    return ran


def limit_bytes(net: type[nn.Module] = Projections, share: float = 0.6) -> int:
    there = bytes_already_there()
    _, free = train(None, net)
    return there + int((free["resident_bytes.peak"] - there) * share)


def in_planned_passes(ran: list[int], limit: int, net: type[nn.Module] = Projections) -> tuple[str, float]:
    """The digest, and how often a product that runs again runs, on average over the passes that followed the plan."""
    passes: list[tuple[int, list[int]]] = []
    original = _plans.Plans.end_of_pass

    def ended(self: Any, *args: Any) -> None:
        original(self, *args)
        passes.append((self.counts.followed, ran.copy()))
        ran.clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_plans.Plans, "end_of_pass", ended)
        digest, stats = train(limit, net, policy="evict")
    assert stats["resident_bytes.peak"] <= limit
    planned = [after for (before, _), (followed, after) in zip(passes, passes[1:], strict=False) if followed > before]
    assert len(planned) >= 3 and all(planned)
    return digest, sum(map(len, planned)) / sum(len(set(recipes)) for recipes in planned)


def test_what_they_share_runs_once(projections: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    limit = limit_bytes()
    plain, _ = train(None)
    digest, together = in_planned_passes(projections, limit)
    assert digest == plain
    monkeypatch.setattr(_native, "plan_together", lambda cell: None)
    digest, one_by_one = in_planned_passes(projections, limit)
    assert digest == plain
    assert together == 1 < one_by_one


def test_what_a_later_burst_needs_is_kept(projections: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_plans.PLANNERS, "plan", one_by_one)
    limit = limit_bytes(share=0.7)  # the plan is made by hand, and says nothing of the room for what is kept
    plain, _ = train(None)
    digest, kept = in_planned_passes(projections, limit)
    assert digest == plain
    monkeypatch.setitem(_plans.PLANNERS, "plan", lambda *args: Made(one_by_one(*args).away))
    digest, forgotten = in_planned_passes(projections, limit)
    assert digest == plain
    assert kept == 1 < forgotten


def test_two_bursts_may_keep_something_for_a_third(projections: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_plans.PLANNERS, "plan", two_for_one)
    limit = limit_bytes(Sums, 0.7)
    plain, _ = train(None, Sums)
    digest, kept = in_planned_passes(projections, limit, Sums)
    assert digest == plain
    monkeypatch.setitem(_plans.PLANNERS, "plan", lambda *args: Made(two_for_one(*args).away))
    digest, forgotten = in_planned_passes(projections, limit, Sums)
    assert digest == plain
    assert kept == 1 < forgotten


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


def test_others_that_fail_do_not_matter(projections: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """No room for the others, or anything else about them: the one that was asked for is made all the same."""
    original = _replay.Replayer._make
    failed = []

    def make(self: Any, target: Any, wanted: list[Any], later: Any = (), **more: Any) -> None:
        if len(wanted) > 1:
            failed.append(target.nbytes)
            raise torch.OutOfMemoryError("no room")
        original(self, target, wanted, later, **more)

    monkeypatch.setattr(_replay.Replayer, "_make", make)
    limit = limit_bytes()
    plain, _ = train(None)
    digest, _ = in_planned_passes(projections, limit)
    assert digest == plain and failed


def test_a_burst_is_what_comes_back_before_the_same_op() -> None:
    save_index = {10: 0, 11: 1, 12: 2, 13: 3, 14: 4, 15: 5}
    away = [(10, Action.EVICT, 7), (11, Action.OFFLOAD, 7), (12, Action.EVICT, 9), (13, Action.EVICT, 7)]
    away += [(12, Action.EVICT, 7), (14, Action.EVICT, 8), (99, Action.EVICT, 7)]
    made = Made(away)
    numbers, _, _ = bursts(made, TraceBuilder().build(), save_index, decisions(made, save_index, 6))
    assert numbers.tolist() == [0, -1, 1, 0, 2, -1]
