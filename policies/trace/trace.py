"""One measured pass as plain data: ops over storages, their writes and releases, and the links.

**A trace.** Ops are numbered from 0 in the order in which the program ran them, constants included (an op that takes no
time and makes one storage: a parameter, a buffer, a batch). A storage is one *version* of one block of bytes, made by
exactly one op (`maker`). A view makes no storage: its op has the storage of its argument among its inputs, none among its
outputs, and later ops that read the view name the same storage. An in-place write makes a new storage of the same size
(rule 4): the old version is an input, and `Op.writes` pairs (old, new). `Trace.copy_on_write` tells if, as in the operator
logs, both exist side by side while the op runs, or share a block.

**Releases.** `Storage.released = k`: the program lost its last reference (a saved tensor counts as one)
after op k - 1 had started and before op k did, so an unmanaged run frees it as soon as op k - 1 has ended. `HELD`:
never, it is resident at the end. After its release no op of the program reads a storage; only a recomputation may.
`Storage.pinned_until = k`: until then the program itself holds it (a local, a list), so that dropping it would free
nothing; 0 for all storages of the operator logs, whose recorder stood under every tensor.

**Steps of a schedule** (recompute only; the judge is `check_schedule.py` of the operator logs):

- `compute k`: ops in order, each once, constants too. All inputs are resident, also those of a view. Its outputs become
  resident, on top of the inputs, and then no more than the budget may be: there is no moment in between.
- `recompute k`: any op computed before, except a constant. All inputs are resident. It makes those of its outputs that
  are not resident (resident ones stay, and are not doubled), needed or not. Costs the op's time again; a view costs
  nothing again, and never has to be.
- `free s`: s is resident; a constant only after its release, and it cannot be restored. Every other storage may be
  freed at any time, even while the program holds it. *No* storage is freed otherwise: a released storage stays resident
  until it is freed.
- at the end every storage with `released == HELD` is resident. In the operator logs that is parameters and buffers,
  their gradients (an op's output like any other: freed, it has to be made again) and sometimes the loss.

Time is the sum of the ops that ran; freeing takes none. The peak is that of the bytes resident after each compute or
recompute.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

VERSION = 2
"""Version of the trace as data; the file carries it."""

HELD = 2**62
"""`Storage.released` of storages that the program holds at the end."""


class TraceError(ValueError):
    """The input is not a trace; the message says where and why."""


class OpKind(IntEnum):
    """How an op may run again."""

    COMPUTE = 0
    VIEW = 1  # makes no storage; costs its time once
    CONSTANT = 2  # a parameter or a batch: there from the start, cannot be made again
    ONCE = 3  # must not run a second time (rule 8): its outputs can be offloaded, never recomputed


@dataclass(frozen=True, slots=True)
class Op:
    """One op of the program."""

    name: str  # the op's, for people
    seconds: float  # device time
    inputs: tuple[int, ...]  # storages that must be resident, each once, in the order of the arguments
    outputs: tuple[int, ...]  # storages that it makes, views left out
    kind: OpKind = OpKind.COMPUTE  # see `OpKind`
    # (old, new) for each argument that it writes in place; old is among the inputs, new among the outputs
    writes: tuple[tuple[int, int], ...] = ()
    # the path of the module that ran it, for people; empty where that is not known, in backward for example
    module: str = ""

    @property
    def is_run(self) -> bool:
        """An op of the program, and no constant, nor a time between ops."""
        return self.kind is not OpKind.CONSTANT and not self.name.startswith("(")


@dataclass(frozen=True, slots=True)
class Storage:
    """One version of one block of bytes."""

    name: str  # "k.j" for output j of op k, "c.NAME" for a constant: the names of the judge
    size_bytes: int  # >= 0
    maker: int  # the op that makes it
    released: int = HELD  # number of ops that had started when the program let go; `HELD` if it never did
    pinned_until: int = 0  # number of ops started when the last reference that letting go cannot undo was gone; 0: none


@dataclass(frozen=True, slots=True)
class TierLink:
    """A measured way to a tier below."""

    tier: str  # "host", "disk"
    write_bytes_per_second: float  # device to tier
    read_bytes_per_second: float  # tier to device
    latency_seconds: float = 0.0  # from asking to the first byte
    capacity_bytes: int | None = None  # room in the tier; None: unknown, taken as enough
    # compute time lost per byte copied, in one direction, which the policies count; 0: unknown
    cpu_seconds_per_byte: float = 0.0
    shared: bool = False  # reads and writes take turns (a disk), rather than run side by side (a bus)


@dataclass(frozen=True)
class Trace:
    """A pass. The module's text explains the numbers."""

    ops: tuple[Op, ...]  # in the order of the program
    storages: tuple[Storage, ...]  # numbered in the order of making
    device: str = ""  # where it was measured
    backward_at: int | None = None  # the number of ops before backward began; None if unknown
    links: tuple[TierLink, ...] = ()  # the tiers below, fastest first; may be empty
    # an in-place write has old and new version resident while it runs (operator logs); else the new one takes the old
    # one's block, which must then not be needed again
    copy_on_write: bool = True
    complete: bool = True  # False if the record ended inside an op, which is then left out
    # (held at the end, constant) each: the second at the start of a pass is the first at the end of the pass before;
    # empty if the passes before and after are not known
    cycle: tuple[tuple[int, int], ...] = ()

    @cached_property
    def constants(self) -> frozenset[int]:
        """Storages that cannot be made again and must stay until their release."""
        return frozenset(s for op in self.ops if op.kind == OpKind.CONSTANT for s in op.outputs)

    @cached_property
    def made_once(self) -> frozenset[int]:
        """Storages that cannot be made again, constants left out."""
        return frozenset(s for op in self.ops if op.kind == OpKind.ONCE for s in op.outputs)

    @cached_property
    def held_at_end(self) -> tuple[int, ...]:
        """Storages that must be resident at the end, in the order of making."""
        return tuple(i for i, s in enumerate(self.storages) if s.released == HELD)

    @cached_property
    def released_before(self) -> tuple[tuple[int, ...], ...]:
        """Entry k: storages released before op k starts, after op k - 1 did. Length: ops + 1; the last: after all."""
        rows: list[list[int]] = [[] for _ in range(len(self.ops) + 1)]
        for i, s in enumerate(self.storages):
            if s.released != HELD:
                rows[min(s.released, len(self.ops))].append(i)
        return tuple(tuple(row) for row in rows)

    @cached_property
    def handed_bytes(self) -> tuple[int, ...]:
        """Per op, bytes of the blocks that its in-place writes take over: not there twice. 0 with `copy_on_write`."""
        if self.copy_on_write:
            return (0,) * len(self.ops)
        return tuple(sum(self.storages[old].size_bytes for old, _ in op.writes) for op in self.ops)

    @property
    def ops_run(self) -> int:
        """How many ops the program runs: constants and times between ops are left out."""
        return sum(op.is_run for op in self.ops)

    @cached_property
    def seconds(self) -> float:
        """Time of the unmanaged pass, added op by op as a clock goes on: `sum` rounds otherwise from Python 3.12 on."""
        return functools.reduce(operator.add, (op.seconds for op in self.ops), 0.0)

    @cached_property
    def unmanaged_peak(self) -> tuple[int, int]:
        """(bytes, op): the peak with no budget, and the first op at which it is reached.

        As the judge counts: after op k each storage with `released == k + 1` is freed, so a storage released before its
        maker has started (which no real program does) would never be freed.
        """
        live = peak = at = 0
        for k, op in enumerate(self.ops):
            live += sum(self.storages[s].size_bytes for s in op.outputs) - self.handed_bytes[k]
            if live > peak:
                peak, at = live, k
            live -= sum(self.storages[s].size_bytes for s in self.released_before[k + 1]) - self.handed_bytes[k]
        return peak, at

    def check(self) -> Trace:
        """Itself, if it is consistent.

        Raises `TraceError`: a storage that no op makes, or two do, or an input that is read before it is made or after
        its release.
        """
        made: set[int] = set()
        held = set(self.held_at_end)
        for k, op in enumerate(self.ops):
            if not op.seconds >= 0:
                raise TraceError(f"op {k} ({op.name}) takes {op.seconds!r} seconds")
            for s in op.inputs:
                if s not in made:
                    raise TraceError(f"op {k} ({op.name}) reads storage {s}, which nothing has made")
                if self.storages[s].released <= k:
                    raise TraceError(f"op {k} ({op.name}) reads {self.storages[s].name} after its release")
            for s in op.outputs:
                if not 0 <= s < len(self.storages) or s in made or self.storages[s].maker != k:
                    raise TraceError(f"op {k} ({op.name}) makes storage {s}, which is not its own")
                made.add(s)
        for end, start in self.cycle:
            if end not in held or start not in self.constants:
                raise TraceError(
                    f"storage {end} is said to be {start} in the next pass, but is not held or that no constant"
                )
        if len(made) != len(self.storages):
            raise TraceError(f"{len(self.storages) - len(made)} storages have no maker")
        return self
