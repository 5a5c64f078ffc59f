"""Plans that passes follow: exact and inside the budget, whatever the pass does, and no searching while one is followed."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memmgr
from memmgr import _budget, _plans, _shim
from memmgr._manager import Manager
from memmgr.policies.trace.live_terms import decisions, in_triggers
from tests.budget import models
from tests.budget.there import bytes_already_there

STEPS = 8
MIB = 1 << 20


def manager() -> Manager:
    found = _budget.current()
    assert found is not None
    return found


class Chain(nn.Module):
    """Blocks of different widths, so that every save can be told from its neighbours; `path` says which of them run."""

    def __init__(self) -> None:
        super().__init__()
        widths = (96, 160, 128, 192, 112, 144)
        self.ups = nn.ModuleList(nn.Linear(64, w) for w in widths)
        self.downs = nn.ModuleList(nn.Linear(w, 64) for w in widths)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor, path: tuple[int, ...]) -> Tensor:
        for i in path:
            x = x + F.dropout(self.downs[i](F.gelu(self.ups[i](self.norm(x)))), 0.1)
        return x.square().mean()


FULL = (0, 1, 2, 3, 4, 5)


class Case:
    """A model, its optimizer, and batches whose length and path the test chooses."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Chain()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, rows: int = 1024, path: tuple[int, ...] = FULL) -> float:
        x = torch.randn(rows, 64)
        loss = self.model(x, path)
        loss.backward()
        value = loss.item()
        del loss, x
        self.optimizer.step()
        self.optimizer.zero_grad()
        return value

    def digest(self, losses: list[float]) -> str:
        sha = hashlib.sha256(str([loss.hex() for loss in losses]).encode())
        for tensor in self.model.state_dict().values():
            sha.update(tensor.numpy().tobytes())
        sha.update(torch.get_rng_state().numpy().tobytes())
        return sha.hexdigest()


Program = Callable[[Case, int], float]


def run(program: Program, share: float | None, steps: int = STEPS, **options: Any) -> tuple[str, dict[str, Any]]:
    """The program's digest, and memmgr's figures if it ran under one."""
    case = Case()
    if share is None:
        return case.digest([program(case, i) for i in range(steps)]), {}
    there = bytes_already_there()
    limit = there + int((NEED - there) * share) if share <= 1 else int(share)
    losses = []
    with memmgr.budget(limit, quiet=True, **options) as mm:
        for i in range(steps):
            losses.append(program(case, i))
            settle()
        assert not any(known.error for known in manager().plans.known.values())
        stats = mm.stats() | {"limit": limit}
    assert stats["resident_bytes.peak"] <= limit
    return case.digest(losses), stats


def settle() -> None:
    """Plans are made in a thread: the tests that are not about late ones wait for it."""
    thread = manager().plans.thread
    if thread is not None:
        thread.join()


def _need() -> int:
    case = Case()
    with memmgr.budget(None, quiet=True) as mm:
        case.step()
        case.step()
    return int(mm.stats()["resident_bytes.peak"])


NEED = _need()


def same(program: Program, share: float = 0.5, steps: int = STEPS, **options: Any) -> dict[str, Any]:
    """Runs with and without memmgr give the same bits; memmgr's figures."""
    plain, _ = run(program, None, steps)
    managed, stats = run(program, share, steps, **options)
    assert managed == plain
    return stats


# ---- the steady state ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["evict", "offload", "auto"])
@pytest.mark.parametrize("share", [0.75, 0.5])
def test_passes_that_begin_alike_follow_a_plan(policy: str, share: float) -> None:
    stats = same(lambda case, i: case.step(), share, policy=policy)
    assert stats["plans"] >= 1 and stats["planned_passes"] >= 2, stats
    if policy == "evict":
        assert stats["offloads"] == 0 < stats["evictions"]
    if policy == "offload":
        assert stats["recomputes"] == 0 < stats["offloads"]


def test_nobody_searches_while_a_plan_is_followed() -> None:
    case = Case()
    there = bytes_already_there()
    with memmgr.budget(there + (NEED - there) // 2, quiet=True, policy="evict") as mm:
        planned = 0
        for _ in range(12):
            before = mm.stats()
            case.step()
            settle()
            after = mm.stats()
            counts = manager().plans.counts
            if after["planned_passes"] > before["planned_passes"] and counts.short == planned:
                assert after["rankings"] == before["rankings"]
                assert after["unranked_releases"] == before["unranked_releases"]
                assert after["evictions"] > before["evictions"]
            planned = counts.short
        assert mm.stats()["planned_passes"] - manager().plans.counts.short >= 3


def test_the_plan_says_how_far_it_is_from_the_best() -> None:
    case = Case()
    there = bytes_already_there()
    with memmgr.budget(there + int((NEED - there) * 0.6), quiet=True, policy="evict"):
        for _ in range(5):
            case.step()
            settle()
        made = manager().plans.latest()
    assert made is not None and made.feasible
    assert 1.0 <= made.lower_bound <= made.overhead < 2.0


@pytest.mark.parametrize("policy", ["capuchin", "delta_taco"])
@pytest.mark.parametrize("share", [0.75, 0.5])
def test_published_planners_run_by_name(policy: str, share: float) -> None:
    stats = same(lambda case, i: case.step(), share, policy=policy)
    assert stats["plans"] >= 1 and stats["planned_passes"] >= 2, stats


def test_late_reads_move_their_triggers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow tier what comes back at the plan's moment is late; with the feedback it is asked for earlier."""
    moved: list[int] = []
    original = _plans.in_triggers

    def spy(*asked: Any) -> Any:
        moved.append(sum(asked[-1].values()))
        return original(*asked)

    monkeypatch.setattr(_plans, "in_triggers", spy)
    stats = same(lambda case, i: case.step(), 0.6, steps=14, policy="capuchin", _throttle=60_000_000)
    assert stats["planned_passes"] >= 4
    assert max(moved) > 0


def test_a_read_begins_at_the_use_that_the_plan_names() -> None:
    case = Case()
    there = bytes_already_there()
    with memmgr.budget(there + (NEED - there) // 2, quiet=True, policy="offload"):
        for _ in range(6):
            case.step()
            settle()
        known = next(iter(manager().plans.known.values()))
        assert known.made is not None
        trace, index = known.measured.trace, known.measured.save_index
        actions = decisions(known.made, index, len(known.sizes) // 8)
        pairs = in_triggers(known.made, trace, index, actions, {})
        earlier = in_triggers(known.made, trace, index, actions, {int(save): 2 for _, save in pairs})
    assert len(pairs) and {int(actions[save]) for _, save in pairs} == {2}
    order: list[int] = []
    for op in known.measured.trace.ops:
        for storage in op.uses:
            save = known.measured.save_index.get(storage)
            if save is not None and save not in order:
                order.append(save)
    for (used, save), (sooner, _) in zip(pairs.tolist(), earlier.tolist(), strict=True):
        assert order.index(used) < order.index(save)
        assert order.index(sooner) == max(0, order.index(used) - 2)


def test_other_policies_run_as_themselves() -> None:
    stats = same(lambda case, i: case.step(), policy="dtr")
    assert stats["plans"] == stats["planned_passes"] == 0 < stats["rankings"]


def test_with_room_for_everything_nothing_is_measured() -> None:
    stats = same(lambda case, i: case.step(), 8e9)  # less than the machine has, or it would be warned about
    assert stats["plans"] == 0 and stats["rankings"] == 0


# ---- reality deviates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [(1, 0, 2, 3, 4, 5), (0, 1, 2, 4, 3, 5), (0, 1, 2, 3, 5, 4), (0, 1, 2), (*FULL, 0, 3), (5,)],
    ids=["first", "middle", "last", "ends early", "goes on", "another"],
)
@pytest.mark.parametrize("policy", ["evict", "auto"])
def test_a_pass_that_deviates(path: tuple[int, ...], policy: str) -> None:
    at = 6
    stats = same(lambda case, i: case.step(path=path if i == at else FULL), steps=10, policy=policy)
    assert stats["planned_passes"] >= 3  # before and after it


def test_a_shape_never_seen() -> None:
    stats = same(lambda case, i: case.step(rows=1024 if i != 5 else 1376), 0.75)
    assert stats["planned_passes"] >= 2


def test_lengths_that_vary_have_plans_of_their_own() -> None:
    lengths = (1024, 640, 896)
    stats = same(lambda case, i: case.step(rows=lengths[i % 3]), steps=24)
    assert stats["plans"] >= 2 and stats["planned_passes"] >= 6


def test_a_path_that_depends_on_data() -> None:
    def step(case: Case, i: int) -> float:
        path = tuple(FULL[: 3 + int(torch.randint(4, (1,)))])
        return case.step(path=path)

    stats = same(step, steps=24)
    assert stats["plans"] >= 1 and stats["planned_passes"] >= 1


def test_no_two_passes_alike() -> None:
    lengths = random.Random(0).sample(range(512, 1024), 20)
    counts: dict[str, int] = {}

    def step(case: Case, i: int) -> float:
        value = case.step(rows=lengths[i])
        if _budget.current() is not None:
            counts["measured"] = manager().plans.counts.measured
        return value

    stats = same(step, steps=20)
    assert stats["planned_passes"] == 0
    assert counts["measured"] == 1  # the first; none came twice


@pytest.mark.parametrize("at", ["forward", "backward"])
def test_an_exception_in_mid_pass(at: str) -> None:
    class Stop(Exception):
        pass

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            raise Stop

    def broken(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if at == "forward":
            raise Stop
        return Raises.apply(output)  # type: ignore[no-any-return,no-untyped-call]

    def step(case: Case, i: int) -> float:
        if i != 5:
            return case.step()
        hook = case.model.downs[3].register_forward_hook(broken)
        with pytest.raises(Stop):
            case.step()
        hook.remove()
        case.optimizer.zero_grad()
        return 0.0

    stats = same(step, steps=10)
    assert stats["planned_passes"] >= 3


def test_a_plan_that_arrives_late(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    original = _plans.plan

    def slow(*args: Any, **kwargs: Any) -> Any:
        gate.wait(30)
        return original(*args, **kwargs)

    monkeypatch.setattr(_plans, "plan", slow)
    plain, _ = run(lambda case, i: case.step(), None, steps=10)
    case = Case()
    there = bytes_already_there()
    losses = []
    with memmgr.budget(there + (NEED - there) // 2, quiet=True) as mm:
        for i in range(10):
            if i == 5:
                assert mm.stats()["plans"] == 0
                gate.set()  # it is adopted at the end of whichever pass is under way
                settle()
            losses.append(case.step())
        assert mm.stats()["planned_passes"] >= 2
    assert case.digest(losses) == plain


def test_a_planner_that_fails_costs_nothing_but_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("no")

    monkeypatch.setattr(_plans, "plan", fails)
    plain, _ = run(lambda case, i: case.step(), None)
    case = Case()
    there = bytes_already_there()
    with memmgr.budget(there + (NEED - there) // 2, quiet=True) as mm:
        losses = []
        for _ in range(STEPS):
            losses.append(case.step())
            settle()
        assert [known.error for known in manager().plans.known.values()] == ["ValueError: no"]
        assert mm.stats()["plans"] == 0
    assert case.digest(losses) == plain


# ---- plans are decisions, never recipes ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_any_plan_at_all_is_exact(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions drawn at random: the run is slower for it, not wrong, and stays inside the budget."""
    dice = np.random.default_rng(seed)

    def anything(made: Any, measured: Any, saves: int) -> Any:
        return dice.integers(0, 3, saves).astype(np.uint8)

    monkeypatch.setattr(_plans, "decisions", anything)
    stats = same(lambda case, i: case.step(), 0.6, policy="auto")
    assert stats["planned_passes"] >= 2


def test_a_plan_that_keeps_too_much_is_made_stricter(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    original = _plans.plan

    def generous(trace: Any, budget_bytes: int, **kwargs: Any) -> Any:
        asked.append(budget_bytes)
        return original(trace, int(budget_bytes * 1.2), **kwargs)

    monkeypatch.setattr(_plans, "plan", generous)
    stats = same(lambda case, i: case.step(), steps=12, policy="evict")
    assert len(asked) > 1 and asked == sorted(asked, reverse=True)
    assert len(asked) <= 1 + _plans.MOST_TRIES
    assert stats["planned_passes"] >= 2


def test_in_place_writes_between_passes_and_inside() -> None:
    def step(case: Case, i: int) -> float:
        x = torch.randn(1024, 64)
        hidden = case.model.ups[0](x)
        hidden.mul_(0.5).relu_()
        loss = case.model(case.model.downs[0](hidden), FULL)
        loss.backward()
        with torch.no_grad():
            case.model.norm.weight.add_(0.01)
        value = loss.item()
        del loss, x, hidden
        case.optimizer.step()
        case.optimizer.zero_grad()
        return value

    stats = same(step, 0.6)
    assert stats["planned_passes"] >= 2


def test_gradient_accumulation_and_evaluation_between() -> None:
    def step(case: Case, i: int) -> float:
        total = 0.0
        for _ in range(2):
            loss = case.model(torch.randn(1024, 64), FULL)
            loss.backward()
            total += loss.item()
            del loss
        with torch.no_grad():
            total += case.model(torch.randn(256, 64), FULL).item()
        case.optimizer.step()
        case.optimizer.zero_grad()
        return total

    stats = same(step, 0.6)
    assert stats["planned_passes"] >= 4


def test_a_real_model() -> None:
    def digest(limit: int | None) -> tuple[list[float], int, dict[str, Any]]:
        torch.manual_seed(0)
        training = models.gpt(layers=3, width=64, context=64, batch=8)
        losses = []
        with memmgr.budget(limit, quiet=True, policy="auto") as mm:
            for _ in range(8):
                losses.append(training.step())
                settle()
            stats = mm.stats()
        sha = hashlib.sha256()
        for parameter in training.model.parameters():
            sha.update(parameter.detach().numpy().tobytes())
        return losses, int.from_bytes(sha.digest()[:8], "big"), stats

    there = bytes_already_there()
    plain_losses, plain, free = digest(None)
    limit = there + (free["resident_bytes.peak"] - there) // 2
    losses, managed, stats = digest(limit)
    assert (losses, managed) == (plain_losses, plain)
    assert stats["planned_passes"] >= 3 and stats["resident_bytes.peak"] <= limit


def test_ctrl_c_before_the_thread_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget closes as after any other interrupt."""

    def interrupted(self: threading.Thread) -> None:
        if self.name == "memmgr-plan":
            raise KeyboardInterrupt
        original(self)

    original = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    case = Case()
    there = bytes_already_there()
    with pytest.raises(KeyboardInterrupt), memmgr.budget(there + (NEED - there) // 2, quiet=True):
        for _ in range(STEPS):
            case.step()
    assert _budget.current() is None


def test_nothing_stays_behind() -> None:
    before = threading.active_count()
    native = _shim.load()
    same(lambda case, i: case.step())
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
    assert not native.plan_leads()
    # A plan of the last budget would be followed here.
    case = Case()
    with memmgr.budget(None, quiet=True):
        case.step()
        assert native.begin_pass()[2:4] == (-1, -1)
