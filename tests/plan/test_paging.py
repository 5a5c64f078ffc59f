"""Plans of passes that repeat: judged by rules that are not their own, against a bound, and ending as they begin."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memmgr.policies.plan.paging import least_seconds, paged
from memmgr.policies.plan.planner import plan
from memmgr.policies.trace import HELD, Op, OpKind, Storage, TierLink, Trace, TraceBuilder, TraceError
from memmgr.policies.trace.schedule import Do, Step, replay
from memmgr.telemetry.trace_file import read_trace, write_trace

from .judge import judged

LINK = TierLink("disk", 1000.0, 1000.0, shared=True)


class Training:
    """A period as the pager measures it: the optimizer's step, forward, backward; the step's gradients come from before."""

    def __init__(self, layers: int, seed: int = 0, seconds: float = 0.01, sizes: list[int] | None = None) -> None:
        self.random = random.Random(seed)
        self.ops: list[Op] = []
        self.storages: list[Storage] = []
        self.cycle: list[tuple[int, int]] = []
        sizes = sizes or [self.random.randrange(1, 12) for _ in range(layers)]
        parameters, states, gradients = ([self.constant(size) for size in sizes] for _ in range(3))
        starts = list(parameters), list(states), list(gradients)
        activations = [self.constant(3)]
        for i in range(layers):  # the step writes parameter and state in place, and lets the gradient go
            new_parameter, new_state = self.new(sizes[i]), self.new(sizes[i])
            writes = ((parameters[i], new_parameter), (states[i], new_state))
            self.op(seconds / 10, (parameters[i], states[i], gradients[i]), (new_parameter, new_state), writes)
            for old, _ in writes:
                self.release(old)
            self.release(gradients[i])
            parameters[i], states[i] = new_parameter, new_state
        for i in range(layers):
            made = self.new(self.random.randrange(1, 12))
            self.op(seconds, (parameters[i], activations[-1]), (made,))
            activations.append(made)
        flowing = activations.pop()
        self.turn = len(self.ops)
        for i in reversed(range(layers)):
            gradient, back = self.new(sizes[i]), self.new(3)
            once = OpKind.ONCE
            self.op(2 * seconds, (parameters[i], activations[i], flowing), (gradient, back), kind=once)
            self.release(flowing)
            if i:
                self.release(activations[i])
            gradients[i], flowing = gradient, back
        for ends, begins in zip((parameters, states, gradients), starts, strict=True):
            self.cycle += list(zip(ends, begins, strict=True))

    def new(self, size: int) -> int:
        self.storages.append(Storage(f"s{len(self.storages)}", size, len(self.ops)))
        return len(self.storages) - 1

    def constant(self, size: int) -> int:
        s = self.new(size)
        self.ops.append(Op("constant", 0.0, (), (s,), OpKind.CONSTANT))
        return s

    def op(
        self,
        seconds: float,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        writes: tuple[tuple[int, int], ...] = (),
        kind: OpKind = OpKind.COMPUTE,
    ) -> None:
        self.ops.append(Op("op", seconds, inputs, outputs, OpKind.ONCE if writes else kind, writes))

    def release(self, s: int) -> None:
        self.storages[s] = replace(self.storages[s], released=len(self.ops))

    def trace(self) -> Trace:
        return Trace(
            tuple(self.ops),
            tuple(self.storages),
            "cpu",
            self.turn,
            (LINK,),
            copy_on_write=False,
            cycle=tuple(self.cycle),
        ).check()


def least(trace: Trace) -> int:
    """The largest op's bytes, and those that stay."""
    stays = sum(trace.storages[s].size_bytes for s in trace.constants - {start for _, start in trace.cycle})
    sizes = [s.size_bytes for s in trace.storages]
    handed = trace.handed_bytes
    return stays + max(sum(sizes[s] for s in {*op.inputs, *op.outputs}) - handed[k] for k, op in enumerate(trace.ops))


@given(
    *(st.integers(1, 12), st.integers(0, 50), st.floats(0.0, 1.0), st.sampled_from([50.0, 1000.0, 1e6]), st.booleans()),
    st.sampled_from([0.0, 0.01]),
)
@settings(max_examples=30, deadline=None)
def test_what_is_paged_is_valid_and_not_below_the_bound(
    layers: int, seed: int, share: float, rate: float, shared: bool, cpu: float
) -> None:
    trace = Training(layers, seed).trace()
    low, high = least(trace), trace.unmanaged_peak[0]
    budget = int(low + share * (high - low))
    link = TierLink("disk", rate, rate, shared=shared, cpu_seconds_per_byte=cpu)
    made = paged(trace, budget, link)
    assert made is not None  # the blocks of every op fit, so it can be paged
    cost = judged(trace, made, budget, link)
    assert cost.valid, cost.why
    assert cost.peak_bytes <= made.peak_bytes <= budget
    # Not the same clock: the judge also waits for the write of a block that ends.
    longest = max(s.size_bytes for s in trace.storages) / rate
    assert cost.seconds <= 1.1 * made.seconds + longest, "by the judge's clock it is slower than it says"
    assert made.seconds >= least_seconds(trace, budget, link) * (1 - 1e-9)
    whole = plan(trace, budget, link=link, effort=2_000)
    assert whole.feasible
    assert whole.seconds <= made.seconds * (1 + 1e-9)
    played = replay(
        trace, whole.steps, budget, write_rate=rate, read_rate=rate, shared=shared, away=whole.away, clean=whole.clean
    )
    assert played.valid, played.why


def test_below_what_an_op_touches_nothing_is_said_to_fit() -> None:
    trace = Training(4).trace()
    assert paged(trace, least(trace) - 1, LINK) is None
    assert not plan(trace, least(trace) - 1, link=LINK).feasible


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_no_block_is_written_that_stays_in_memory(share: float) -> None:
    """Both ways of the link are free for each other, so a write that is for nothing would cost no time."""
    link = TierLink("host", 1000.0, 1000.0)
    for seed in range(20):
        trace = Training(10, seed).trace()
        budget = int(least(trace) + share * (trace.unmanaged_peak[0] - least(trace)))
        made = paged(trace, budget, link)
        assert made is not None and made.written_bytes <= made.read_bytes, seed


def test_a_cycle_scans_its_states_once() -> None:
    """LRU would miss all of it: as many blocks as possible stay, and the streamed ones are read once and written once."""
    trace = Training(24, seed=3).trace()
    budget = trace.unmanaged_peak[0] // 2
    made = paged(trace, budget, LINK)
    assert made is not None
    sizes = {s: trace.storages[s].size_bytes for _, s in trace.cycle}
    per_pass = sum(sizes.values())
    assert 0 < len(made.away) < len(sizes)
    # Parameters twice (step, and reads of the pass), states and gradients once; all of it if no block stayed.
    assert made.read_bytes < 2 * per_pass - budget / 2


def test_what_lives_on_is_near_the_bound_where_the_step_is_the_wall() -> None:
    for share in (0.75, 0.5, 0.35):
        trace = Training(24, seed=1).trace()
        budget = int(trace.unmanaged_peak[0] * share)
        made = plan(trace, budget, link=LINK)
        assert made.feasible
        assert made.gap < 0.1


def test_what_nobody_touches_again_need_not_be_written() -> None:
    """Two gradients that the step changes, as fused AdamW's schema says, before the program lets go of both; room for one.

    One comes in before the step's second op, and one goes out after backward's first: two seconds, which hide the ops.
    """
    c, once = OpKind.CONSTANT, OpKind.ONCE
    ops = [Op("constant", 0.0, (), (s,), c) for s in (0, 1)]
    ops += [Op("step", 0.1, (s,), (s + 2,), once, ((s, s + 2),)) for s in (0, 1)]
    ops += [Op("forward", 0.1, (), (), OpKind.VIEW)]
    ops += [Op("backward", 0.1, (), (s,), once) for s in (4, 5)]
    released = {0: 3, 1: 4, 2: 5, 3: 5}
    makers = (0, 1, 2, 3, 5, 6)
    storages = tuple(Storage(f"s{s}", 10, maker, released.get(s, HELD)) for s, maker in enumerate(makers))
    trace = Trace(tuple(ops), storages, "cpu", 5, (), copy_on_write=False, cycle=((4, 0), (5, 1))).check()
    assert least_seconds(trace, 10, TierLink("disk", 10.0, 10.0, shared=True)) == pytest.approx(2.0)


def test_a_link_that_is_never_waited_for_takes_the_time_of_its_copies() -> None:
    """Reads and writes take their time from the processor, however fast the link is."""
    trace = Training(24, seed=3).trace()
    budget = trace.unmanaged_peak[0] // 3
    link = TierLink("disk", 1e9, 1e9, cpu_seconds_per_byte=0.01)
    bound, made = least_seconds(trace, budget, link), paged(trace, budget, link)
    assert made is not None
    live = sum(trace.storages[s].size_bytes for _, s in trace.cycle)
    rounding = 1e-12  # sums are made in other orders
    assert trace.seconds + 2 * (live - budget) * 0.01 <= bound + rounding
    assert bound <= made.seconds + rounding
    assert least_seconds(trace, budget, replace(link, cpu_seconds_per_byte=0.0)) == pytest.approx(trace.seconds)


def test_states_cost_nothing_where_all_fits() -> None:
    trace = Training(6).trace()
    made = plan(trace, trace.unmanaged_peak[0], link=LINK)
    assert made.seconds == pytest.approx(trace.seconds)
    assert not made.away
    assert all(step.do in (Do.COMPUTE, Do.FREE) for step in made.steps)


def test_two_blocks_that_take_turns_stay() -> None:
    """An average and its copy that swap roles every pass: which is which is known in none of them."""
    a, b = Storage("a", 5, 0), Storage("b", 5, 1)
    made, freed = Storage("m", 4, 2), Storage("n", 4, 3)
    ops = (
        Op("constant", 0.0, (), (0,), OpKind.CONSTANT),
        Op("constant", 0.0, (), (1,), OpKind.CONSTANT),
        Op("op", 1.0, (0,), (2,)),
        Op("op", 1.0, (1,), (3,)),
    )
    storages = (a, b, replace(made, released=3), replace(freed, released=4))
    trace = Trace(ops, storages, copy_on_write=False, cycle=((0, 1), (1, 0))).check()
    found = paged(trace, 14, LINK)
    assert found is not None and found.away == ()
    assert paged(trace, 13, LINK) is None


def test_a_cycle_is_in_the_file(tmp_path: Path) -> None:
    trace = Training(3).trace()
    write_trace(tmp_path / "trace.jsonl", trace)
    assert read_trace(tmp_path / "trace.jsonl") == trace


def test_a_cycle_of_what_is_not_there_is_refused() -> None:
    trace = Training(2).trace()
    end, _ = trace.cycle[0]
    with pytest.raises(TraceError, match="next pass"):
        replace(trace, cycle=((end, end),)).check()
    assert trace.storages[end].released == HELD


def replaced(seconds: float = 0.01) -> Trace:
    """A tensor made of the one that it replaces: for one op both are resident."""
    ops, storages = [], []
    for i in range(4):
        storages.append(Storage(f"c.{i}", 4, i, released=min(7 + 2 * i, 12)))
        ops.append(Op("constant", 0.0, (), (i,), OpKind.CONSTANT))
    for i in range(4):
        k = len(ops)
        storages.append(Storage(f"{k}.0", 4, k))
        ops.append(Op("made of it", seconds, (i,), (4 + i,), OpKind.ONCE))
        ops.append(Op("read", seconds, (4 + i,), (), OpKind.VIEW))
    cycle = tuple((4 + i, i) for i in range(4))
    return Trace(tuple(ops), tuple(storages), "cpu", None, (LINK,), copy_on_write=False, cycle=cycle).check()


@pytest.mark.parametrize("budget", [24, 22, 20, 16, 12])
def test_what_replaces_something_while_it_is_there_is_another_block(budget: int) -> None:
    """It was taken for the block that ends then, and was counted as gone for the rest of the pass."""
    trace = replaced()
    made = plan(trace, budget, link=LINK, solve=False)
    if made.feasible:
        cost = judged(trace, made, budget, LINK)
        assert cost.valid, cost.why
    assert made.feasible or budget < 20


@pytest.mark.parametrize("budget", [44, 34, 30, 26])
def test_what_takes_the_place_of_something_that_dies_leaves_none_there(budget: int) -> None:
    """The next pass begins with both: the dead block was counted as freed from then on."""
    ops = (
        *(Op("constant", 0.0, (), (i,), OpKind.CONSTANT) for i in range(3)),
        Op("last use", 0.01, (1,), (3,), OpKind.ONCE),
        Op("f", 0.01, (0, 3), (4,), OpKind.ONCE),
        Op("g", 0.01, (2, 4), (5,), OpKind.ONCE),
        Op("new", 0.01, (5,), (6,), OpKind.ONCE),
    )
    sizes, released = (10, 10, 10, 4, 4, 4, 10), (HELD, 4, HELD, 5, 6, 7, HELD)
    storages = tuple(Storage(f"s{i}", sizes[i], i, released[i]) for i in range(7))
    trace = Trace(ops, storages, links=(LINK,), copy_on_write=False, cycle=((0, 1), (6, 0), (2, 2))).check()
    made = plan(trace, budget, link=LINK, solve=False)
    assert made.feasible or budget < 30
    if made.feasible:
        cost = judged(trace, made, budget, LINK)
        assert cost.valid, cost.why


def test_an_op_that_reads_what_is_changed_in_place_later_does_not_run_again_after_that() -> None:
    """The planner's own schedule was no program, and it failed on it: blocks that live on take no room there, nor do
    their copies.
    """
    once = OpKind.ONCE
    ops = (
        Op("constant", 0.0, (), (0,), OpKind.CONSTANT),
        Op("constant", 0.0, (), (1,), OpKind.CONSTANT),
        Op("changed", 0.01, (0, 1), (2,), once, ((1, 2),)),
        Op("made", 0.01, (2,), (3,)),
        Op("f", 0.01, (3,), (4,), once),
        Op("f", 0.001, (3, 0), (5,)),
        Op("again", 0.001, (3, 5), (6,)),
        Op("f", 0.01, (3, 5), (7,), once),
        Op("f", 0.01, (0,), (8,), once),
        Op("changed", 0.01, (3,), (9,), once, ((3, 9),)),
        Op("f", 0.01, (0,), (10,), once),
        Op("changed", 0.01, (7, 6, 9), (11,), once, ((9, 11),)),
    )
    sizes = (1, 30, 30, 30, 3, 1, 6, 1, 6, 30, 1, 30)
    released = (HELD, 3, 5, 10, 12, 11, 12, 12, 9, 12, 12, HELD)
    storages = tuple(Storage(f"s{i}", sizes[i], i, released[i]) for i in range(12))
    trace = Trace(ops, storages, "cpu", None, (LINK,), copy_on_write=False, cycle=((0, 0), (11, 1))).check()
    plan(trace, int(0.9 * trace.unmanaged_peak[0]), link=LINK, solve=False)


def test_what_is_made_again_for_its_readers_is_not_written_below() -> None:
    """The program does not hold it, so a run has no cell that could be evicted between them."""
    builder = TraceBuilder(copy_on_write=False)
    w = builder.constant("w", 1)
    builder.call("x", 1.0, ["w"], [("x", 10, -1)])
    for name in ("a", "b"):
        builder.call(name, 1.0, ["x"], [(name, 10, -1)])
    builder.release("x")
    builder.call("turn", 1.0, ["w"], [])
    builder.call("read", 1.0, ["a"], [])
    builder.release("a")
    builder.call("wide", 1.0, ["w"], [("wide", 50, -1)])
    builder.release("wide")
    builder.call("read", 1.0, ["b"], [])
    builder.release("b")
    trace = replace(builder.build(), cycle=((w, w),)).check()
    x, a, b, wide = (
        next(s for s, one in enumerate(trace.storages) if one.name.startswith(f"{k}.")) for k in (1, 2, 3, 6)
    )

    def program(keep: bool) -> Iterator[Step]:
        for k in range(4):
            yield Step(Do.COMPUTE, k)
        yield from (Step(Do.FREE, s) for s in (x, a, b))
        yield Step(Do.COMPUTE, 4)
        yield Step(Do.RECOMPUTE, 1)
        yield Step(Do.RECOMPUTE, 2)
        if not keep:
            yield Step(Do.FREE, x)
        yield Step(Do.COMPUTE, 5)
        yield Step(Do.FREE, a)
        yield Step(Do.COMPUTE, 6)
        yield Step(Do.FREE, wide)
        if not keep:
            yield Step(Do.RECOMPUTE, 1)
        yield Step(Do.RECOMPUTE, 3)
        yield Step(Do.FREE, x)
        yield Step(Do.COMPUTE, 7)
        yield Step(Do.FREE, b)

    assert paged(trace, 61, LINK, program(keep=True)) is not None
    assert paged(trace, 55, LINK, program(keep=False)) is not None
    assert paged(trace, 55, LINK, program(keep=True)) is None
