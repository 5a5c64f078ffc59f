"""The record of a step on fake tensors (`fake_step.py`), and its trace on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memmgr.config.sizes import SMALL_BYTES
from memmgr.policies.trace import HELD, Op, OpKind, Storage, Trace
from memmgr.tools.common.rates import Rates, Work

CALLS = 3
"""Calls of the step: the first makes the states, the period is between the other two."""

VIEW = Work("view", 0, 0, "int64")
"""Calls that move no bytes."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its bytes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Call:
    """A call that can be made again, on tensors that have bytes: `TensorSpec` stands where they were."""

    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass(slots=True)
class Block:
    """A storage of the step; places are in the list of events."""

    size: int
    birth: tuple[int, int, int]  # call, number of the op in it, number of the output
    born: int
    died: int = HELD


@dataclass(frozen=True, slots=True)
class Ran:
    name: str
    work: Work
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    writes: tuple[int, ...]
    again: bool
    backward: bool
    number: int  # of the call of the step


@dataclass(frozen=True)
class FakeStep:
    """A recorded step: events `begin` to before `end` are the period."""

    events: list[Ran]
    blocks: list[Block]
    begin: int
    end: int
    samples: dict[str, Call]  # by signature, a call that has it
    asked: str = ""  # where the step first asks for a floating point number; it got 1. Empty: nowhere.

    def trace(self, device: Rates) -> Trace:
        """The period as it is on a device."""
        return Builder(self, device).build()

    @property
    def works(self) -> list[Work]:
        """The calls of a period, in order."""
        return [e.work for e in self.events[self.begin : self.end]]


class Builder:
    """A trace of the period."""

    def __init__(self, of: FakeStep, device: Rates) -> None:
        self.of, self.device = of, device
        self.begin, self.end = of.begin, of.end
        self.large = {k for k, b in enumerate(of.blocks) if b.size >= SMALL_BYTES}
        self.ops: list[Op] = []
        self.storages: list[Storage] = []
        self.released: dict[int, int] = {}
        self.now: dict[int, int] = {}  # the storage that a block is
        self.takes: dict[Work, float] = {VIEW: 0.0}

    def build(self) -> Trace:
        blocks = self.of.blocks
        first = self._first_op()
        self._constant("elsewhere", self._most_small())
        starts = {
            k: self._constant(str(k), blocks[k].size, k)
            for k in sorted(self.large)
            if blocks[k].born < self.begin and blocks[k].died > first
        }
        deaths: dict[int, list[int]] = {}
        for k in self.large:
            deaths.setdefault(blocks[k].died, []).append(k)
        turn: int | None = None
        seconds = 0.0
        for at in range(self.begin, self.end):
            if at > first:  # a storage that is freed between two periods does not exist when one begins
                self._die(deaths.get(at, ()))
            e = self.of.events[at]
            if e.work not in self.takes:
                self.takes[e.work] = self.device.seconds(e.work)
            seconds += self.takes[e.work] + self.device.call_seconds
            if turn is None and e.backward:
                turn = len(self.ops)
            if self._run(at, e, seconds):
                seconds = 0.0  # of calls that touch nothing large, with the op after them
        self._die(deaths.get(self.end, ()))
        self.ops.append(Op("(rest)", seconds, (), (), OpKind.VIEW))
        storages = tuple(replace(s, released=self.released.get(i, HELD)) for i, s in enumerate(self.storages))
        cycle = self._cycle(starts)
        return Trace(tuple(self.ops), storages, self.device.name, turn, copy_on_write=False, cycle=cycle).check()

    def _first_op(self) -> int:
        """The event that is the first op of the trace; calls before it touch nothing large."""
        for at in range(self.begin, self.end):
            e = self.of.events[at]
            makes = self.large.intersection((*e.outputs, *e.writes))
            if makes or (e.work is not VIEW and self.large.intersection(e.inputs)):
                return at
        return self.begin

    def _constant(self, name: str, size: int, block: int = -1) -> int:
        self.storages.append(Storage(f"c.{name}", size, len(self.ops)))
        s = len(self.storages) - 1
        self.now[block] = s
        self.ops.append(Op("constant", 0.0, (), (s,), OpKind.CONSTANT))
        return s

    def _most_small(self) -> int:
        change = [0] * (len(self.of.events) + 2)
        for k, b in enumerate(self.of.blocks):
            if k not in self.large:
                change[b.born] += b.size
                change[min(b.died, len(change) - 1)] -= b.size
        level = most = 0
        for at, by in enumerate(change[: self.end]):
            level += by
            if at >= self.begin:
                most = max(most, level)
        return most

    def _run(self, at: int, e: Ran, seconds: float) -> bool:
        """Adds a call to the trace. Returns if it is an op of the trace."""
        k = len(self.ops)
        into = self._summed_into(at, e)
        inputs = dict.fromkeys(self.now[b] for b in e.inputs if b in self.now)
        fresh = [b for b in e.inputs if b in self.large and b not in self.now]  # has bytes, and no op of torch made it
        outputs: list[int] = []
        writes: list[tuple[int, int]] = []
        for b in dict.fromkeys((*fresh, *e.outputs, *e.writes)):
            if b not in self.large:
                continue
            old = self.now.get(b) if into is None else self.now.pop(into)
            self.storages.append(Storage(f"{k}.{len(outputs)}", self.of.blocks[b].size, k))
            self.now[b] = new = len(self.storages) - 1
            outputs.append(new)
            if old is not None:
                inputs[old] = None
                writes.append((old, new))
                self.released[old] = k + 1
        if not outputs and (not inputs or e.work is VIEW):
            return False
        kind = (OpKind.COMPUTE if e.again else OpKind.ONCE) if outputs else OpKind.VIEW
        if scratch := self.device.scratch_bytes(e.work):
            self.storages.append(Storage(f"{k}.scratch", scratch, k))
            self.released[len(self.storages) - 1] = k + 1
            outputs.append(len(self.storages) - 1)
            kind = OpKind.ONCE if kind == OpKind.VIEW else kind
        self.ops.append(Op(e.name, seconds, tuple(inputs), tuple(outputs), kind, tuple(writes)))
        return True

    def _summed_into(self, at: int, e: Ran) -> int | None:
        """For a sum of gradients, the gradient whose place it takes: autograd adds in place, but not to fake tensors."""
        if not e.backward or e.name != "aten::add.Tensor" or len(e.outputs) != 1 or e.outputs[0] not in self.large:
            return None
        blocks, size = self.of.blocks, self.of.blocks[e.outputs[0]].size
        return next(
            (b for b in e.inputs if b in self.now and blocks[b].died == at + 1 and blocks[b].size == size), None
        )

    def _die(self, blocks: Sequence[int]) -> None:
        for b in blocks:
            if b in self.now:
                self.released[self.now.pop(b)] = len(self.ops)

    def _cycle(self, starts: dict[int, int]) -> tuple[tuple[int, int], ...]:
        """A storage that exists in both periods follows itself; otherwise the result of the same op of the step takes
        its place.
        """
        named = {(b.birth[1], b.birth[2]): k for k in starts if (b := self.of.blocks[k]).birth[0] == CALLS - 2}
        found = []
        for k, s in self.now.items():
            b = self.of.blocks[k]
            before = k if k in starts else named.get(b.birth[1:]) if b.birth[0] == CALLS - 1 else None
            if k >= 0 and before is not None:
                found.append((s, starts[before]))
        return tuple(sorted(found))
