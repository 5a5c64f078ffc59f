"""Where the planner's own ways down find nothing: passes with gradients of gradients, and the schedules that it falls back to."""

from dataclasses import replace

import pytest

from memmgr.policies.online.policy import run_online
from memmgr.policies.plan import planner
from memmgr.policies.plan import recompute as alone
from memmgr.policies.plan.fallback import best_online
from memmgr.policies.plan.planner import plan
from memmgr.policies.rules.registry import parse_policy
from memmgr.policies.simulate.simulator import simulate
from memmgr.policies.trace import TierLink, Trace
from memmgr.policies.trace.columns import Problem
from memmgr.policies.trace.least_memory import least_bytes
from memmgr.policies.trace.schedule import Do

from .judge import needs_judge
from .passes import LINK, layers
from .synthetic import network, unrolled_gan
from .test_planner import comes_back, holds, trace_of, verdict_of

GAN = {"steps": 3, "depth": 8, "batch": 32}


def nothing(*_: object, **__: object) -> None:
    """Stands in for the search of a timeline."""


def infeasible(*_: object, **__: object) -> tuple[None, float]:
    """In the stead of the recompute-only planner: nothing found, and a bound that says nothing."""
    return None, 0.0


@needs_judge
def test_gradients_of_gradients_are_planned_as_low_as_online_policies_go() -> None:
    """Rungs were too short for them: at 0.3 there was no plan, where DTR's own heuristic and ours needed 0.22."""
    writer = unrolled_gan(3, **GAN)
    trace = trace_of(writer)
    budget = int(0.25 * trace.unmanaged_peak[0])
    assert max(s.size_bytes for s in trace.storages) < budget / 20
    online = simulate(trace, budget, parse_policy("dtr"))
    assert online.feasible
    made = plan(trace, budget, effort=60_000, solve=False)
    holds(trace, made)
    assert made.seconds < online.seconds
    said = verdict_of(writer, trace, made)
    assert said["valid"] and said["peak_bytes"] == made.peak_bytes, said


def test_the_longer_rungs_are_what_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = trace_of(unrolled_gan(3, steps=2, depth=6, batch=32))
    budget = int(0.27 * trace.unmanaged_peak[0])
    problem = Problem.of(trace)
    found = alone.descend(problem, budget)
    assert found is not None and found.timeline.peak <= budget
    found.timeline.check()
    monkeypatch.setattr(alone, "_PATIENCE", 1)
    assert alone.descend(problem, budget) is None


@pytest.mark.parametrize(("steps", "ratio"), [(2, 0.5), (2, 0.4), (2, 0.32), (4, 0.3), (4, 0.25)], ids=lambda v: str(v))
def test_no_plan_only_where_no_online_policy_fits(steps: int, ratio: float) -> None:
    trace = trace_of(unrolled_gan(steps, steps=steps, depth=3, batch=16))
    budget = int(ratio * trace.unmanaged_peak[0])
    fits = run_online(trace, budget, most_again=3.0)[0]
    fits = fits or any(_takes(trace, budget, name) <= 4.0 for name in ("dtr_eq", "dtr"))
    made = plan(trace, budget, effort=10_000, solve=False)
    assert made.feasible or not fits
    if made.feasible:
        holds(trace, made)


def _takes(trace: Trace, budget: int, policy: str) -> float:
    run = simulate(trace, budget, parse_policy(policy))
    return run.overhead if run.feasible else float("inf")


@needs_judge
@pytest.mark.parametrize("ratio", [0.7, 0.45])
def test_before_it_gives_up_the_best_online_schedule(ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any reason that the planner itself finds no plan; superfluous steps of the schedule are removed."""
    writer = network(9, depth=12)
    trace = trace_of(writer)
    budget = int(trace.unmanaged_peak[0] * ratio)
    online = [_takes(trace, budget, name) for name in ("dtr_eq", "dtr")]
    fits, machine = run_online(trace, budget)
    assert fits
    monkeypatch.setattr(alone, "descend", nothing)
    made = plan(trace, budget)
    assert made.feasible
    holds(trace, made)
    assert made.overhead <= min(*online, machine.seconds / trace.seconds)
    assert verdict_of(writer, trace, made)["valid"]


@pytest.mark.parametrize("link", [None, LINK], ids=["alone", "with a link"])
@pytest.mark.parametrize("recompute", [True, False])
def test_measured_passes_fall_back_as_well(
    link: TierLink | None, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = layers(12)
    budget = least_bytes(Problem.of(trace)) + 35
    monkeypatch.setattr(planner, "recompute_only", infeasible)
    monkeypatch.setattr(planner, "offloading", nothing_at_all)
    made = plan(trace, budget, link=link, recompute=recompute)
    assert made.feasible == (recompute or link is not None)
    if made.feasible:
        holds(trace, made, link)
        assert comes_back(made)
        if not recompute:
            assert not any(step.do is Do.RECOMPUTE for step in made.steps)


@pytest.mark.parametrize("storages", [0, 1, 100])
def test_it_writes_no_more_than_the_tier_holds(storages: int) -> None:
    trace = layers(12)
    budget = least_bytes(Problem.of(trace)) + 35
    link = replace(LINK, capacity_bytes=storages * trace.storages[1].size_bytes)
    found = best_online(trace, budget, link, recompute=False)
    assert (found is not None) == (storages == 100)


def nothing_at_all(*_: object, **__: object) -> tuple[()]:
    """In the stead of the ways with a link."""
    return ()


def test_it_does_not_fall_back_where_nothing_can_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = trace_of(network(9, depth=4))

    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was asked")

    monkeypatch.setattr(planner, "best_online", never)
    assert not plan(trace, least_bytes(Problem.of(trace)) - 1).feasible
