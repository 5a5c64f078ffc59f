"""Measured periods, their plans, and the pager following them: the same bits, the budget, and the gain of a plan."""

import copy
import errno
import functools
import itertools
import os
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from budget import models
from torch import nn

import memmgr
from memmgr.api import budget as budgets
from memmgr.common.constants import Row
from memmgr.native import binding
from memmgr.policies.rules.registry import STREAMING
from memmgr.policies.trace import TraceError
from memmgr.runtime import planner_process, planning, timeline
from memmgr.runtime.plans import MOST_TRIES
from memmgr.tools.bench.models import DenseNet, TreeLSTM

from .planned import STEPS, bits, need, plain, run, settled, sizes, trained, under

__all__ = ["sizes"]  # a fixture

pytestmark = [pytest.mark.filterwarnings("error:memmgr"), pytest.mark.usefixtures("sizes")]


# Auto plans for seconds. `test_a_plan_is_done_as_it_says` has a DenseNet and a tree LSTM. The rest is slow.
_QUICK = {"gpt": ["auto", "offload"], "unet": ["evict"], "lstm": [], "densenet": []}


@pytest.mark.parametrize(
    ("model", "policy"),
    [
        pytest.param(model, policy, marks=[pytest.mark.slow] * (policy not in quick))
        for model, quick in _QUICK.items()
        for policy in ("auto", "evict", "offload")
    ],
)
def test_a_plan_is_followed_with_the_same_bits(model: str, policy: str) -> None:
    make = models.MODELS[model]
    share = 0.7 if policy == "offload" else 0.55
    got, figures, limit = under(make, share, policy)
    assert got == plain(make)
    last = figures[-1]
    assert last["plans"] >= 1 and last["planned_passes"] >= 2
    assert last["resident_bytes.peak"] <= limit
    if policy == "evict":
        assert last["offloads"] == 0
    if policy == "offload":
        assert last["recomputes"] == 0
        assert last["reads_ahead"] > 0 and last["clean_drops"] > 0


def test_a_plan_makes_less_again_than_malloc_does_for_itself() -> None:
    """Malloc's own order is bad at an LSTM's chains."""
    make = functools.partial(models.lstm, time=32)
    _, planned, _ = under(make, 0.5, "evict")
    _, alone, _ = under(make, 0.5, "evict", _plan=False)

    def of_the_last_step(figures: list[dict[str, Any]]) -> int:
        return int(figures[STEPS - 1]["recomputes"] - figures[STEPS - 2]["recomputes"])

    assert of_the_last_step(planned) < of_the_last_step(alone)
    assert alone[-1]["plans"] == 0


def test_a_fork_while_copies_are_under_way() -> None:
    """No thread waits for the tier in a way that the fork has closed, and the child reads inherited bytes."""
    make = functools.partial(models.gpt, layers=2)
    children = []

    def fork(_: int) -> None:
        settled()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        children.append(pid)

    limit = int(need(make) * 0.6)
    torch.manual_seed(0)
    training = make()
    with memmgr.budget(limit, quiet=True, policy="offload", _throttle=60_000_000) as mm:
        handle = training.model.register_forward_hook(lambda *_: fork(0))
        for _ in range(5):
            training.step()
            fork(0)
        handle.remove()
    assert mm.stats()["write_backs"] > 0
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 10


class Alternating(models.Training):
    """Every other step has another length, so its period is another sequence."""

    def __init__(self) -> None:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(10)])
        self.turn = 0
        data = [torch.randn(1024, 128), torch.randn(1280, 128)]

        def loss() -> torch.Tensor:
            self.turn += 1
            return model(data[self.turn % 2]).square().mean()

        super().__init__(model, loss)


def test_two_sequences_have_a_plan_each() -> None:
    got, figures, _ = under(Alternating, 0.7, steps=11)
    assert got == trained(Alternating, 11)
    assert figures[-1]["plans"] >= 2 and figures[-1]["planned_passes"] >= 2


class Deviating(models.Training):
    """In some steps, in the middle of forward, something else happens."""

    def __init__(self) -> None:
        layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(10))
        x, self.step_number = torch.randn(1024, 128), 0

        def loss() -> torch.Tensor:
            self.step_number += 1
            h = x
            for i, layer in enumerate(layers):
                h = torch.tanh(layer(h))
                if i == 5 and self.step_number in (6, 8):
                    h = h * torch.sigmoid(h) + h.detach().clone()
            return h.square().mean()

        super().__init__(layers, loss)


# The pager compares ops with the plan's, whichever policy has made it; auto plans for seconds.
@pytest.mark.parametrize("policy", [pytest.param("auto", marks=pytest.mark.slow), "evict"])
def test_a_period_that_deviates_is_finished_without_the_plan(policy: str) -> None:
    got, figures, limit = under(Deviating, 0.65, policy, STEPS + 2)
    assert got == trained(Deviating, STEPS + 2)
    assert figures[5]["planned_passes"] == figures[4]["planned_passes"] > 0
    assert figures[6]["planned_passes"] == figures[5]["planned_passes"] + 1
    assert figures[-1]["resident_bytes.peak"] <= limit


def test_a_plan_that_cannot_be_made_costs_nothing_but_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    from memmgr.runtime import planners

    def refuses(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(planner_process, "executor", planner_process.InThread)
    monkeypatch.setattr(planners, "plan", refuses)
    got, figures, _ = under(models.MODELS["unet"], 0.6)
    assert got == plain(models.MODELS["unet"])
    assert figures[-1]["plans"] == 0


class States(models.Training):
    """Little is computed, and most of it lives from one step to the next."""

    def __init__(self, between: "Callable[[States, int], None]" = lambda *_: None) -> None:
        layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(10)]
        model = nn.Sequential(*layers, nn.Linear(256, 10))
        x, y = torch.randn(128, 256), torch.randint(10, (128,))
        super().__init__(model, lambda: nn.functional.cross_entropy(model(x), y))
        self.between, self.steps = between, 0
        self.others: list[torch.Tensor] = []

    def step(self) -> float:
        self.steps += 1
        self.between(self, self.steps)
        return super().step()


def moved(figures: list[dict[str, Any]]) -> int:
    """Bytes to the tier and back in the last step."""
    now, before = figures[STEPS - 1], figures[STEPS - 2]
    return int(sum(now[k] - before[k] for k in ("offload_bytes", "reload_bytes")))


@pytest.mark.parametrize("share", [0.7, 0.45, 0.3])
def test_what_lives_from_step_to_step_streams_by_a_plan(share: float) -> None:
    """A plan that reaches over the end of the period: tensors from the begin are read before their ops, in the plan's
    order."""
    got, figures, limit = under(States, share, "offload")
    assert got == plain(States)
    now, before = figures[STEPS - 1], figures[STEPS - 2]
    assert now["planned_passes"] - before["planned_passes"] == 1
    assert now["resident_bytes.peak"] <= limit
    assert now["reads_ahead"] > before["reads_ahead"]
    assert now["clean_drops"] > before["clean_drops"]
    if share == 0.7:  # malloc's order scans states that it has just evicted, and most of them could stay resident
        _, alone, _ = under(States, share, "offload", _plan=False)
        assert moved(figures) < 0.9 * moved(alone)


@pytest.mark.parametrize(
    ("policy", "share"), [(name, 0.45) for name in STREAMING if name != "zero_offload"] + [("zero_offload", 0.75)]
)
def test_published_planners_of_states_are_followed(policy: str, share: float) -> None:
    """Nothing runs again: the net beneath them only offloads."""
    got, figures, limit = under(States, share, policy)
    assert got == plain(States)
    now, before = figures[STEPS - 1], figures[STEPS - 2]
    assert now["planned_passes"] - before["planned_passes"] == 1
    assert now["resident_bytes.peak"] <= limit
    assert now["offload_bytes"] > before["offload_bytes"] and now["evictions"] == 0


def test_a_step_moves_what_its_plan_says() -> None:
    torch.manual_seed(0)
    training = States()
    limit = int(need(States) * 0.45)
    figures = []
    with memmgr.budget(limit, quiet=True, policy="offload") as mm:
        for _ in range(STEPS):
            training.step()
            settled()
            figures.append(mm.stats())
        runtime: Any = budgets.current()
        planned = runtime.plans.latest().moved_bytes
    assert moved(figures) == pytest.approx(planned, rel=0.1)  # in blocks of 3 % of all of it each


def test_who_leaves_a_place_of_the_length_that_is_asked_for_goes_first() -> None:
    """Else pages would have to be moved to make one of two."""
    native = binding.load()
    short, long = torch.randn(3 << 18), torch.randn(5 << 18)  # 3 and 5 MiB
    plain = [t + 1 + 1 for t in (short, long)]

    def begin() -> None:
        short.add_(1)
        long.add_(1)

    with memmgr.budget(25 << 19, quiet=True, policy="offload", _plan=False):
        native.next_period(True)
        begin()
        native.next_period(True)
        timeline = native.timeline()
        ordinals = np.frombuffer(timeline["ordinal"], dtype=np.uint32)
        assert len(ordinals) == 2  # the shorter one, then the other
        rows = [
            np.array([(1, o, what) for o in ordinals], dtype=np.int64).tobytes() for what in (Row.OFFLOAD, Row.MAKE)
        ]
        departures, writes = rows
        native.add_plan(
            hashes=timeline["hashes"] + bytes(8), departures=departures, writes=writes, reads=b"", groups=b"", kept=b""
        )
        begin()
        patience = time.monotonic() + 20
        while not all(native.describe(t)["clean"] for t in (short, long)):
            assert time.monotonic() < patience, (native.tier_stats(), native.stats())
            native.drain()
            time.sleep(0.01)
        asked = torch.ones(5 << 18)
        assert [native.describe(t)["residency"] for t in (short, long, asked)] == ["resident", "offloaded", "resident"]
    assert [short.equal(plain[0]), long.equal(plain[1])] == [True, True]


def test_of_plans_that_begin_alike_the_one_leads_that_has_come_after_this_period_before() -> None:
    torch.manual_seed(0)
    training = States()
    limit = int(need(States) * 0.7)
    figures = []
    with memmgr.budget(limit, quiet=True, policy="offload") as mm:
        for step in range(STEPS + 4):
            training.step()
            settled()
            figures.append(mm.stats())
            if step == STEPS - 1:
                native = binding.load()
                hashes = native.timeline()["hashes"][:8] + bytes(8)  # it goes on otherwise after the first op
                writes = np.array([(0, ordinal, 0) for ordinal in range(40)], dtype=np.int64).tobytes()
                native.add_plan(hashes=hashes, departures=b"", writes=writes, reads=b"", groups=b"", kept=b"")
    of_each = [now["write_backs"] - before["write_backs"] for before, now in itertools.pairwise(figures)]
    assert figures[-1]["planned_passes"] - figures[STEPS - 1]["planned_passes"] == 4
    # The other one writes tensors that the first op has touched. Fewer are a slow disk's: a write under way is not
    # begun again.
    assert 0 < max(of_each[STEPS - 1 :]) <= max(of_each[: STEPS - 1])


def test_the_link_is_measured_by_copies_that_nobody_waits_for() -> None:
    torch.manual_seed(0)
    training = States()
    with memmgr.budget(int(need(States) * 0.7), quiet=True, policy="offload"):
        for _ in range(STEPS):
            training.step()
            settled()
        native = binding.load()
        native.set_link(1.0)  # seconds a byte
        training.step()
        rates = native.link()
        assert max(rates["write_seconds_per_byte"], rates["read_seconds_per_byte"]) < 0.9


def other_states(training: States, step: int) -> None:
    """In the place of the optimizer's states, others; those that a plan knows have ended."""
    if step in (5, 7):
        training.optimizer.load_state_dict(training.optimizer.state_dict())


def other_layers(training: States, step: int) -> None:
    if step in (5, 6):
        model: Any = training.model
        with torch.no_grad():
            model[step - 3][0].weight = nn.Parameter(model[step][0].weight.clone())
        training.optimizer = torch.optim.AdamW(model.parameters())


def looks_on(training: States, step: int) -> None:
    """Between two steps the model is only read."""
    if step in (5, 7):
        with torch.no_grad():
            training.loss()


def gradients_stay(training: States, step: int) -> None:
    training.optimizer.zero_grad(set_to_none=step % 2 == 0)


def twice(training: States, step: int) -> None:
    if step >= 4:
        training.loss().backward()


def two_buffers(training: States, step: int) -> None:
    """Parameters take turns with a second set of storages."""
    if not training.others:
        training.others = [p.detach().clone() for p in training.model.parameters()]
    for i, p in enumerate(training.model.parameters()):
        p.data, training.others[i] = training.others[i], p.data


def other_storages(training: States, step: int) -> None:
    if step in (5, 7, 8):
        parameters = list(training.model.parameters())
        for p in parameters[::2]:
            p.data = p.data.clone()
        torch.utils.swap_tensors(parameters[2], nn.Parameter(parameters[2].detach().clone()))
        state = copy.deepcopy(training.optimizer.state_dict())
        training.optimizer.state.clear()
        training.optimizer.load_state_dict(state)


def interrupted(training: States, step: int) -> None:
    """Backward ends in its middle, which ends the period there."""
    if step in (5, 8):

        def stop(_: torch.Tensor) -> None:
            raise KeyboardInterrupt

        handle = list(training.model.parameters())[8].register_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            training.loss().backward()
        handle.remove()


CHANGES = (other_states, other_layers, looks_on, gradients_stay, twice, two_buffers, other_storages, interrupted)


@pytest.mark.parametrize("between", CHANGES)
@pytest.mark.parametrize("policy", [pytest.param("auto", marks=pytest.mark.slow), "offload"])  # the same plan of states
def test_what_happens_between_steps_that_a_plan_spans(policy: str, between: Callable[..., None]) -> None:
    wrong: list[str] = []

    def make() -> States:
        return States(lambda training, step: (between(training, step), wrong.extend(errors())))

    got, figures, limit = under(make, 0.45, policy, steps=9)
    assert got == trained(make, 9)
    assert figures[-1]["resident_bytes.peak"] <= limit
    assert figures[-1]["plans"] >= 1 and figures[-1]["offloads"] > 0 and not wrong


def errors() -> list[str]:
    """The errors of all plans until now; none outside of a budget."""
    runtime: Any = budgets.current()
    return [] if runtime is None else [text for text in runtime.plans.errors() if text != "no schedule fits"]


class Replaced:
    """Without an optimizer: each step makes parameters and momenta of those that are there, which then end."""

    def __init__(self) -> None:
        self.x = torch.randn(64, 128)
        self.weights = [torch.randn(128, 128).mul_(0.05).requires_grad_() for _ in range(10)]
        self.momenta = [torch.zeros(128, 128) for _ in self.weights]
        self.model, self.optimizer = self, types.SimpleNamespace(state={})

    def parameters(self) -> list[torch.Tensor]:
        return [*self.weights, *self.momenta]

    def step(self) -> float:
        h = self.x
        for weight in self.weights:
            h = torch.tanh(h @ weight)
        loss = h.square().mean()
        gradients = torch.autograd.grad(loss, self.weights)
        with torch.no_grad():
            for i, gradient in enumerate(gradients):
                self.momenta[i] = self.momenta[i] * 0.9 + gradient
                self.weights[i] = (self.weights[i] - 0.1 * self.momenta[i]).requires_grad_()
        return loss.item()


def test_parameters_that_each_step_makes_anew() -> None:
    got, figures, limit = under(Replaced, 0.5, "offload", steps=10)
    assert got == trained(Replaced, 10)
    assert figures[-1]["resident_bytes.peak"] <= limit and figures[-1]["offloads"] > 0


def test_forked_children_read_all_that_a_followed_cycle_has_away() -> None:
    sums: list[int] = []
    ends: list[int] = []

    def note(training: States, step: int) -> None:
        if budgets.current() is None:
            sums.append(hash(b"".join(bits(training))))
            return
        settled()
        child = os.fork()
        if child == 0:
            try:
                os._exit(0 if hash(b"".join(bits(training))) == sums[step - 1] else 1)
            finally:
                os._exit(2)
        ends.append(os.waitpid(child, 0)[1])

    def make() -> States:
        return States(note)

    want = trained(make, 10)
    limit = int(need(States) * 0.5)
    with memmgr.budget(limit, quiet=True, policy="offload") as mm:
        training, losses = run(make, 10)
    assert (losses, bits(training)) == want
    assert ends == [0] * 10
    assert mm.stats()["planned_passes"] >= 2 and mm.stats()["reads_ahead"] > 0


@pytest.mark.parametrize("after", [3, 12])
def test_a_write_that_fails_while_a_cycle_is_followed(after: int) -> None:
    """A tensor whose write failed stays, and can be evicted another time."""

    def fail(training: States, step: int) -> None:
        # Again in each step until one is met: the failed write may be one that no op waits for any more.
        if (runtime := budgets.current()) is not None and step >= 4 and not runtime.native.stats()["tier_errors"]:
            runtime.native.tier_inject(write=errno.ENOSPC, after_writes=after)

    def make() -> States:
        return States(fail)

    limit = int(need(States) * 0.55)
    with memmgr.budget(limit, quiet=True, policy="offload") as mm:
        training, losses = run(make, 10, lambda _: settled())
    figures = mm.stats()
    assert (losses, bits(training)) == trained(make, 10)
    assert figures["tier_errors"] > 0 and figures["planned_passes"] >= 1 and figures["resident_bytes.peak"] <= limit


def test_what_is_measured_as_a_cycle_gets_the_whole_budget() -> None:
    """Its first period, which is none, fits no plan; that says nothing of the next one."""
    torch.manual_seed(0)
    training = States()
    limit = int(need(States) * 0.45)
    with memmgr.budget(limit, quiet=True, policy="offload"):
        runtime: Any = budgets.current()
        for _ in range(5):
            training.step()
            settled()
        known = [known for known in runtime.plans._known.values() if known.repeats]
        assert known and all(one.made is not None and one.tries < MOST_TRIES for one in known)


class Gathered(models.Training):
    """As FSDP2 does: a layer's parameters are gathered into storages that are resized before it and empty after it."""

    LAYERS, EACH = 10, 4

    def __init__(self) -> None:
        self.whole = [[self.empty() for _ in range(self.EACH)] for _ in range(self.LAYERS)]
        self.x = torch.randn(512, 64)
        super().__init__(nn.Sequential(*(nn.Linear(64, 64) for _ in self.whole)), self.forward)

    @staticmethod
    def empty() -> torch.Tensor:
        one = torch.empty(512, 64)
        one.untyped_storage().resize_(0)
        return one

    def forward(self) -> torch.Tensor:
        x = self.x
        for layer, gathered in zip(self.model, self.whole, strict=True):
            for one in gathered:
                one.untyped_storage().resize_(one.nbytes)
                one.copy_(x.detach())
                x = x + one
            x = layer(x).tanh()
            for one in gathered:
                one.untyped_storage().resize_(0)
        return x.square().mean()


# The trace begins in the same way under each policy; auto plans for seconds.
@pytest.mark.parametrize("policy", [pytest.param("auto", marks=pytest.mark.slow), "evict"])
def test_what_comes_between_two_ops_was_not_there_from_the_beginning(policy: str) -> None:
    limit = need(Gathered) * 0.7
    assert sum(one.nbytes for one in itertools.chain(*Gathered().whole)) > limit
    got, figures, limit = under(Gathered, 0.7, policy)
    assert got == plain(Gathered)
    last = figures[-1]
    assert last["plans"] >= 1 and last["planned_passes"] >= 2
    assert last["resident_bytes.peak"] <= limit


@pytest.mark.timeout(120)  # without the rule it waits for good
def test_a_budget_that_closes_waits_for_no_plan(monkeypatch: pytest.MonkeyPatch, recwarn: Any) -> None:
    """A plan takes seconds, and beside busy processes far longer."""
    begun, ended = threading.Event(), threading.Event()

    def makes(*_: Any) -> None:
        begun.set()
        try:
            while True:
                pass
        finally:
            ended.set()

    monkeypatch.setattr(planning, "PLANNERS", {"plan": makes})
    here = functools.partial(planner_process.InThread, package=__name__)
    monkeypatch.setattr(planner_process, "executor", here)
    limit = need(States) * 0.5
    training, before = States(), threading.active_count()
    with memmgr.budget(int(limit), quiet=True):
        for _ in range(STEPS):
            training.step()
        assert begun.wait(60)
    assert ended.is_set() and threading.active_count() == before
    assert not recwarn.list


def test_a_period_that_is_no_trace_costs_nothing_but_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads whose ops are mixed up: no exception comes out of the program's backward."""

    def refuses(*_: Any, **__: Any) -> Any:
        raise TraceError("reads what nothing has made")

    monkeypatch.setattr(planner_process, "executor", planner_process.InThread)
    monkeypatch.setattr(timeline, "measured", refuses)
    got, figures, _ = under(States, 0.5)
    assert got == plain(States)
    assert figures[-1]["plans"] == 0


class Tree(models.Training):
    """A tree LSTM: many small ops. Most recomputations depend on tensors that the program has released."""

    def __init__(self) -> None:
        model = TreeLSTM(64)
        leaves = torch.randn(16, 96, 32)
        super().__init__(model, lambda: model(leaves).square().mean())


class Dense(models.Training):
    """A DenseNet: all victims are made of features that the program has dropped, each as large as the others."""

    def __init__(self) -> None:
        model = DenseNet(8, 6, levels=2)
        images, labels = torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))
        super().__init__(model, lambda: model(images, labels))


class Dropout(models.Training):
    """An op with two outputs: backward needs the mask, and the next block the result, which the program has dropped."""

    def __init__(self) -> None:
        layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(16))
        first = torch.randn(2048, 64)

        def loss() -> torch.Tensor:
            x = first
            for layer in layers:
                x = x + torch.native_dropout(layer(x), 0.1, True)[0]
            return x.square().mean()

        super().__init__(layers, loss)


@pytest.mark.parametrize(
    ("make", "policy", "share"),
    [(Tree, "evict", 0.45), (Dense, "evict", 0.5), (Dense, "auto", 0.4), (Dropout, "evict", 0.6)],
)
def test_a_plan_is_done_as_it_says(make: type[models.Training], policy: str, share: float) -> None:
    """No tensor is dropped before its dependents are made, or stays after that. A tensor that the plan has evicted and
    that is made as an intermediate is dropped again, and one that later groups read stays for them."""
    limit = int(need(make) * share)
    torch.manual_seed(0)
    training = make()
    with memmgr.budget(limit, quiet=True, policy=policy) as mm:
        losses: list[float] = []
        figures: list[dict[str, Any]] = []
        short, most = True, STEPS + 2 * MOST_TRIES  # a plan that runs short is made again
        while len(losses) < (most if short else STEPS):
            losses.append(training.step())
            settled()
            figures.append(mm.stats())
            short = figures[-1]["short_periods"] > figures[-2:][0]["short_periods"]
        runtime: Any = budgets.current()
        planned = runtime.plans.latest().rematerialized
    assert (losses, bits(training)) == trained(make, len(losses))
    now, before = figures[-1], figures[-2]
    assert now["planned_passes"] - before["planned_passes"] == 1
    assert now["short_periods"] - before["short_periods"] == 0
    assert 0 < now["recomputes"] - before["recomputes"] <= 1.2 * planned
