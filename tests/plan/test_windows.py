"""Which blocks leave: those whose copies have time between their last change and the moment at which memory is short."""

import pytest

from memmgr.policies.plan.paging import paged
from memmgr.policies.plan.windows import chosen
from memmgr.policies.trace import HELD, Op, OpKind, Storage, TierLink, Trace
from memmgr.policies.trace.blocks import plain, program_of

from .judge import judged

LINK = TierLink("host", 100.0, 100.0)
"""A block of 10 takes 0.1 s each way."""


def steps(states: int, *, ops: int = 10, seconds: float = 0.1, peak: int = 40) -> Trace:
    """A period that changes the states in turn, one in so many ops, and then has an op of `peak` bytes."""
    made = [Storage(f"c.{i}", 10, i) for i in range(states)]
    program = [Op("constant", 0.0, (), (i,), OpKind.CONSTANT) for i in range(states)]
    now = list(range(states))

    def op(inputs: tuple[int, ...], size: int, writes: tuple[tuple[int, int], ...] = (), released: int = HELD) -> int:
        made.append(Storage(f"{len(program)}.0", size, len(program), released))
        pairs = tuple((old, len(made) - 1) for old, _ in writes)
        program.append(Op("op", seconds, inputs, (len(made) - 1,), OpKind.ONCE, pairs))
        return len(made) - 1

    for i in range(states):
        old = now[i]
        made[old] = Storage(made[old].name, 10, made[old].maker, released=len(program) + 1)
        now[i] = op((old,), 10, ((old, -1),))
        for _ in range(ops - 1):
            op((), 1, released=len(program) + 1)
    op((), peak, released=len(program) + 1)
    for _ in range(states * ops):
        op((), 1, released=len(program) + 1)
    cycle = tuple(zip(now, range(states), strict=True))
    return Trace(tuple(program), tuple(made), "cuda", None, (LINK,), copy_on_write=False, cycle=cycle).check()


def test_the_block_that_was_changed_first_leaves() -> None:
    """Belady's choice, the block that is touched last, is the one that was changed just before the peak."""
    trace = steps(4, ops=1)
    program = program_of(trace, plain(trace))
    assert set(chosen(program, 70, LINK)) == {(0, 0)}  # the peak is 80
    assert set(chosen(program, 60, LINK)) == {(0, 0), (1, 0)}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("leave", [1, 2, 3])
def test_copies_that_fit_into_their_windows_cost_nothing(leave: int, shared: bool) -> None:
    trace = steps(4, ops=2)
    link = TierLink("host", 100.0, 100.0, shared=shared)
    budget = trace.unmanaged_peak[0] - 10 * leave
    made = paged(trace, budget, link)
    assert made is not None
    assert made.seconds == pytest.approx(trace.seconds)
    assert made.written_bytes == made.read_bytes == 10 * leave
    cost = judged(trace, made, budget, link)
    assert cost.valid, cost.why
    assert cost.seconds == pytest.approx(trace.seconds)


def test_writes_go_on_while_an_op_waits_for_a_read() -> None:
    """The link has both ways: where all states move, a pass takes as long as the copies of one way."""
    trace = steps(8, ops=1, seconds=0.001, peak=100)
    made = paged(trace, 110, LINK)
    assert made is not None
    assert made.read_bytes == made.written_bytes == 70
    assert judged(trace, made, 110, LINK).valid
    one_way = made.read_bytes / LINK.read_bytes_per_second
    assert made.seconds < 1.5 * one_way  # 2 * one_way if they took turns


def test_a_block_without_changes_is_never_written() -> None:
    made = [Storage("c.0", 10, 0), Storage("1.0", 1, 1, released=2), Storage("2.0", 40, 2, released=3)]
    program = (
        Op("constant", 0.0, (), (0,), OpKind.CONSTANT),
        Op("read", 0.1, (0,), (1,), OpKind.ONCE),
        Op("large", 0.1, (), (2,), OpKind.ONCE),
        Op("nothing", 0.1, (), (), OpKind.ONCE),
    )
    trace = Trace(program, tuple(made), "cuda", None, (LINK,), copy_on_write=False, cycle=((0, 0),)).check()
    paging = paged(trace, 45, LINK)
    assert paging is not None
    assert (paging.written_bytes, paging.read_bytes) == (0, 10)
    assert paging.seconds == pytest.approx(trace.seconds)


def test_each_gap_that_helps_is_chosen_where_all_do_not_suffice() -> None:
    trace = steps(3, ops=1)
    assert set(chosen(program_of(trace, plain(trace)), 10, LINK)) == {(0, 0), (1, 0), (2, 0)}


def test_the_waits_of_a_pass_are_time_for_copies() -> None:
    trace = steps(3, ops=1, seconds=0.0)
    program = program_of(trace, plain(trace))
    assert set(chosen(program, 60, LINK)) == {(0, 0)}
    took = [0.0] * len(program.steps)
    took[0] = 1.0  # the first state is touched then, so it has to be back before. The others can be read during it
    assert set(chosen(program, 60, LINK, took)) == {(1, 0)}
