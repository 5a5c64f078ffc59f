"""One disturbed op of many that look alike changes nothing; an op without a like keeps its own time."""

from __future__ import annotations

from dataclasses import replace

from memmgr.policies.trace import Op, OpKind, Storage, Trace
from memmgr.policies.trace.smooth import LEAST_ALIKE, smoothed


def layers(seconds: list[float], size: int = 100) -> Trace:
    """A chain of ops of one kind that take `seconds`, and one that is alone."""
    ops = [Op("constant", 0.0, (), (0,), OpKind.CONSTANT)]
    storages = [Storage("c.x", size, 0)]
    for k, takes in enumerate(seconds):
        ops.append(Op("layer", takes, (k,), (k + 1,)))
        storages.append(Storage(f"{k + 1}.0", size, k + 1))
    ops.append(Op("layer", 9.0, (len(seconds),), (len(seconds) + 1,)))
    storages.append(Storage(f"{len(seconds) + 1}.0", size + 1, len(seconds) + 1))
    ops.append(Op("(between ops)", 5.0, (), (), OpKind.VIEW))
    return Trace(tuple(ops), tuple(storages)).check()


def test_ops_that_look_alike_take_their_median() -> None:
    trace = layers([1.0, 1.0, 7.0, 1.1])
    even = smoothed(trace)
    assert [op.seconds for op in even.ops] == [0.0, 1.05, 1.05, 1.05, 1.05, 9.0, 5.0]
    assert [replace(op, seconds=0.0) for op in even.ops] == [replace(op, seconds=0.0) for op in trace.ops]
    assert even.storages == trace.storages
    assert trace.ops[3].seconds == 7.0


def test_few_say_nothing() -> None:
    times = [1.0, 7.0, 2.0][: LEAST_ALIKE - 1]
    assert smoothed(layers(times)) == layers(times)


def test_forward_and_backward_are_told_apart() -> None:
    trace = layers([1.0, 1.0, 1.0, 3.0, 3.0, 3.0])
    even = smoothed(replace(trace, backward_at=4))
    assert [op.seconds for op in even.ops[1:7]] == [1.0] * 3 + [3.0] * 3
