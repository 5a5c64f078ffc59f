"""A measured period of the pager as a `memmgr.policies.trace.Trace`, and a plan for it as rows that the pager follows.

Further properties of a measured trace, in addition to those of all traces (`policies/trace/trace.py`):

- A storage is one version of a cell; small storages are not in it. A storage that existed when the period began is a
  constant.
- `c.elsewhere` is the most resident bytes outside of cells: small tensors, memory that C++ holds for itself.
- `scratch` is the memory that an op needed beyond its outputs at the worst moment inside it; it is released right
  after.
- Two-valued bytes can be packed to a bit for each element: their op makes the bits, and another op makes the bytes of
  them.
- An op without a recipe is `OpKind.ONCE`: ops that run without gradient (backward's own), and refused ones.
- `(between ops)` takes the time of the program itself, in which a CPU runs no op.
- `(not by an op)` makes storages that appeared between two ops: a storage that was resized (FSDP2's gathered
  parameters), a batch. It takes no time, and comes before the first op that touches it.
- In-place writes reuse their block (`copy_on_write` is False).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from memmgr.common.constants import (
    BEFORE,
    PACK_SECONDS_PER_BYTE,
    TOUCH_COMES,
    TOUCH_MAKES,
    TOUCH_RECIPE,
    TOUCH_WRITES,
    Row,
)
from memmgr.policies.trace import HELD, Op, OpKind, Storage, TierLink, Trace
from memmgr.policies.trace.plan import carried
from memmgr.policies.trace.schedule import Do, Step

if TYPE_CHECKING:  # it imports torch, which the planner's process does without
    from memmgr.native._pager import TimelineColumns

BETWEEN = "(between ops)"
COMES = "(not by an op)"
UNPACK = "(unpack)"
_LEAST_BETWEEN_SECONDS = 1e-4
Rows = list[tuple[int, int, int]]


class PackedRows(TypedDict):
    """As the pager takes them: `PlanRows`, each field an array of int64."""

    departures: bytes
    writes: bytes
    reads: bytes
    groups: bytes
    kept: bytes


@dataclass(frozen=True)
class Measured:
    """A period."""

    trace: Trace  # the ops that ran
    # the pager's position of each op of the trace; an op that the pager does not have has that of the next one
    position: list[int]
    ordinal: list[int]  # of each storage, its cell's; -1: it has none
    # the cell's ordinal in the period before, as the pager takes it, of each storage that the cycle begins with
    before: dict[int, int]
    hashes: bytes  # by which the pager knows the period again
    scratch: list[int]  # of each of the pager's ops, in bytes

    @property
    def two_valued(self) -> int:
        """How many storages can leave as bits."""
        return sum(op.name == UNPACK for op in self.trace.ops)


@dataclass(frozen=True)
class Noted:
    """A period as the pager noted it, which costs next to nothing to hand on; `measured` makes a trace of it."""

    columns: TimelineColumns  # from the pager
    links: tuple[TierLink, ...]  # the tiers below, as they were measured
    device: str = "cpu"  # the type of the managed one
    repeats: bool = False  # whether the period before it was the same, so that the trace is a cycle

    @property
    def ops(self) -> int:
        """How many ops the pager noted."""
        return len(self.columns["op"]) // 4

    @property
    def hashes(self) -> bytes:
        """By which the pager knows the period again."""
        return self.columns["hashes"]

    @property
    def scratch_bytes(self) -> int:
        """The sum of the bytes that ops needed beyond their outputs."""
        return int(np.frombuffer(self.columns["scratch"], dtype=np.uint64).sum())

    @property
    def two_valued(self) -> int:
        """How many storages can leave as bits; `Measured.two_valued`, without a trace."""
        flags = np.frombuffer(self.columns["flags"], dtype=np.uint8)
        first_touch = np.frombuffer(self.columns["first_touch"], dtype=np.uint32)
        made = np.flatnonzero(flags & (TOUCH_MAKES | TOUCH_WRITES))
        cell = np.frombuffer(self.columns["ordinal"], dtype=np.uint32)[made].astype(np.int64)
        op = np.searchsorted(first_touch, made, side="right").astype(np.int64)
        _, first = np.unique(op << 32 | cell, return_index=True)  # of an op that has a cell twice among its arguments
        bits = np.frombuffer(self.columns["bits"], dtype=np.uint32)[made[first]]
        return int(((flags[made[first]] & TOUCH_RECIPE != 0) & (bits != 0)).sum())

    def with_scratch_of(self, other: Noted) -> Noted:
        """The same, with each op's scratch raised to its scratch in `other`, a period of the same ops."""
        both = (np.frombuffer(of.columns["scratch"], dtype=np.uint64) for of in (self, other))
        columns = self.columns.copy()
        columns["scratch"] = np.maximum(*both).tobytes()
        return replace(self, columns=columns)

    def measured(self, modules: Sequence[str] = ()) -> Measured:
        """A trace, and the data that the pager needs to follow a plan for it.

        Raises `TraceError`: the columns do not make a trace. `modules`: paths of modules by their number.
        """
        return measured(self.columns, self.links, self.device, repeats=self.repeats, modules=modules)


def seconds_of(columns: TimelineColumns) -> float:
    """Duration of the period."""
    return sum(float(np.frombuffer(columns[part], dtype=np.float32).sum()) for part in ("seconds", "before"))


class _Builder:
    def __init__(self, columns: TimelineColumns, repeats: bool, modules: Sequence[str]) -> None:
        c = columns
        numbers = np.frombuffer(c["module"], dtype=np.uint32).tolist()
        self.module = [modules[n] if 0 < n < len(modules) else "" for n in numbers]
        self.repeats = repeats
        self.names = c["names"]
        self.op = np.frombuffer(c["op"], dtype=np.int32).tolist()
        self.first_touch = [*np.frombuffer(c["first_touch"], dtype=np.uint32).tolist(), len(c["flags"])]
        self.seconds = np.frombuffer(c["seconds"], dtype=np.float32).tolist()
        self.before = np.frombuffer(c["before"], dtype=np.float32).tolist()
        self.scratch = np.frombuffer(c["scratch"], dtype=np.uint64).tolist()
        self.other = np.frombuffer(c["other"], dtype=np.uint64)
        self.touched = np.frombuffer(c["ordinal"], dtype=np.uint32).tolist()
        self.flags = list(c["flags"])
        self.bits = np.frombuffer(c["bits"], dtype=np.uint32).tolist()
        self.sizes = np.frombuffer(c["sizes"], dtype=np.uint64).tolist()
        self.fixed = list(c["fixed"])
        self.prior = np.frombuffer(c["prior"], dtype=np.uint32).tolist()
        self.deaths: list[list[int]] = [[] for _ in range(len(self.op) + 1)]
        for at, ordinal in np.frombuffer(c["deaths"], dtype=np.uint32).reshape(-1, 2).tolist():
            self.deaths[min(at, len(self.op))].append(ordinal)
        self.ops: list[Op] = []
        self.position: list[int] = []
        self.storages: list[Storage] = []
        self.ordinal: list[int] = []
        self.now: dict[int, int] = {}  # the storage that a cell is
        self.released: dict[int, int] = {}
        self.packed: dict[int, int] = {}  # of a storage that is made of its bits: these
        self.hashes = c["hashes"]
        self.turn = c["turn"]
        self.backward_at: int | None = None

    def storage(self, name: str, size: int, ordinal: int = -1) -> int:
        self.storages.append(Storage(name, size, len(self.ops)))
        self.ordinal.append(ordinal)
        if ordinal >= 0:
            self.now[ordinal] = len(self.storages) - 1
        return len(self.storages) - 1

    def add(self, op: Op, position: int) -> None:
        self.ops.append(op)
        self.position.append(position)

    def constant(self, name: str, size: int, ordinal: int = -1) -> None:
        s = self.storage(f"c.{name}", size, ordinal)
        self.add(Op("constant", 0.0, (), (s,), OpKind.CONSTANT), 0)

    def build(self, links: tuple[TierLink, ...], device: str) -> Trace:
        if len(self.other):
            self.constant("elsewhere", int(self.other.max()))
        seen: set[int] = set()
        for ordinal, flags in zip(self.touched, self.flags, strict=True):
            if ordinal not in seen and not flags & (TOUCH_MAKES | TOUCH_COMES):
                self.constant(str(ordinal), self.sizes[ordinal], ordinal)
            seen.add(ordinal)
        waited = 0.0
        for k, number in enumerate(self.op):
            waited += self.before[k]
            self.die(k)
            if k == self.turn:
                self.backward_at = len(self.ops)
            if waited >= _LEAST_BETWEEN_SECONDS:
                self.add(Op(BETWEEN, waited, (), (), OpKind.VIEW), k)
                waited = 0.0
            self.run(k, self.names[number])
        self.die(len(self.op))
        storages = tuple(
            Storage(s.name, s.size_bytes, s.maker, self.released.get(i, HELD), self.pinned(i, s))
            for i, s in enumerate(self.storages)
        )
        return Trace(
            tuple(self.ops), storages, device, self.backward_at, links, copy_on_write=False, cycle=self.cycle()
        )

    def cycle(self) -> tuple[tuple[int, int], ...]:
        if not self.repeats:
            return ()
        met = ((self.now.get(self.prior[o]), s) for s, o in enumerate(self.ordinal) if o >= 0 and self.fixed[o] == 0)
        return tuple(
            (end, s) for end, s in met if end is not None and self.ops[self.storages[s].maker].kind == OpKind.CONSTANT
        )

    def pinned(self, storage: int, s: Storage) -> int:
        ordinal = self.ordinal[storage]
        return self.released.get(storage, HELD) if ordinal >= 0 and self.fixed[ordinal] else 0

    def die(self, k: int) -> None:
        for ordinal in self.deaths[k]:
            storage = self.now.pop(ordinal, None)
            if storage is not None:
                self.release(storage, len(self.ops))

    def release(self, storage: int, at: int) -> None:
        self.released[storage] = at
        if storage in self.packed:
            self.released[self.packed[storage]] = at

    def come(self, k: int) -> None:
        for i in range(self.first_touch[k], self.first_touch[k + 1]):
            ordinal = self.touched[i]
            if self.flags[i] & TOUCH_COMES:
                s = self.storage(f"{len(self.ops)}.0", self.sizes[ordinal], ordinal)
                self.add(Op(COMES, 0.0, (), (s,), OpKind.ONCE), k)

    def run(self, k: int, name: str) -> None:
        self.come(k)
        at = len(self.ops)
        inputs: dict[int, None] = {}
        outputs: list[int] = []
        made: set[int] = set()
        writes: list[tuple[int, int]] = []
        unpacked: list[tuple[int, int]] = []  # bits, and the cell that they are
        again = True
        for i in range(self.first_touch[k], self.first_touch[k + 1]):
            ordinal, flags = self.touched[i], self.flags[i]
            old = self.now.get(ordinal)
            if flags & (TOUCH_MAKES | TOUCH_WRITES):
                if ordinal in made:
                    continue  # twice among the arguments
                bits = self.bits[i] if flags & TOUCH_RECIPE else 0
                new = self.storage(f"{at}.{len(outputs)}", bits or self.sizes[ordinal], -1 if bits else ordinal)
                if bits:
                    unpacked.append((new, ordinal))
                outputs.append(new)
                made.add(ordinal)
                again = again and bool(flags & TOUCH_RECIPE)
                if old is not None:
                    inputs[old] = None
                    writes.append((old, new))
                    self.release(old, at + 1)
            elif old is not None and ordinal not in made:
                inputs[old] = None
        kind = (OpKind.COMPUTE if again else OpKind.ONCE) if outputs else OpKind.VIEW
        if self.scratch[k]:
            s = self.storage(f"{at}.scratch", self.scratch[k])
            outputs.append(s)
            self.released[s] = at + 1
            kind = OpKind.ONCE if kind == OpKind.VIEW else kind
        self.add(Op(name, self.seconds[k], tuple(inputs), tuple(outputs), kind, tuple(writes), self.module[k]), k)
        for bits, ordinal in unpacked:
            size = self.sizes[ordinal]
            new = self.storage(f"{len(self.ops)}.0", size, ordinal)
            self.packed[new] = bits
            self.add(Op(UNPACK, size * PACK_SECONDS_PER_BYTE, (bits,), (new,)), k)


def measured(
    columns: TimelineColumns,
    links: tuple[TierLink, ...],
    device: str = "cpu",
    *,
    repeats: bool = False,
    modules: Sequence[str] = (),
) -> Measured:
    """The period that ended last.

    Raises `TraceError`: the columns do not make a trace. `links`: the tiers below, as they were measured. `device`: the
    type of the managed one. `repeats`: whether the period before it was the same, so that the trace is a cycle.
    `modules`: paths of modules by their number; the first stands for no module.
    """
    builder = _Builder(columns, repeats, modules)
    trace = builder.build(links, device).check()
    before = {s: BEFORE | builder.prior[builder.ordinal[s]] for _, s in trace.cycle}
    return Measured(trace, builder.position, builder.ordinal, before, builder.hashes, builder.scratch)


@dataclass(frozen=True)
class PlanRows:
    """A plan for the pager: (position, ordinal, kind) each, sorted; `kept`: (made, read, ordinal)."""

    departures: Rows  # may be evicted after the op
    writes: Rows  # begin to be written after the op
    reads: Rows  # begin to be read before the op
    # storages that are made again before the op, in order, and evictions between them; with `Row.USED` before an
    # eviction, it waits until so many of the later ones have read the storage
    groups: Rows
    kept: Rows  # storages that the program has released, made before one op and read last before another

    def packed(self) -> PackedRows:
        """As the pager takes them."""
        return {
            "departures": _packed(self.departures),
            "writes": _packed(self.writes),
            "reads": _packed(self.reads),
            "groups": _packed(self.groups),
            "kept": _packed(self.kept),
        }


def _packed(rows: Rows) -> bytes:
    return np.array(rows, dtype=np.int64).tobytes()


def rows(of: Measured, steps: Sequence[Step], below: Sequence[int] = ()) -> PlanRows:
    """A schedule's decisions by position and ordinal.

    A storage that the program has released by then needs no row: it is made again with its readers. `below`: constants
    that are not resident when it begins.
    """
    trace, n = of.trace, len(of.trace.ops)
    first: dict[int, int] = {}  # of storages that the cycle begins with, the first op that touches each
    for k, op in enumerate(trace.ops):
        for s in op.inputs:
            if s in of.before:
                first.setdefault(s, k)

    def cell(s: int) -> int:
        return of.before[s] if done <= first.get(s, -1) else of.ordinal[s]

    def before(k: int) -> int:
        return of.position[k] if k < n else (of.position[-1] + 1 if n else 0)

    def after(k: int) -> int:
        early = trace.ops[k].name in (BETWEEN, COMES)  # before the op at its position
        return max(of.position[k] - early, 0)

    found: dict[str, Rows] = {"departures": [], "writes": [], "reads": [], "groups": []}
    resident: set[int] = set()
    away: dict[
        int, tuple[str, int]
    ] = {}  # by evicted storage: the list and the row of its departure, whose method its restore decides
    done = 0  # ops of the program
    for s in sorted(below, key=lambda s: -first.get(s, n)):  # where room was not short, they are there all the same
        away[s] = "departures", len(found["departures"])
        found["departures"].append((0, of.before[s], Row.OFFLOAD))
    grouped = False  # something was made again for the next of them already
    unmade: dict[
        int, tuple[int, ...]
    ] = {}  # ops that run together with the readers of their results, and have not yet: the storages that they read
    unread: dict[int, int] = {}  # by them: the row of a group by which it goes when they have

    def go(s: int) -> None:
        which, position = ("groups", before(done)) if grouped else ("departures", after(done - 1))
        away[s] = which, len(found[which])
        found[which].append((position, cell(s), Row.DROP))

    for step in steps:
        s = step.target
        if step.do is Do.COMPUTE:
            unmade.clear()
            unread.clear()
            done += 1
            grouped = False
            resident.update(made for made in trace.ops[s].outputs if made not in away)
            resident.difference_update(old for old, _ in trace.ops[s].writes)
        elif step.do is Do.RECOMPUTE:
            grouped = True
            op = trace.ops[s]
            again = [made for made in op.outputs if made not in resident]
            rows_of_it = [made for made in again if of.ordinal[made] >= 0 and trace.storages[made].released > done]
            resident.update(again)
            for made in again:
                away.pop(made, None)
            for made in rows_of_it:
                makes = before(done), of.ordinal[made], Row.MAKE
                if made in unread:  # it is still there then, and stays
                    found["groups"][unread.pop(made)] = makes
                else:
                    found["groups"].append(makes)
            if rows_of_it:
                todo = list(op.inputs)
                while todo:
                    todo += unmade.pop(trace.storages[todo.pop()].maker, ())
                still = {s for read in unmade.values() for s in read}
                unread = {s: row for s, row in unread.items() if s in still}
            else:
                unmade[s] = op.inputs
        elif step.do is Do.RELOAD:
            resident.add(s)
            if s in away:
                which, row = away.pop(s)
                position, ordinal, _ = found[which][row]
                found[which][row] = position, ordinal, Row.OFFLOAD
                found["reads"].append((before(done), cell(s), 0))
        elif step.do is Do.OFFLOAD:
            if of.ordinal[s] >= 0:
                found["writes"].append((after(done - 1), cell(s), 0))
        else:
            resident.discard(s)
            if of.ordinal[s] < 0 or trace.storages[s].released <= done:
                continue
            readers = sum(s in read for read in unmade.values())
            if readers:
                found["groups"].extend([(before(done), cell(s), Row.USED)] * readers)
                unread[s] = len(found["groups"])
            go(s)
    for s in away.keys() & {end for end, _ in trace.cycle}:  # comes back in the next pass
        which, row = away[s]
        position, ordinal, _ = found[which][row]
        found[which][row] = position, ordinal, Row.OFFLOAD
    last: dict[tuple[int, int], int] = {}  # kept storages and since when: until when
    for c in carried(trace, steps):
        if trace.storages[c.storage].released <= c.made and of.ordinal[c.storage] >= 0:
            last[c.storage, c.made] = max(last.get((c.storage, c.made), 0), c.read)
    kept = [(before(made), before(read), of.ordinal[s]) for (s, made), read in last.items()]

    # In the order of the plan: by position, except where the time between two ops shifts it.
    by_position = {which: sorted(those, key=lambda row: row[0]) for which, those in found.items()}
    return PlanRows(**by_position, kept=sorted(kept))
