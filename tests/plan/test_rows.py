"""A schedule as the rows that the pager follows."""

from dataclasses import replace
from functools import partial

from memmgr.common.constants import Row
from memmgr.policies.trace import HELD, Op, OpKind, Storage, Trace
from memmgr.policies.trace.schedule import Do, Step
from memmgr.policies.trace.schedule import replay as replayed
from memmgr.runtime.timeline import Measured, rows

C, A, GHOST, B, OUT = range(5)
compute, again, free = (partial(Step, do) for do in (Do.COMPUTE, Do.RECOMPUTE, Do.FREE))


def period() -> Measured:
    """A from a constant, a ghost from A, B from the ghost; the last op reads B and A."""
    ops = (
        Op("constant", 0.0, (), (C,), OpKind.CONSTANT), Op("a", 1.0, (C,), (A,)), Op("ghost", 1.0, (A,), (GHOST,)),
        Op("b", 1.0, (GHOST,), (B,)), Op("between", 1.0, (C,), (), OpKind.VIEW), Op("last", 1.0, (B,), (OUT,)),
        Op("end", 1.0, (A,), (), OpKind.VIEW),
    )  # fmt: skip
    storages = (
        Storage("c", 1, 0, HELD), Storage("a", 1, 1, 7), Storage("ghost", 1, 2, 4), Storage("b", 1, 3, 6), Storage("out", 1, 5, HELD),
    )  # fmt: skip
    trace = Trace(ops, storages, "cpu", None, ())
    return Measured(trace.check(), [0, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4], {}, b"", [0] * 6)


BEFORE = [*map(compute, range(4)), *map(free, (GHOST, A, B)), compute(4), again(1), again(2)]


def test_what_is_made_with_its_reader_has_its_inputs_until_then() -> None:
    """The pager makes the ghost when B is: an A that went before would be made a second time, and stay. After that it goes: the
    ghost and B may not have room beside it."""
    of = period()
    steps = [
        *BEFORE, free(A), again(3), free(GHOST), compute(5), free(B),
        again(1), compute(6), free(A),
    ]  # fmt: skip
    assert replayed(of.trace, steps, 4).valid
    made = rows(of, steps)
    assert made.groups == [(4, A, Row.MAKE), (4, A, Row.USED), (4, A, Row.DROP), (4, B, Row.MAKE), (5, A, Row.MAKE)]
    assert sorted(made.departures) == [(2, A, Row.DROP), (2, B, Row.DROP)]


def test_what_would_go_when_it_is_read_and_is_made_again_before_that_stays() -> None:
    of = period()
    steps = [
        *BEFORE, free(A), again(1), again(3), free(GHOST), compute(5),
        free(B), compute(6), free(A),
    ]  # fmt: skip
    assert replayed(of.trace, steps, 4).valid
    assert rows(of, steps).groups == [(4, A, Row.MAKE), (4, A, Row.USED), (4, A, Row.MAKE), (4, B, Row.MAKE)]


def test_what_an_op_takes_for_itself_keeps_nothing() -> None:
    """An op's scratch is made with its result and read by no op. It had kept the op's inputs until the group's end."""
    of = period()
    scratch, late = 5, 6
    ops = list(of.trace.ops)
    ops[2] = Op("ghost", 1.0, (A,), (GHOST, scratch))
    ops[4] = Op("late", 1.0, (C,), (late,))
    ops[5] = Op("last", 1.0, (B, late), (OUT,))
    storages = (*of.trace.storages, Storage("scratch", 1, 2, 3), Storage("late", 1, 4, 6))
    of = replace(of, trace=replace(of.trace, ops=tuple(ops), storages=storages).check(), ordinal=[0, 1, 2, 3, 4, -1, 5])
    steps = [
        *(compute(k) for k in range(3)), free(scratch), compute(3), free(GHOST), free(A),
        free(B), compute(4), free(late), again(1), again(2), free(A),
        free(scratch), again(3), free(GHOST), again(4), compute(5), free(B),
        free(late), again(1), compute(6), free(A),
    ]  # fmt: skip
    assert replayed(of.trace, steps, 6).valid
    assert rows(of, steps).groups == [
        (4, A, Row.MAKE), (4, A, Row.USED), (4, A, Row.DROP), (4, B, Row.MAKE), (4, 5, Row.MAKE), (5, A, Row.MAKE)
    ]  # fmt: skip


def test_what_later_groups_read_is_named_by_its_cell() -> None:
    """All features are equally large, and the wrong ones were kept."""
    of = period()
    ops = list(of.trace.ops)
    ops[6] = Op("end", 1.0, (B,), (), OpKind.VIEW)
    storages = list(of.trace.storages)
    storages[B] = replace(storages[B], released=7)
    of = replace(of, trace=replace(of.trace, ops=tuple(ops), storages=tuple(storages)).check())
    steps = [
        *(compute(k) for k in range(4)), free(GHOST), free(B), compute(4), again(2),
        again(3), compute(5), free(B), again(3), compute(6), free(GHOST),
        free(A), free(B),
    ]  # fmt: skip
    assert replayed(of.trace, steps, 5).valid
    assert rows(of, steps).kept == [(4, 5, GHOST)]
