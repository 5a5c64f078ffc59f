"""Published systems that move tensors to a tier: the claims of their papers, and that their schedules keep the rules."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain as joined
from itertools import combinations

import pytest

from memmgr.policies.published.chain import Chain
from memmgr.policies.published.copies import Swap, around_shortage, with_copies
from memmgr.policies.published.milp import limited_to
from memmgr.policies.published.runs import completed
from memmgr.policies.published.runs import judged as outcome
from memmgr.policies.published.superneurons import recomputed
from memmgr.policies.published.systems import OFFLOADING, PUBLISHED, applicable
from memmgr.policies.simulate.decided import Accesses
from memmgr.policies.trace import TierLink, Trace, TraceBuilder
from memmgr.policies.trace.schedule import Do, Step, replay

from .judge import keeps_the_rules
from .passes import blocks_of_three, layers
from .test_simulator import chain, link_for, trace_of

EITHER = ("superneurons", "tsplit")


@pytest.fixture(autouse=True)
def hurry() -> Iterator[None]:
    with limited_to(2.0):
        yield


# AutoTM's integer program takes all of its time where the link is slow; it is compared with all choices below.
def _is_slow(name: str, passes: float, shared: bool) -> bool:
    return (name == "autotm" and passes < 1) or (name == "pofo" and shared == (passes < 1))


@pytest.mark.parametrize(
    ("name", "passes", "shared"),
    [
        # Each system has a link that is shared and one that is not. The programs of these two take seconds.
        pytest.param(name, passes, shared, marks=[pytest.mark.slow] * _is_slow(name, passes, shared))
        for name in (*OFFLOADING, *EITHER)
        for passes in (0.5, 20.0)
        for shared in (False, True)
    ],
)
def test_the_rules_hold(name: str, passes: float, shared: bool) -> None:
    trace = trace_of(3, depth=12)
    tier = replace(link_for(trace, passes), shared=shared)
    assert name in applicable(trace, tier) and (name in applicable(trace, None)) == (name in EITHER)
    fits = 0
    for ratio in (1.0, 0.9, 0.7):
        made = PUBLISHED[name](trace, int(trace.unmanaged_peak[0] * ratio), tier)
        assert made.feasible or made.why
        if made.feasible:
            fits += 1
            keeps_the_rules(trace, made, made.budget_bytes, tier)
    assert fits
    assert name in EITHER or "tier" in PUBLISHED[name](trace, 10**9, None).why


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", [*OFFLOADING, *EITHER])
def test_a_measured_pass_has_a_schedule_too(name: str, gradients: bool) -> None:
    """Storages that the program itself holds are freed at their release, and so are those without a copy that no op
    makes again."""
    trace = layers(16, gradients)
    tier = TierLink("host", 40.0, 40.0)
    made = PUBLISHED[name](trace, trace.unmanaged_peak[0], tier)
    assert made.feasible, made.why
    keeps_the_rules(trace, made, made.budget_bytes, tier)


def test_what_is_read_back_ends_when_it_is_wanted_and_the_reads_follow_one_another() -> None:
    trace = chain(8)  # ops 1 to 8 make 10 bytes each; 10 reads the last of them, 17 the first
    events = [Step(Do.COMPUTE, k) for k in range(len(trace.ops))]
    tier = TierLink("host", 10.0, 5.0)
    steps = completed(trace, with_copies(trace, events, [Swap(1, 2, 17), Swap(2, 3, 16)], tier))
    cost = replay(trace, steps, 10**6, write_rate=10.0, read_rate=5.0)
    assert cost.valid and cost.wait_seconds == 0
    at = [i for i, s in enumerate(steps) if s.do is Do.RELOAD]
    assert [steps[i].target for i in at] == [2, 1] and [steps[i + 1].target for i in at] == [13, 15]
    gone = steps.index(Step(Do.FREE, 1))
    assert steps.index(Step(Do.COMPUTE, 3)) < gone < steps.index(Step(Do.COMPUTE, 4)), "a second after its write began"
    late = with_copies(trace, events, [Swap(1, 15, 17)], tier)
    assert late == events, "it would not be written before it is wanted"


def test_a_swap_is_away_where_memory_is_short() -> None:
    swaps = [Swap(0, 1, 9), Swap(1, 4, 6), Swap(2, 0, 3)]
    assert around_shortage(swaps, [0, 0, 0, 0, 9, 9, 0, 0, 0, 0], 5) == [
        Swap(0, 1, 9, by=3, not_before=6), Swap(1, 4, 6, by=4, not_before=6),
    ]  # fmt: skip


@pytest.mark.parametrize(("rate", "seconds"), [(10.0, 1.0), (5.0, 2.0)])
def test_vdnn_takes_as_much_memory_as_a_few_layers(rate: float, seconds: float) -> None:
    """Each layer of 10 bytes ends when its input is written: a second at ten bytes a second, two at five. A few layers
    are resident, however many there are."""
    tier = TierLink("host", rate, rate)
    for n in (10, 40):
        made = PUBLISHED["vdnn_all"](chain(n), 10**6, tier)
        assert made.peak_bytes <= 1 + 3 * 10 + 2 + 1
        assert made.seconds == pytest.approx((2 * n + 1) * seconds, abs=4 * seconds)
    assert not [s for s in PUBLISHED["vdnn_conv"](chain(10), 10**6, tier).steps if s.do is Do.OFFLOAD], "no convolution"


def test_flashneuron_offloads_in_order_and_no_longer_than_forward_takes() -> None:
    """20 layers of a second; a copy takes two: ten of them are offloaded at most, the first ones."""
    trace, tier = chain(20), TierLink("host", 5.0, 1000.0)
    made = PUBLISHED["flashneuron"](trace, 170, tier)
    assert made.feasible and [s.target for s in made.steps if s.do is Do.OFFLOAD] == [1, 2, 3, 4]
    refused = PUBLISHED["flashneuron"](trace, 50, tier)
    assert not refused.feasible and 100 < refused.least_bytes <= 130


def test_swapadvisor_is_beladys_choice() -> None:
    """Backward reads in reverse, so the tensor made first is used last: for n layers and room for m, the first n - m
    are evicted."""
    trace, tier = chain(20), TierLink("host", 1000.0, 1000.0)
    made = PUBLISHED["swapadvisor"](trace, 1 + 12 * 10 + 2, tier)
    gone = [s.target for s in made.steps if s.do is Do.OFFLOAD]
    assert made.feasible and gone == list(range(1, 9))
    assert [s.target for s in made.steps if s.do is Do.RELOAD] == list(range(8, 0, -1))


@pytest.mark.parametrize("rate", [3.0, 10.0, 30.0])
@pytest.mark.parametrize("room", [6, 4])
def test_autotm_is_near_the_best_of_all_choices(rate: float, room: int) -> None:
    """Seven layers of which so many fit, and each subset of absent ones. Its program has the link's time by moments
    only, so it is the optimum if only the link counts, and a quarter slower elsewhere."""
    trace, tier = chain(7), TierLink("host", rate, rate)
    budget = 1 + 10 * room + 2
    events = [Step(Do.COMPUTE, k) for k in range(len(trace.ops))]
    accesses = Accesses.of(trace)
    every = [
        Swap(s, a, b)
        for s, uses in enumerate(accesses.ops)
        if s
        for a, b in zip(uses, uses[1:], strict=False)
        if b - a > 2
    ]
    every = around_shortage(every, accesses.used_bytes, budget)
    subsets = joined.from_iterable(combinations(every, n) for n in range(len(every) + 1))
    tried = [outcome("", trace, budget, tier, with_copies(trace, events, list(swaps), tier)) for swaps in subsets]
    made = PUBLISHED["autotm"](trace, budget, tier)
    best = min(run.seconds for run in tried if run.feasible)
    assert made.feasible and best * (1 - 1e-9) <= made.seconds <= best * (1.0 + 1e-9 if rate < 10 else 1.25 + 1e-9)


def convolutions(n: int) -> Trace:
    """Layers of a convolution and two cheap ops that make as much."""
    return blocks_of_three(n, [("conv", 9.0, 10), ("norm", 1.0, 10), ("relu", 1.0, 10)], seconds=12.0)


def test_superneurons_makes_what_is_cheap_again_and_offloads_the_rest() -> None:
    """Without a tier convolutions stay, a third of all; with one the peak does not grow with the depth."""
    trace = convolutions(12)
    made = PUBLISHED["superneurons"](trace, trace.unmanaged_peak[0] * 55 // 100, None)
    assert {trace.ops[s.target].name for s in made.steps if s.do is Do.RECOMPUTE} == {"norm", "relu"}
    tier = TierLink("host", 10.0, 10.0)
    least = []
    for n in (12, 24):
        small = PUBLISHED["superneurons"](convolutions(n), 1, tier)
        assert not small.feasible
        least.append(small.least_bytes)
        run = PUBLISHED["superneurons"](convolutions(n), small.least_bytes, tier)
        assert run.feasible and run.overhead < 1.2
    assert least[0] == least[1] < trace.unmanaged_peak[0] // 3


@pytest.mark.parametrize(("last", "again"), [(10, {"p": 3, "q": 2, "r": 1}), (100, {"p": 1, "q": 1, "r": 1})])
def test_a_large_segment_is_made_again_for_each_op_that_reads_it(last: int, again: dict[str, int]) -> None:
    """Speed-centric where a segment is no larger than the largest op of the pass, memory-centric beyond."""
    builder = TraceBuilder()
    builder.constant("a0", 1)
    for name, read, size in (("conv", "a0", 10), ("p", "conv", 30), ("q", "p", 30), ("r", "q", 30), ("conv2", "r", 10)):
        builder.call(name, 1.0, [read], [(name, size, -1)])
    builder.call("last", 1.0, ["conv2"], [("last", last, -1)])
    builder.begin_backward()
    for name in ("last", "r", "q", "p"):
        builder.call("b", 1.0, [name], [(f"g{name}", 1, -1)])
    trace = builder.build().check()
    chain_of_two = Chain(trace).at([2, 6])
    steps = completed(trace, recomputed(chain_of_two))
    names = [trace.ops[s.target].name for s in steps if s.do is Do.RECOMPUTE]
    assert {name: names.count(name) for name in names} == again
    assert replay(trace, steps, 10**6).valid


def three_ways() -> Trace:
    """A bottleneck of three tensors of 10 bytes, made in 1, 3 and 5 s; the ops between their uses take 4 s."""
    builder = TraceBuilder()
    builder.constant("c", 1)
    for name, seconds in (("expensive", 5.0), ("cheap", 1.0), ("middle", 3.0)):
        builder.call(name, seconds, ["c"], [(name, 10, -1)])
    builder.call("wait", 2.0, ["c"], [("w", 1, -1)])
    builder.begin_backward()
    builder.call("peak", 1.0, ["w"], [("p", 10, -1)])
    builder.release("p")
    builder.call("after", 2.0, ["w"], [("x", 1, -1)])
    for name in ("expensive", "cheap", "middle"):
        builder.call("b", 1.0, [name], [(f"g{name}", 1, -1)])
        builder.release(name)
    return builder.build().check()


def test_tsplit_takes_the_least_time_for_each_byte() -> None:
    trace = three_ways()
    full = trace.unmanaged_peak[0]
    for fewer, made_again in ((1, ["cheap"]), (11, ["cheap", "middle"])):
        made = PUBLISHED["tsplit"](trace, full - fewer, None)
        assert (
            made.feasible and sorted(trace.ops[s.target].name for s in made.steps if s.do is Do.RECOMPUTE) == made_again
        )
    tier = TierLink("host", 10.0, 10.0)  # a second each way, with two beside it: one copy hides, and then another
    made = PUBLISHED["tsplit"](trace, full - 1, tier)
    assert made.overhead == 1 and sum(s.do is Do.OFFLOAD for s in made.steps) == 1
    slow = PUBLISHED["tsplit"](trace, full - 1, TierLink("host", 1.0, 1.0))
    assert [trace.ops[s.target].name for s in slow.steps if s.do is Do.RECOMPUTE] == ["cheap"]
