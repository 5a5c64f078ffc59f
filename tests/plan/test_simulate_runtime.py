"""What a simulated measured pass does as the live manager does it."""

from __future__ import annotations

import pytest

from memmgr.policies import Action
from memmgr.policies.rules.registry import parse_policy
from memmgr.policies.simulate.base import finished
from memmgr.policies.simulate.runtime import RuntimeSimulation
from memmgr.policies.trace import OpKind, TierLink, Trace
from memmgr.policies.trace.schedule import Do, Step

from .passes import LINK, Pass, layers, run

MB = 1 << 20


@pytest.mark.parametrize("policy", ["evict", "auto", "offload", "delta", "dtr", "lru+offload", "msps+evict"])
@pytest.mark.parametrize("share", [0.9, 0.7, 0.5, 0.4])
def test_what_it_does_is_a_schedule(policy: str, share: float) -> None:
    trace = layers(24)
    budget = int(trace.unmanaged_peak[0] * share)
    link = None if "evict" in policy or policy == "dtr" else LINK
    found = run(trace, budget, policy, link)
    assert found.feasible and found.steps
    assert any(s.do == Do.FREE and s.target < 24 for s in found.steps[: trace.backward_at])


def test_who_leaves_was_ranked_before_it_was_short() -> None:
    """The ranking is older than the request: what has become the best choice since does not overtake it."""
    p = Pass()
    h = p.constant(1)
    first = [p.op(10, [h], seconds=1.0) for _ in range(6)]
    cheap = p.op(10, [h], seconds=0.001)
    for _ in range(4):
        p.op(10, [h], seconds=1.0)
    trace = p.backward()
    simulation = RuntimeSimulation(trace, 75, parse_policy("msps+evict"), None)
    ranked: list[list[int]] = []
    ahead = simulation._rank_ahead

    def noted() -> None:
        before = list(simulation.armed)
        ahead()
        if list(simulation.armed) != before:
            ranked.append(list(simulation.armed))

    simulation._rank_ahead = noted  # type: ignore[method-assign]
    found = finished(simulation)
    assert found.feasible
    assert trace.backward_at is not None
    turn = found.steps.index(Step(Do.COMPUTE, trace.backward_at))
    gone = [s.target for s in found.steps[:turn] if s.do == Do.FREE]
    assert ranked and not set(ranked[0]) - set(first), (
        "all of them are dearer than the cheap one, which was not there yet"
    )
    assert gone[: len(ranked[0])] == ranked[0] and gone.index(cheap) >= len(ranked[0])


def test_what_nobody_reads_any_more_goes_at_once() -> None:
    """A chain of what nobody saved is made again with two of its links in memory, not with all."""
    p = Pass()
    h = p.constant(1)
    for _ in range(8):
        h = p.op(10, [h], saves=False)
    top = p.op(10, [h])
    for _ in range(6):
        h = p.op(10, [p.op(10, [h], saves=False)])
    trace = p.backward()
    found = run(trace, 55, "lru+evict")
    assert found.feasible
    again = [s for s in found.steps if s.do in (Do.RECOMPUTE, Do.FREE)]
    links = range(1, 9)
    made = [at for at, step in enumerate(again) if step.do == Do.RECOMPUTE and step.target in links]
    assert len(made) >= 8
    for at in made:
        if again[at].target - 1 in links:
            assert again[at + 1] == Step(Do.FREE, again[at].target - 1)
    assert Step(Do.RECOMPUTE, trace.storages[top].maker) in found.steps


def test_a_large_root_is_given_up() -> None:
    """The program lets go of its data: what was made from it stays, because it could not be made again."""

    def trace(size_bytes: int) -> Trace:
        p = Pass()
        data = p.op(size_bytes, [], saves=False, kind=OpKind.ONCE)
        h = p.op(MB, [data])
        for _ in range(12):
            h = p.op(MB, [h])
        return p.backward()

    small, large = trace(MB // 256), trace(MB)
    budget = 9 * MB
    for made, again in ((small, True), (large, False)):
        found = run(made, budget, "lru+evict")
        assert found.feasible
        assert (Step(Do.RECOMPUTE, 1) in found.steps) is again
        assert (Step(Do.FREE, 0) in found.steps[:6]) is not again


def test_a_root_stays_while_something_gone_needs_it() -> None:
    p = Pass()
    data = p.op(MB, [], saves=False, kind=OpKind.ONCE)
    h = p.op(MB, [data])
    for _ in range(6):
        h = p.op(MB, [h])
    p.op(1, [data, h])  # the program has it until here
    trace = p.backward()
    found = run(trace, 6 * MB, "lru+evict")
    assert found.feasible and Step(Do.RECOMPUTE, 1) in found.steps


def test_who_cannot_be_made_again_any_more_does_not_go() -> None:
    """It was ranked while what it is made of was there."""
    p = Pass()
    data = p.op(MB, [], saves=False, kind=OpKind.ONCE)
    h = p.op(MB, [data])
    made = [h]
    for _ in range(12):
        h = p.op(MB, [h])
        made.append(h)
    trace = p.backward()
    simulation = RuntimeSimulation(trace, 9 * MB, parse_policy("lru+evict"), None)
    simulation.armed[made[0]] = Action.EVICT
    simulation.armed_bytes = MB
    found = finished(simulation)
    assert found.feasible, found.why
    assert Step(Do.FREE, made[0]) not in found.steps[: trace.backward_at]


def test_what_is_read_ahead_stays_until_it_is_asked_for() -> None:
    """Room is made of what is ranked; what was read too early is given up only when that is not enough."""
    trace = layers(40)
    found = run(trace, 170, "offload", TierLink("host", 200.0, 200.0, 0.01))
    assert found.feasible
    reads = [s.target for s in found.steps if s.do == Do.RELOAD]
    assert len(reads) > 10 and len(set(reads)) == len(reads), "read once"


def test_reads_ahead_leave_room_for_a_request() -> None:
    trace = layers(40)
    budget = 170
    simulation = RuntimeSimulation(trace, budget, parse_policy("offload"), TierLink("host", 200.0, 200.0, 0.01))
    read: list[int] = []
    prefetch = simulation.prefetch

    def noted(k: int) -> None:
        before = set(simulation.incoming)
        prefetch(k)
        if simulation.incoming - before:
            read.append(simulation.clock.used)

    simulation.prefetch = noted  # type: ignore[method-assign]
    assert finished(simulation).feasible
    assert read and max(read) <= budget - 15, "one and a half times the largest"
