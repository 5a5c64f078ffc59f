"""What a plan drops a second time is dropped a second time: where it makes some to make others, and near the floor."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memmgr
from memmgr import _budget, _plans
from memmgr.policies import Action
from memmgr.policies.trace.live_terms import Made
from tests.budget.there import bytes_already_there

ROWS, WIDTHS = 1024, (96, 100, 104, 108, 112, 116, 120, 124)
STEPS = 8


class Chain(nn.Module):
    """Each activation is made of the one before, and nothing is held: dropped, one brings back all before it."""

    def __init__(self) -> None:
        super().__init__()
        pairs = zip((96, *WIDTHS), WIDTHS, strict=False)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Run:
    """A training under a budget, pass by pass."""

    def __init__(self, mm: Any) -> None:
        torch.manual_seed(0)
        self._mm = mm
        self._model = Chain()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-2)
        self._sha = hashlib.sha256()

    def step(self) -> dict[str, int]:
        """What the pass did."""
        before = self._mm.stats()
        loss = self._model(torch.randn(ROWS, 96))
        loss.backward()
        self._sha.update(repr(loss.item()).encode())
        del loss
        self._optimizer.step()
        self._optimizer.zero_grad()
        manager = _budget.current()
        assert manager is not None
        if manager.plans.thread is not None:
            manager.plans.thread.join()
        after = self._mm.stats()
        names = ("evictions", "offloads", "recomputes", "planned_passes", "unranked_releases", "rankings")
        return {name: after[name] - before[name] for name in names}

    def digest(self) -> str:
        for parameter in self._model.parameters():
            self._sha.update(parameter.detach().numpy().tobytes())
        return self._sha.hexdigest()


@contextmanager
def opened(share: float | None, **options: Any) -> Iterator[Run]:
    gc.collect()  # the parameters of the run before
    there = bytes_already_there()
    limit = None if share is None else there + int(_OWN * share)
    with memmgr.budget(limit, quiet=True, **options) as mm:
        yield Run(mm)


def _own() -> int:
    gc.collect()
    there = bytes_already_there()
    with memmgr.budget(None, quiet=True) as mm:
        run = Run(mm)
        run.step()
        run.step()
        return int(mm.stats()["resident_bytes.peak"]) - there


_OWN = _own()


@pytest.fixture(scope="module")
def plain() -> str:
    with opened(None) as run:
        for _ in range(STEPS):
            run.step()
        return run.digest()


def even(trace: Any) -> Any:
    """The same pass with times that do not depend on what the machine did meanwhile."""
    return replace(trace, ops=tuple(replace(op, seconds=1e-6 * (1 + len(op.inputs))) for op in trace.ops))


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    original = _plans.smoothed
    monkeypatch.setattr(_plans, "smoothed", lambda trace: even(original(trace)))


def test_a_plan_near_the_floor_is_followed_to_its_last_decision(steady: None, plain: str) -> None:
    with opened(0.52, policy="evict") as run:
        passes = [run.step() for _ in range(STEPS)]
        manager = _budget.current()
        assert manager is not None
        known = next(iter(manager.plans.known.values()))
        assert known.made is not None and known.made.again, "nothing goes twice, so nothing is tested"
        saved = [s for s, *_ in (*known.made.away, *known.made.again) if s in known.measured.save_index]
        assert run.digest() == plain
    assert known.tries == 0, "a pass ran short, so a stricter plan was made"
    assert passes[-1]["planned_passes"] == 1
    assert passes[-1]["unranked_releases"] == 0 == passes[-1]["rankings"]
    assert len(saved) - 2 <= passes[-1]["evictions"] <= len(saved)  # what need not leave after all stays


def test_without_them_it_runs_short(steady: None, plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the test above tests something."""
    original = _plans.PLANNERS["plan"]

    def first_only(*args: Any) -> Any:
        made = original(*args)
        return made and replace(made, again=[])

    monkeypatch.setitem(_plans.PLANNERS, "plan", first_only)
    with opened(0.52, policy="evict") as run:
        for _ in range(STEPS):
            run.step()
        manager = _budget.current()
        assert manager is not None
        assert next(iter(manager.plans.known.values())).tries > 0
        assert run.digest() == plain


def test_what_was_offloaded_may_go_twice(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: the first activation is written out, is back for the use of the last, and goes once more until its own."""

    def twice(trace: Any, *_: Any) -> Made:
        first: dict[int, int] = {}
        for k, op in enumerate(trace.ops):
            for s in op.uses:
                if not trace.storages[s].name.startswith("c."):
                    first.setdefault(s, k)
        order = sorted(first, key=first.__getitem__)
        last, early = order[0], order[-2:]
        away = [(s, Action.OFFLOAD, first[last] + 1) for s in early]
        again = [(s, Action.OFFLOAD, first[order[1]], first[s]) for s in early]
        return Made([*away, *((s, a, back) for s, a, _, back in again)], again=again)

    monkeypatch.setitem(_plans.PLANNERS, "plan", twice)
    with opened(0.8, policy="offload") as run:
        passes = [run.step() for _ in range(STEPS)]
        assert run.digest() == plain
    assert any(p["planned_passes"] for p in passes)


@pytest.mark.parametrize("seed", range(4))
def test_any_rows_at_all_are_exact(seed: int, plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Second absences drawn at random: the run is slower for it, not wrong, and stays inside the budget."""
    dice = np.random.default_rng(seed)
    original = _plans.bursts

    def anything(*asked: Any) -> Any:
        numbers, carried, _ = original(*asked)
        n = len(numbers)
        rows = np.stack(
            [dice.integers(-1, n + 2, 3 * n), dice.integers(-1, n + 2, 3 * n), dice.integers(0, 3, 3 * n),
             dice.integers(-1, 4 * n, 3 * n)], axis=1,
        )  # fmt: skip
        return numbers, carried, rows.astype(np.int32)

    monkeypatch.setattr(_plans, "bursts", anything)
    with opened(0.7, policy="auto") as run:
        passes = [run.step() for _ in range(STEPS)]
        stats = run._mm.stats()
        assert run.digest() == plain
    assert any(p["planned_passes"] for p in passes)
    assert stats["resident_bytes.peak"] <= stats["budget_bytes"]


def test_a_plan_without_a_margin_is_better_than_none(monkeypatch: pytest.MonkeyPatch, plain: str) -> None:
    original, asked = _plans.plan, []

    def only_just(trace: Any, budget_bytes: int, **more: Any) -> Any:
        manager = _budget.current()
        assert manager is not None
        asked.append(budget_bytes)
        if budget_bytes < manager.config.limit_bytes:
            return original(trace, 1, **more)
        return original(trace, budget_bytes, **more)

    monkeypatch.setattr(_plans, "plan", only_just)
    with opened(0.7, policy="evict") as run:
        passes = [run.step() for _ in range(STEPS)]
        assert run.digest() == plain
    assert asked[1] > asked[0] and any(p["planned_passes"] for p in passes)
