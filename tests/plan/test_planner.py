"""The planner: judged by rules that are not its own, beside optima, without holes, and with a link never worse for it."""

import json
import sys
from dataclasses import replace as changed
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memmgr.policies.plan import search
from memmgr.policies.plan.bound import lower_bound_seconds
from memmgr.policies.plan.planner import plan
from memmgr.policies.plan.recompute import traded
from memmgr.policies.plan.search import Search
from memmgr.policies.plan.timeline import Timeline
from memmgr.policies.trace import HELD, Op, OpKind, Storage, TierLink, Trace, TraceBuilder
from memmgr.policies.trace.columns import Problem
from memmgr.policies.trace.plan import Carried, Plan, carried
from memmgr.policies.trace.schedule import Cost, Do, Step, replay
from memmgr.tools.common.dtr_log import parse_dtr_log, read_dtr_log

from .exact import exact
from .judge import agrees, needs_judge, verdict
from .operator_logs import log, needs_logs
from .synthetic import LogWriter, network, tangle

PASSES = [
    pytest.param(network(0, depth=4), id="skips"),
    pytest.param(network(1, depth=4, skips=False, inplace=False), id="chain"),
    pytest.param(tangle(2, ops=10), id="tangle"),
]


def trace_of(writer: LogWriter) -> Trace:
    return parse_dtr_log(json.dumps(line) for line in writer.lines).check()


def played(trace: Trace, made: Plan, link: TierLink | None = None) -> Cost:
    """Cost of the plan by the rules of schedule.py."""
    if link is None:
        return replay(trace, made.steps, made.budget_bytes)
    rates = {"write_rate": link.write_bytes_per_second, "read_rate": link.read_bytes_per_second}
    return replay(trace, made.steps, made.budget_bytes, latency_seconds=link.latency_seconds, **rates)


def holds(trace: Trace, made: Plan, link: TierLink | None = None) -> None:
    """A feasible plan has the figures that it claims, and is not below its own bound."""
    cost = played(trace, made, link)
    assert cost.valid, cost.why
    assert cost.peak_bytes == made.peak_bytes <= made.budget_bytes
    assert cost.seconds == pytest.approx(made.seconds, rel=1e-9)
    assert made.seconds >= made.bound_seconds * (1 - 1e-6)


def comes_back(made: Plan) -> bool:
    """Tells if any storage is made again or read back."""
    return any(step.do in (Do.RECOMPUTE, Do.RELOAD) for step in made.steps)


@needs_logs
@needs_judge
@pytest.mark.parametrize(("name", "ratio"), [("unet", 0.7), ("unet", 0.3), ("transformer", 0.4)])
def test_the_judge_confirms_operator_logs(name: str, ratio: float) -> None:
    trace = read_dtr_log(log(name))
    made = plan(trace, int(trace.unmanaged_peak[0] * ratio))
    assert made.feasible
    holds(trace, made)
    agrees(log(name), trace, made, made.budget_bytes)


@needs_judge
@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.floats(0.1, 1.1), st.booleans())
def test_the_judge_confirms_made_up_logs(seed: int, ratio: float, layers: bool) -> None:
    writer = network(seed, depth=6) if layers else tangle(seed, ops=25)
    trace = trace_of(writer)
    made = plan(trace, int(trace.unmanaged_peak[0] * ratio), effort=30_000)
    assert made.feasible or ratio < 0.9
    if made.feasible:
        holds(trace, made)
        said = verdict_of(writer, trace, made)
        assert said["valid"], said
        assert said["peak_bytes"] == made.peak_bytes
    if ratio >= 1:
        assert made.seconds == pytest.approx(trace.seconds) and not comes_back(made)


def verdict_of(writer: LogWriter, trace: Trace, made: Plan) -> dict[str, object]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return verdict(writer.write(Path(folder) / "x.log"), trace, made.steps, made.budget_bytes)


def test_within_three_percent_of_the_optimum() -> None:
    """Where HiGHS proves the optimum, which it does for nearly all passes of this size."""
    solved = extra = 0
    for seed in range(8):
        trace = trace_of(tangle(seed, ops=8) if seed % 2 else network(seed, depth=2))
        for ratio in (0.85, 0.7):
            budget = int(trace.unmanaged_peak[0] * ratio)
            optimum = exact(trace, budget, limit_seconds=1.0)
            if not (optimum.solved and optimum.feasible):
                continue
            made = plan(trace, budget, effort=150_000)
            holds(trace, made)
            assert made.seconds <= 1.03 * (trace.seconds + optimum.extra_seconds)
            assert made.bound_seconds <= trace.seconds + optimum.extra_seconds + 1e-6 * trace.seconds
            solved += 1
            extra += optimum.extra_seconds > 0
    assert solved >= 8 and extra >= 6


# With a link and without by turns; the other half is slow. A shorter pass with skips takes a fifth of the time.
@pytest.mark.parametrize(
    ("writer", "rate"),
    [
        pytest.param(network(0, depth=3), None, id="short skips-None"),
        *(
            pytest.param(
                *one.values,
                rate,
                id=f"{one.id}-{rate}",
                marks=[pytest.mark.slow] * (one.id == "skips" or nth % 2 == (rate is None)),
            )
            for nth, one in enumerate(PASSES)
            for rate in (None, 1e8)
        ),
    ],
)
def test_no_holes(writer: LogWriter, rate: float | None) -> None:
    """A plan that fits a budget fits every larger one, around the smallest that does byte by byte, with a link and
    without."""
    trace = trace_of(writer)
    peak = trace.unmanaged_peak[0]
    link = TierLink("host", rate, rate) if rate else None

    def fits(budget: int) -> bool:
        return plan(trace, budget, link=link, effort=2_000).feasible

    low, high = 0, peak
    assert fits(high) and not fits(low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    assert not any(fits(budget) for budget in range(high - 2, high))
    assert all(fits(budget) for budget in (*range(high, high + 3), *range(high + 3, peak, peak // 12)))


@pytest.mark.parametrize("passes", [0.3, 2.0, 30.0])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])  # a near copy of the first
def test_never_worse_with_a_link(seed: int, passes: float) -> None:
    """On links that carry the peak so many times during a pass; rules and clock are the simulator's."""
    trace = trace_of(network(seed, depth=12))
    rate = passes * trace.unmanaged_peak[0] / trace.seconds
    link = TierLink("host", rate, rate, trace.seconds / 1000)
    for ratio in (0.8, 0.5, 0.35):
        budget = int(trace.unmanaged_peak[0] * ratio)
        alone = plan(trace, budget, effort=60_000)
        swapped = plan(trace, budget, link=link, recompute=False, effort=60_000)
        both = plan(trace, budget, link=link, effort=60_000)
        assert both.feasible
        holds(trace, both, link)
        assert both.seconds <= min(alone.seconds, swapped.seconds)
        if swapped.feasible:
            holds(trace, swapped, link)
            assert not any(step.do is Do.RECOMPUTE for step in swapped.steps)


# The other seeds are near copies of the first.
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_copies_that_take_the_ops_cpu_are_made_where_running_again_takes_more(seed: int) -> None:
    """On a link that hides everything, the CPU time of copies counts. Where that was only added up afterwards, a link
    of twice the speed made a ViT's plan more expensive (1.126 for 1.097)."""
    trace = trace_of(network(seed, depth=12))
    budget = trace.unmanaged_peak[0] // 2
    alone = plan(trace, budget, effort=60_000)
    again = alone.seconds - trace.seconds
    freed = trace.unmanaged_peak[0] - budget
    rate = 1e3 * trace.unmanaged_peak[0] / trace.seconds
    before = trace.seconds
    # Time of freeing so many bytes by copies, relative to the time of running ops again.
    for share in (0.0, 0.2, 1.0, 5.0, 1e3):
        link = TierLink("disk", rate, rate, cpu_seconds_per_byte=share * again / freed / 2)
        both = plan(trace, budget, link=link, effort=60_000)
        cost = played(trace, both, link)
        moved = sum(trace.storages[step.target].size_bytes for step in both.steps if step.do in (Do.OFFLOAD, Do.RELOAD))
        assert both.seconds == pytest.approx(cost.seconds + moved * link.cpu_seconds_per_byte)
        assert before * (1 - 1e-9) <= both.seconds <= alone.seconds * (1 + 1e-9)
        assert comes_back(both) and (share < 5.0 or moved < 0.5 * freed)
        before = both.seconds * 0.99


@needs_logs
def test_never_worse_with_a_link_on_an_operator_log() -> None:
    trace = read_dtr_log(log("unet"))
    link = TierLink("host", 12e9, 12e9, 1e-5)
    budget = int(trace.unmanaged_peak[0] * 0.5)
    both = plan(trace, budget, link=link)
    holds(trace, both, link)
    assert both.seconds < plan(trace, budget).seconds
    assert both.seconds <= plan(trace, budget, link=link, recompute=False).seconds
    assert {Do.RECOMPUTE, Do.RELOAD} <= {step.do for step in both.steps}


def test_a_tier_has_room_for_so_much() -> None:
    trace = trace_of(network(4, depth=12))
    peak = trace.unmanaged_peak[0]
    rate = 30 * peak / trace.seconds
    budget = int(0.6 * peak)
    roomy = plan(trace, budget, link=TierLink("host", rate, rate))
    tight = TierLink("host", rate, rate, capacity_bytes=peak // 20)
    made = plan(trace, budget, link=tight)
    holds(trace, made, tight)
    offloaded = sum(trace.storages[step.target].size_bytes for step in made.steps if step.do is Do.OFFLOAD)
    assert offloaded <= peak // 20
    assert made.seconds > roomy.seconds


def live(*, copy_on_write: bool) -> Trace:
    """a, b = f(w), f(a); b is written in place; c = g(b); then all of them are read again; the program holds c itself."""
    ops = (
        Op("w", 0.0, (), (0,), OpKind.CONSTANT),
        Op("f", 1.0, (0,), (1,)),
        Op("f", 1.0, (1,), (2,)),
        Op("relu_", 1.0, (2,), (3,), writes=((2, 3),)),
        Op("rand", 1.0, (3,), (4,), OpKind.ONCE),
        Op("g", 1.0, (4,), (5,)),
        Op("loss", 1.0, (5,), (6,)),
        Op("b", 1.0, (6, 4), (7,)),
        Op("b", 1.0, (7, 3), (8,)),
        Op("b", 1.0, (8, 1), (9,)),
    )
    released = [HELD, 10, 4, 9, 8, 7, 8, 9, 10, HELD]
    makers = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    storages = tuple(
        Storage(str(i), 10, maker, release, 7 if i == 5 else 0)
        for i, (maker, release) in enumerate(zip(makers, released, strict=True))
    )
    return Trace(ops, storages, copy_on_write=copy_on_write).check()


@pytest.mark.parametrize("copy_on_write", [False, True])
@pytest.mark.parametrize("rate", [None, 100.0])
def test_live_passes(copy_on_write: bool, rate: float | None) -> None:
    trace = live(copy_on_write=copy_on_write)
    link = TierLink("host", rate, rate) if rate else None
    feasible = 0
    for budget in range(10, 80, 10):
        made = plan(trace, budget, link=link)
        if made.feasible:
            feasible += 1
            holds(trace, made, link)
            again = {step.target for step in made.steps if step.do is Do.RECOMPUTE}
            assert 4 not in again and 0 not in again
            assert feasible > 1 or comes_back(made)
    assert feasible > 2


def test_an_in_place_write_takes_no_room() -> None:
    """w, a and b are there when b is written: three blocks if the new version takes the old one's."""
    ops = live(copy_on_write=False).ops[:4]
    storages = tuple(Storage(str(i), 10, i, 4 if i == 2 else HELD) for i in range(4))
    assert plan(Trace(ops, storages, copy_on_write=False).check(), 30).seconds == 3.0
    assert plan(Trace(ops, storages, copy_on_write=True).check(), 30).seconds == 4.0  # a leaves and is made again


@pytest.mark.parametrize("kind", [OpKind.COMPUTE, OpKind.ONCE])
def test_what_nothing_makes_again_stays_while_the_program_holds_it(kind: OpKind) -> None:
    """A gradient that waits for `zero_grad`, say: no op reads it again, and its bytes are somewhere all the same."""
    ops = [
        Op("x", 1.0, (), (0,), kind),
        Op("reads", 1.0, (0,), (1,)),
        Op("large", 1.0, (1,), (2,)),
        Op("end", 1.0, (2,), (3,)),
    ]
    sizes, released = (10, 1, 10, 1), (3, 3, 4, HELD)
    storages = tuple(Storage(f"{k}.0", sizes[k], k, released[k]) for k in range(4))
    trace = Trace(tuple(ops), storages, copy_on_write=False).check()
    link = TierLink("disk", 10.0, 10.0)
    assert plan(trace, 12).feasible == (kind == OpKind.COMPUTE)
    made = plan(trace, 12, link=link)
    holds(trace, made, link)
    assert any(step == Step(Do.OFFLOAD, 0) for step in made.steps) == (kind == OpKind.ONCE)
    unsaved = [step for step in made.steps if step.do in (Do.COMPUTE, Do.RECOMPUTE, Do.FREE)]
    assert replay(trace, unsaved, 12).valid == (kind == OpKind.COMPUTE)


def chain(steps: int) -> Trace:
    """h = f(h, x) for all steps, then backward reads every h again; x is half of all bytes, and is done with by then."""
    n = steps
    ops = [Op("x", 100.0, (), (0,)), Op("zeros", 1.0, (), (1,))]
    ops += [Op("f", 1.0, (k - 1, 0), (k,)) for k in range(2, n + 2)]
    ops += [Op("grad", 1.0, (k - 1, 2 * n + 2 - k), (k,), OpKind.ONCE) for k in range(n + 2, 2 * n + 2)]
    released = [n + 2, *(2 * n + 3 - k for k in range(1, n + 1)), n + 3, *(k + 2 for k in range(n + 2, 2 * n + 2))]
    storages = tuple(Storage(str(k), 10 * n if k == 0 else 10, k, r) for k, r in enumerate(released))
    return Trace(tuple(ops), storages, copy_on_write=True).check()


def test_a_search_ends_when_its_effort_does() -> None:
    """Not only between two peaks: a chain drops much at the first, each with all before it made again."""
    trace = chain(1000)
    budget = int(trace.unmanaged_peak[0] * 0.6)
    search = Search(Timeline(Problem.of(trace)), budget)
    assert not search.shave(limit_work=20_000)
    assert search.work < 5 * 20_000  # four times, and the drop that it was at
    search = Search(Timeline(Problem.of(trace)), budget)
    assert search.shave()
    assert search.work > 10 * 20_000
    taken = search.work
    search.settle(2_000)
    assert search.work - taken < 5 * 10 * 2_000
    search.timeline.check()


def test_a_long_pass_is_planned_well_in_little_time() -> None:
    trace = chain(3000)
    made = plan(trace, int(trace.unmanaged_peak[0] * 0.6), effort=100_000, solve=False)
    assert made.feasible
    holds(trace, made)
    assert made.overhead < 1.6  # with all the time there is 1.49


@pytest.mark.parametrize("writer", PASSES)
@pytest.mark.parametrize("rate", [None, 1e8])
def test_batches_take_out_what_is_not_needed(
    writer: LogWriter, rate: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = trace_of(writer)
    peak = trace.unmanaged_peak[0]
    link = TierLink("host", rate, rate) if rate else None
    removed = []
    thin = Timeline.thin

    def counted(timeline: Timeline, order: list[int], budget_bytes: int) -> int:
        before = timeline.extra_seconds
        removed.append(thin(timeline, order, budget_bytes))
        timeline.check()
        assert timeline.peak <= budget_bytes and timeline.extra_seconds <= before
        return removed[-1]

    monkeypatch.setattr(search, "_MANY", 0)
    monkeypatch.setattr(Timeline, "thin", counted)
    for ratio in (0.7, 0.5, 0.35):
        made = plan(trace, int(peak * ratio), link=link, effort=20_000)
        if made.feasible:
            holds(trace, made, link)
    assert sum(removed) > 0


def test_the_same_arguments_give_the_same_plan() -> None:
    trace = trace_of(network(9, depth=8))
    budget = int(trace.unmanaged_peak[0] * 0.5)
    link = TierLink("host", 1e7, 1e7)
    for to in (None, link):
        made, again = (plan(trace, budget, link=to, effort=60_000) for _ in range(2))
        assert made == again and comes_back(made)


def test_a_plan_says_how_far_it_may_be_from_the_best() -> None:
    trace = trace_of(network(9, depth=12))
    made = plan(trace, int(trace.unmanaged_peak[0] * 0.5))
    assert 1 + lower_bound_seconds(trace, made.budget_bytes) / trace.seconds <= made.lower_bound + 1e-9
    assert 1 < made.lower_bound <= made.overhead
    assert made.gap == pytest.approx(made.overhead / made.lower_bound - 1)


def test_what_is_carried_from_one_burst_to_another() -> None:
    """a and b are made from u again, before op 5 and before op 4."""
    x, u, a, b = range(4)
    ops = (
        Op("constant", 0.0, (), (x,), OpKind.CONSTANT),
        Op("u", 1.0, (x,), (u,)),
        Op("a", 1.0, (u,), (a,)),
        Op("b", 1.0, (u,), (b,)),
        Op("reads b", 1.0, (b,), (), OpKind.VIEW),
        Op("reads a", 1.0, (a,), (), OpKind.VIEW),
    )
    released = (HELD, 4, 6, 5)
    names = ("c.x", "1.0", "2.0", "3.0")
    storages = tuple(Storage(n, 10, k, r) for k, (n, r) in enumerate(zip(names, released, strict=True)))
    trace = Trace(ops, storages).check()
    forward = [Step(Do.COMPUTE, k) for k in range(4)] + [Step(Do.FREE, s) for s in (u, a, b)]
    first = [Step(Do.RECOMPUTE, 1), Step(Do.RECOMPUTE, 3), Step(Do.COMPUTE, 4)]
    last = [Step(Do.RECOMPUTE, 2), Step(Do.COMPUTE, 5)]
    assert replay(trace, forward + first + last, 40).valid
    assert carried(trace, forward + first + last) == [Carried(u, 4, 5)]
    again = [Step(Do.FREE, u), Step(Do.RECOMPUTE, 1)]
    assert replay(trace, forward + first + again + last, 40).valid
    assert carried(trace, forward + first + again + last) == []


def test_no_plan_for_less_than_an_op_needs() -> None:
    trace = trace_of(network(9, depth=4))
    made = plan(trace, 10)
    assert not made.feasible and not made.steps and made.seconds == float("inf")
    assert plan(Trace((), ()), 10).feasible


def test_plans_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    trace = trace_of(network(9, depth=12))
    made = plan(trace, int(trace.unmanaged_peak[0] * 0.5))
    holds(trace, made)
    assert trace.seconds < made.bound_seconds
    link = TierLink("host", 1e7, 1e7)
    holds(trace, plan(changed(trace, links=(link,)), made.budget_bytes, link=link), link)


def test_a_read_at_the_highest_event_is_no_op() -> None:
    """Near the floor, with a link: the planner searched the inputs of an event that only reads a storage back, and
    failed."""
    once, k = OpKind.ONCE, 1 << 10
    ops = (
        Op("clone", 1e-6, (), (0,)),
        Op("add", 1e-6, (), (1,), once),
        Op("convolution", 1e-6, (), (2, 3)),
        Op("relu", 1e-6, (), (4,)),
        Op("backward", 0.0, (1, 4), (5, 6, 7), once),
        Op("backward", 0.0, (2,), (8, 9), once),
        Op("convolution", 1e-6, (), (10, 11)),
        Op("relu", 1e-6, (), (12,)),
        Op("backward", 0.0, (12, 0), (13, 14, 15), once),
        Op("backward", 1e-6, (10,), (16, 17), once),
    )
    sizes = (768, 16 * k, 64 * k, 64 * k, 64 * k, 64 * k, 768, 51664, 64 * k, 49280) + (64 * k,) * 4 + (
        768, 66512, 64 * k, 65664,
    )  # fmt: skip
    released = (HELD, 6, 6, 3, 5, 5, HELD, 5, 6, 6, 10, 7, 9, 9, HELD, 9, 10, 10)
    maker = {s: i for i, op in enumerate(ops) for s in op.outputs}
    storages = tuple(Storage(f"s{s}", sizes[s], maker[s], released[s]) for s in range(18))
    trace = Trace(ops, storages, copy_on_write=False).check()
    link = TierLink("disk", 23.7e6, 119.4e6, 0.0, 200000, 1.6e-10, shared=True)
    plan(trace, 242_104, link=link, effort=100_000, solve=False)


def shaved_down(trace: Trace, ratio: float) -> Search:
    found = Search(Timeline(Problem.of(trace, lets_go=True)), int(trace.unmanaged_peak[0] * ratio))
    found.shave()
    return found


@pytest.mark.parametrize("writer", PASSES)
def test_what_is_not_looked_at_to_the_end_changes_no_choice(writer: LogWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = trace_of(writer)
    short = shaved_down(trace, 0.6)
    monkeypatch.setattr(search, "_FURTHER", float("inf"))
    long = shaved_down(trace, 0.6)
    assert short.timeline.extras() == long.timeline.extras() != []
    assert short.work <= long.work


@pytest.mark.parametrize("seed", range(4))
def test_what_is_hopeless_does_not_fit(seed: int) -> None:
    """It is seen without taking the event out. Most events that do not fit must be seen so, or looking costs as much as
    trying."""
    found = shaved_down(trace_of(network(seed, depth=8)), 0.5)
    timeline, seen, missed = found.timeline, 0, 0
    for key in timeline.extras():
        hopeless, before = found.hopeless(key), timeline.extras()
        timeline.mark()
        found.take_out(key)
        fits = timeline.peak <= found.budget and timeline.extras() != before
        timeline.undo()
        assert not (hopeless and fits)
        seen += hopeless
        missed += not hopeless and not fits
    assert seen > 4 * missed


def test_trading_wanders_and_ends_at_the_best() -> None:
    wandered = 0

    class Noted(Search):
        def _ruin(self) -> None:
            nonlocal wandered
            wandered += self.timeline.extra_seconds > least[-1] * (1 + 1e-9)
            least.append(min(least[-1], self.timeline.extra_seconds))
            super()._ruin()

    for seed in range(3):
        trace = trace_of(network(seed, depth=10))
        found = Noted(Timeline(Problem.of(trace, lets_go=True)), int(0.5 * trace.unmanaged_peak[0]))
        assert found.shave()
        least = [found.timeline.extra_seconds]
        found.improve(60_000)
        found.timeline.check()
        assert found.timeline.peak <= found.budget
        assert found.timeline.extra_seconds <= min(least) * (1 + 1e-9)
    assert wandered


@pytest.mark.parametrize("ratio", [0.7, 0.5, 0.4])
@pytest.mark.parametrize("seed", range(3))
def test_a_run_has_no_more_what_it_has_let_go_of(seed: int, ratio: float) -> None:
    """Plans that kept it had a DenseNet run three times as many ops again as planned."""
    trace = trace_of(network(seed, depth=8))
    budget = int(ratio * trace.unmanaged_peak[0])
    made = plan(trace, budget, effort=20_000, solve=False, lets_go=True)
    assert made.feasible
    holds(trace, made)
    assert not kept_past_its_end(trace, made)
    assert made.seconds >= plan(trace, budget, effort=20_000, solve=False).bound_seconds * (1 - 1e-6)


@pytest.mark.parametrize("rate", [5.0, 20.0, 200.0])
@pytest.mark.parametrize("ratio", [0.6, 0.45, 0.35])
@pytest.mark.parametrize("cycle", [False, True])
def test_what_a_run_has_let_go_of_has_no_copy(cycle: bool, ratio: float, rate: float) -> None:
    """A DenseNet's features are let go of in forward, and all that backward makes again is made of them."""
    builder = TraceBuilder()
    w = builder.constant("w", 1)
    builder.call("f", 5.0, ["w"], [("f0", 10, -1)])
    layers = range(1, 8)
    for i in layers:
        features = [f"f{k}" for k in range(i)]
        builder.call("cat", 0.1, features, [(f"cat{i}", 10 * i, -1)])
        builder.call("act", 0.1, [f"cat{i}"], [(f"act{i}", 10 * i, -1)])
        builder.call("conv", 5.0, [f"act{i}", "w"], [(f"f{i}", 10, -1)])
    builder.call("loss", 1.0, [f"f{layers[-1]}"], [("g", 10, -1)])
    for i in (0, *layers):
        builder.release(f"f{i}")
    for i in reversed(layers):
        builder.call("back", 5.0, [f"act{i}", f"cat{i}", "g"], [(f"g{i}", 10, -1)])
        for name in (f"act{i}", f"cat{i}"):
            builder.release(name)
    trace, link = builder.build(), TierLink("host", rate, rate)
    trace = changed(trace, copy_on_write=False, cycle=((w, w),) if cycle else ()).check()
    made = plan(trace, int(ratio * trace.unmanaged_peak[0]), link=link, effort=20_000, solve=False, lets_go=True)
    assert made.feasible
    assert cycle or holds(trace, made, link) is None
    assert not kept_past_its_end(trace, made)


def test_what_is_let_go_of_is_made_again_first() -> None:
    """`large` is cheaply made of `small`, which the program no longer holds: a schedule may keep it, a run cannot."""
    builder = TraceBuilder()
    builder.constant("w", 8)
    builder.call("small", 10.0, ["w"], [("small", 50, -1)])
    builder.call("large", 1.0, ["small"], [("large", 200, -1)])
    builder.release("small")
    builder.call("wide", 1.0, ["w"], [("wide", 300, -1)])
    builder.release("wide")
    builder.call("use", 1.0, ["large"], [("x", 8, -1)])
    builder.release("large")
    trace = builder.build().check()
    kept, gone = (plan(trace, 400, effort=2_000, solve=False, lets_go=lets_go) for lets_go in (False, True))
    assert kept.seconds == 14.0 and kept_past_its_end(trace, kept)
    assert gone.seconds == 24.0 and not kept_past_its_end(trace, gone)
    assert gone.bound_seconds > kept.seconds  # the bound knows, too


def kept_past_its_end(trace: Trace, made: Plan) -> int:
    """Reads of storages that the program's own op has made, or a tier had, and that the program has released since."""
    own: dict[int, bool] = {}
    reads = begun = 0
    for step in made.steps:
        if step.do is Do.RELOAD:
            reads += trace.storages[step.target].released <= begun
        elif step.do in (Do.COMPUTE, Do.RECOMPUTE):
            op = trace.ops[step.target]
            reads += sum(own[s] and trace.storages[s].released <= begun for s in op.inputs)
            own.update(dict.fromkeys(op.outputs, step.do is Do.COMPUTE))
            begun += step.do is Do.COMPUTE
    return reads


def test_no_more_search_than_the_periods_get_back() -> None:
    trace = trace_of(network(2, depth=10))
    budget = int(0.5 * trace.unmanaged_peak[0])
    few, many = (searched(trace, budget, periods) for periods in (0.0, 1e12))
    assert few < many / 2


def searched(trace: Trace, budget: int, periods: float) -> int:
    """Steps of trading."""
    found = Search(Timeline(Problem.of(trace)), budget)
    assert found.shave()
    before = found.work
    traded(found, 0.0, 400_000, periods)
    return found.work - before
