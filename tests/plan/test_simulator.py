"""The simulator: rules, policies by name, Capuchin and DELTA, each judged."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from memmgr.policies import Candidates, Link
from memmgr.policies.published.capuchin import capuchin, choose, triggers
from memmgr.policies.published.delta import delta_online, delta_taco, director, knapsack
from memmgr.policies.rules.registry import parse_policy
from memmgr.policies.rules.types import Action
from memmgr.policies.simulate.decided import Accesses
from memmgr.policies.simulate.simulator import Run, simulate
from memmgr.policies.trace import TierLink, Trace, TraceBuilder
from memmgr.policies.trace.schedule import Do, Step, judge_records, replay
from memmgr.tools.common.dtr_log import parse_dtr_log, read_dtr_log

from .judge import confirmed, keeps_the_rules, needs_judge
from .operator_logs import SHARED, log, needs_logs
from .passes import LINK, layers, with_backward
from .synthetic import network

RECOMPUTE_ONLY = ("dtr", "dtr_eq", "dtr_local", "msps", "lru+evict", "largest+evict", "price+evict", "auto")
BY_NAME = {"capuchin": capuchin, "delta_paper": delta_online, "delta_taco": delta_taco}


def trace_of(seed: int, **shape: bool | int) -> Trace:
    return parse_dtr_log(json.dumps(line) for line in network(seed, **shape).lines)  # type: ignore[arg-type]


def link_for(trace: Trace, passes: float) -> TierLink:
    """A link that carries the unmanaged peak so many times during a pass."""
    rate = passes * trace.unmanaged_peak[0] / trace.seconds
    return TierLink("host", rate, rate, trace.seconds / 1000)


def run(name: str, trace: Trace, budget: int, tier: TierLink | None = None) -> Run:
    return BY_NAME[name](trace, budget, tier) if name in BY_NAME else simulate(trace, budget, parse_policy(name), tier)


def chain(n: int) -> Trace:
    """n ops of 10 bytes and 1 second, each reading the one before; then read again in reverse. All held until then."""
    builder = TraceBuilder()
    builder.constant("c", 1)
    names = ["c"]
    for i in range(n):
        builder.call("f", 1.0, [names[-1]], [(f"a{i}", 10, -1)])
        names.append(f"a{i}")
    return with_backward(builder, names[-1], (([name], [name]) for name in reversed(names[1:])))


def test_replay_counts_what_the_rules_say() -> None:
    trace = chain(1)
    computes = [Step(Do.COMPUTE, k) for k in range(4)]
    cost = replay(trace, computes, 13)
    assert (cost.valid, cost.peak_bytes, cost.seconds, cost.recomputes) == (True, 13, 3.0, 0)
    drop_and_make = [*computes[:3], Step(Do.FREE, 1), Step(Do.RECOMPUTE, 1), computes[3]]
    cost = replay(trace, drop_and_make, 13)
    assert (cost.valid, cost.seconds, cost.recomputes) == (True, 4.0, 1)


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([Step(Do.COMPUTE, 1)], "for the first time"),
        ([Step(Do.COMPUTE, 0), Step(Do.RECOMPUTE, 0)], "again after|cannot run again"),
        ([Step(Do.COMPUTE, 0), Step(Do.FREE, 0)], "constant c.c freed while held"),
        ([Step(Do.COMPUTE, 0), Step(Do.COMPUTE, 1), Step(Do.FREE, 1), Step(Do.COMPUTE, 2)], "without its inputs"),
        ([Step(Do.COMPUTE, 0), Step(Do.FREE, 1)], "freed while not resident"),
        ([Step(Do.COMPUTE, k) for k in range(3)], "only 3 of 4"),
        ([*(Step(Do.COMPUTE, k) for k in range(4)), Step(Do.FREE, 3)], "held at the end are gone"),
        ([Step(Do.COMPUTE, 0), Step(Do.COMPUTE, 1), Step(Do.OFFLOAD, 1)], "carries nothing"),
    ],
)
def test_replay_refuses_what_the_rules_forbid(steps: list[Step], why: str) -> None:
    cost = replay(chain(1), steps, 100)
    assert not cost.valid
    assert re.search(why, cost.why)
    assert not replay(chain(1), [Step(Do.COMPUTE, k) for k in range(4)], 12).valid


def test_replay_waits_for_copies() -> None:
    trace = chain(1)
    ops = [Step(Do.COMPUTE, k) for k in range(4)]
    copy = [*ops[:2], Step(Do.OFFLOAD, 1), ops[2], Step(Do.FREE, 1), Step(Do.RELOAD, 1), ops[3]]
    cost = replay(trace, copy, 100, write_rate=5.0, read_rate=10.0)
    # the write takes 2 s beside 1 s of work, the read 1 s beside none
    assert cost.valid and cost.wait_seconds == pytest.approx(2.0) and cost.seconds == pytest.approx(5.0)
    assert list(judge_records(trace, ops[:1])) == [{"do": "compute", "op": 0}]
    with pytest.raises(ValueError, match="offload"):
        list(judge_records(trace, copy))


@needs_judge
@pytest.mark.parametrize("policy", [*RECOMPUTE_ONLY, *BY_NAME])
def test_the_judge_confirms(policy: str, tmp_path: Path) -> None:
    file = network(7, depth=12).write(tmp_path / "x.log")
    confirmed(file, lambda trace, budget: run(policy, trace, budget), (0.9, 0.7, 0.5))


@pytest.mark.parametrize("policy", ["auto", "offload", "delta", "lru+offload+off", "dtr_eq", *BY_NAME])
@pytest.mark.parametrize("passes", [0.5, 20.0])
def test_with_a_link_the_rules_hold(policy: str, passes: float) -> None:
    trace = trace_of(3, depth=12, skips=False)
    tier = link_for(trace, passes)
    for ratio in (0.8, 0.5):
        budget = int(trace.unmanaged_peak[0] * ratio)
        result = run(policy, trace, budget, tier)
        assert result.feasible, result.why
        keeps_the_rules(trace, result, budget, tier)


@pytest.mark.parametrize("policy", ["evict", "auto", "offload", "delta", "dtr", "lru+offload", "msps+evict"])
@pytest.mark.parametrize("share", [0.9, 0.7, 0.5, 0.4])
def test_what_it_does_with_a_measured_pass_is_a_schedule(policy: str, share: float) -> None:
    trace = layers(24)
    budget = int(trace.unmanaged_peak[0] * share)
    tier = None if "evict" in policy or policy == "dtr" else LINK
    found = run(policy, trace, budget, tier)
    assert found.feasible and found.steps
    keeps_the_rules(trace, found, budget, LINK)
    assert any(s.do == Do.FREE and s.target < 24 for s in found.steps[: trace.backward_at])


@needs_logs
@pytest.mark.parametrize("policy", ["dtr_eq", "dtr_local", "msps"])
def test_baselines_are_those_of_dtrs_own_simulator(policy: str) -> None:
    """Where memory is not very short, details (sampling, ties, splitting) do not matter: the same figures, within 1 %."""
    reference = json.loads((SHARED / "dtr-logs" / "reference.json").read_text())
    for name in ("transformer", "unet"):
        trace = read_dtr_log(log(name))
        for ratio in (0.9, 0.7):
            result = simulate(trace, int(trace.unmanaged_peak[0] * ratio), parse_policy(policy))
            assert result.overhead == pytest.approx(reference[name]["overhead"][policy][str(ratio)], abs=0.01)


def test_a_budget_that_cannot_work_is_said() -> None:
    trace = trace_of(1)
    result = simulate(trace, 10, parse_policy("dtr"))
    assert not result.feasible and "do not fit" in result.why
    assert not simulate(trace, int(0.5 * trace.unmanaged_peak[0]), parse_policy("keep")).feasible


def test_what_the_program_holds_itself_stays() -> None:
    trace = chain(6)
    pinned = replace(
        trace, storages=tuple(replace(s, pinned_until=s.released if s.maker == 2 else 0) for s in trace.storages)
    )
    result = simulate(pinned, 45, parse_policy("lru+evict"))
    assert result.feasible
    first = pinned.ops[2].outputs[0]
    freed = [step for step in result.steps[: len(result.steps) // 2] if step == Step(Do.FREE, first)]
    assert not freed and any(step.do is Do.RECOMPUTE for step in result.steps)


def test_capuchin_takes_the_longest_free_time_first() -> None:
    trace = chain(8)
    tier = TierLink("host", 40.0, 40.0)  # a tensor in a quarter of a second
    accesses = Accesses.of(trace)
    chosen = choose(trace, accesses, trace.unmanaged_peak[0] - 20, tier)
    # a0 and a1 are made first and read last; a0's last access before the peak is a1's op
    assert [(trace.storages[d.storage].name, d.action) for d in chosen] == [
        ("1.0", Action.OFFLOAD),
        ("2.0", Action.OFFLOAD),
    ]
    assert all(accesses.start[d.evicted_access] < accesses.start[d.back_access] for d in chosen)


def test_capuchins_swaps_do_not_overlap_and_feedback_moves_them() -> None:
    trace = chain(8)
    tier = TierLink("host", 10.0, 10.0)  # a tensor in a second: as long as an op
    accesses = Accesses.of(trace)
    budget = trace.unmanaged_peak[0] - 30
    chosen = choose(trace, accesses, budget, tier)
    swaps = sorted(
        (d for d in triggers(trace, accesses, budget, tier, chosen, {}) if d.action == Action.OFFLOAD),
        key=lambda d: d.back_access,
    )
    assert len(swaps) > 1
    begins = [accesses.start[d.trigger] for d in swaps]
    assert all(later - sooner >= 1.0 for sooner, later in zip(begins, begins[1:], strict=False))
    moved = triggers(trace, accesses, budget, tier, chosen, {swaps[-1].storage: 1.0})
    assert next(d for d in moved if d.storage == swaps[-1].storage).trigger < swaps[-1].trigger


def test_capuchin_hides_swaps_on_a_fast_link_and_recomputes_without_one() -> None:
    trace = trace_of(5, depth=20, skips=False)
    budget = int(trace.unmanaged_peak[0] * 0.7)
    fast = capuchin(trace, budget, link_for(trace, 200.0))
    alone = capuchin(trace, budget)
    assert fast.feasible and alone.feasible
    assert any(step.do is Do.RELOAD for step in fast.steps)
    assert not any(step.do in (Do.OFFLOAD, Do.RELOAD) for step in alone.steps)
    assert fast.overhead < alone.overhead


def test_deltas_director_is_the_papers_comparison() -> None:
    c = Candidates.build([100, 100, 100], cost_seconds=[1.0, 3.0, 1.0], chain_seconds=[50.0, 0.0, 0.0],
                         recomputable=[True, True, False])  # fmt: skip
    # 2 x 100 bytes at 100 bytes/s: two seconds; the chain does not count, as published
    action = director(c, np.arange(3), Link(100.0, 100.0), 0)
    assert action.tolist() == [Action.EVICT, Action.OFFLOAD, Action.OFFLOAD]


def test_tacos_knapsack_keeps_what_is_worth_most() -> None:
    trace = chain(6)
    peak = trace.unmanaged_peak[0]
    assert knapsack(trace, peak) == []
    leaving = knapsack(trace, peak - 20)
    assert 2 <= len(leaving) <= 3
    assert {d.action for d in leaving} == {Action.EVICT}
    cheap_link = knapsack(trace, peak - 20, TierLink("host", 1e6, 1e6))
    assert {d.action for d in cheap_link} == {Action.OFFLOAD}
