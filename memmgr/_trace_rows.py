"""A measured pass put in order: constants first, then the ops as they ran, with the program's own time between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from memmgr.policies.trace import HELD, Op, OpKind, Storage, TierLink, Trace

BETWEEN = "(between ops)"
_BETWEEN_SHARE = 0.005  # of the pass: so much of the program's own time makes one op of that name


@dataclass(frozen=True)
class Measured:
    """A measured pass.

    Attributes:
        trace: the pass.
        save_index: of each storage that autograd saved, its place among the cells that the pass saved, by their first save;
            the shim counts the same in every pass (`Cell.save_index`), so it names a cell in every pass that goes the same
            way. Several versions of a block may share an index, where the cell stayed and its bytes changed.
        numbers: per op of the trace its number among the ops that the pass ran, from 0; -1 for those that are no op of the
            program (constants, `(between ops)`).
        unmanaged_peak_bytes: the most that the pass needed, as the allocator measured it.
        tracing_seconds: what measuring itself took.
    """

    trace: Trace
    save_index: dict[int, int]
    numbers: tuple[int, ...]
    unmanaged_peak_bytes: int
    tracing_seconds: float


@dataclass(slots=True)
class OpRow:
    """An op as it was noted; `between` is the time of the program before it."""

    name: str
    seconds: float
    inputs: tuple[int, ...]
    outputs: list[int]
    kind: OpKind
    number: int = -1
    between: float = 0.0
    writes: tuple[tuple[int, int], ...] = ()
    saves: list[int] = field(default_factory=list)
    uses: tuple[int, ...] = ()


@dataclass(slots=True)
class StorageRow:
    """A storage as it was noted. Moments are counts of ops that had started."""

    name: str  # of constants, and "scratch"; the rest is named by its op
    size_bytes: int
    maker: int  # -1: there from the start
    released: int = HELD
    alone: int = -1  # when autograd alone held it, for the first time
    saved: bool = False
    bits: int = 0  # bytes that it leaves behind as bits when it is evicted; 0: none


def leave_bits(ops: list[OpRow], storages: list[StorageRow], seconds: Callable[[int], float]) -> None:
    """Says of a pass what an eviction of two-valued bytes leaves behind (allocator/shim/bits.cpp): rows are changed.

    Such bytes come from an op that wrote in place to what nobody else read (a dropout's mask is drawn, then scaled). In the
    trace the first makes the bits, which stay as long as the mask may be asked for, and the second makes the mask of them,
    in the time that packing and unpacking take. So whoever plans or simulates needs to know nothing of bits. The sum of
    both times stays; until the second has run the trace has less resident than there was, and no more right after.

    Args:
        ops: as noted.
        storages: the same.
        seconds: what packing and unpacking so many bytes take.
    """
    readers: Counter[int] = Counter()
    for op in ops:
        readers.update({*op.inputs, *op.uses})

    def makes(op: OpRow) -> list[int]:
        return [i for i in op.outputs if storages[i].name != "scratch"]

    for op in ops:
        if op.kind != OpKind.COMPUTE or len(op.writes) != 1 or len(makes(op)) != 1:
            continue
        old, new = (storages[i] for i in op.writes[0])
        if not new.bits or not new.saved or old.saved or readers[op.writes[0][0]] != 1 or old.maker < 0:
            continue
        drawn = ops[old.maker]
        if drawn.kind != OpKind.COMPUTE or len(makes(drawn)) != 1:
            continue
        moved = min(max(0.0, seconds(new.size_bytes) - op.seconds), drawn.seconds)
        op.seconds += moved
        drawn.seconds -= moved
        op.writes = ()
        old.size_bytes, old.released = new.bits, new.released


class Rows:
    """Renumbers ops and storages."""

    def __init__(self, ops: list[OpRow], storages: list[StorageRow], turn: int | None, last: float) -> None:
        """`turn`: ops before backward; `last`: seconds between the last op and the end."""
        self._ops, self._storages, self._turn_row, self._last = ops, storages, turn, last
        self.order: dict[int, int] = {}  # a storage's row -> its number in the trace
        self.numbers: list[int] = []
        self._made: list[Op] = []
        self._rows: list[Storage] = []
        self._place: list[int] = []  # an op's row -> its number in the trace
        self._turn: int | None = None
        self._counts: dict[str, int] = {}
        self._start = 0

    def trace(self, device: str, links: tuple[TierLink, ...]) -> Trace:
        """The whole."""
        for i, s in enumerate(self._storages):
            if s.maker < 0:
                self._append(Op("constant", 0.0, (), (self._number(i, self._constant(s.name)),), OpKind.CONSTANT))
        self._start = len(self._made)
        self._all_ops()
        storages = tuple(self._ends(i) for i in sorted(self.order, key=self.order.__getitem__))
        return Trace(tuple(self._made), storages, device, self._turn, links, copy_on_write=False).check()

    def _append(self, op: Op, number: int = -1) -> None:
        self._made.append(op)
        self.numbers.append(number)

    def _constant(self, kind: str) -> str:
        n = self._counts[kind] = self._counts.get(kind, -1) + 1
        return f"c.{kind}" if kind == "elsewhere" and n == 0 else f"c.{kind}.{n}"

    def _number(self, row: int, name: str) -> int:
        self.order[row] = len(self._rows)
        self._rows.append(Storage(name, self._storages[row].size_bytes, len(self._made)))
        return self.order[row]

    def _all_ops(self) -> None:
        total = sum(op.seconds + op.between for op in self._ops) + self._last
        waiting = 0.0
        for k, op in enumerate(self._ops):
            waiting += op.between
            if waiting > total * _BETWEEN_SHARE or (k == self._turn_row and waiting):
                self._append(Op(BETWEEN, waiting, (), (), OpKind.VIEW))
                waiting = 0.0
            at = len(self._made)
            if k == self._turn_row:
                self._turn = at
            self._place.append(at)
            for j, i in enumerate(op.outputs):
                kind = self._storages[i].name
                constant = op.kind == OpKind.CONSTANT
                self._number(i, self._constant(kind) if constant else f"{at}.{kind or j}")
            self._append(
                Op(
                    op.name,
                    op.seconds,
                    self._numbers(op.inputs),
                    self._numbers(op.outputs),
                    op.kind,
                    tuple((self.order[old], self.order[new]) for old, new in op.writes),
                    self._numbers(op.saves),
                    self._numbers(op.uses),
                ),
                op.number,
            )
        if waiting + self._last > 0:
            self._append(Op(BETWEEN, waiting + self._last, (), (), OpKind.VIEW))
        if self._turn_row is not None and self._turn is None:
            self._turn = len(self._made)

    def _numbers(self, rows: tuple[int, ...] | list[int]) -> tuple[int, ...]:
        return tuple(self.order[i] for i in rows)

    def _moment(self, k: int) -> int:
        """After k ops had started; what stands between the k-th and the next in the trace comes after it."""
        if k == HELD:
            return HELD
        return self._place[k - 1] + 1 if k else self._start

    def _ends(self, row: int) -> Storage:
        noted, made = self._storages[row], self._rows[self.order[row]]
        released = self._moment(noted.released)
        if made.name.startswith("c."):
            pinned = 0
        elif noted.saved and noted.alone >= 0:
            pinned = min(released, self._moment(noted.alone))
        else:
            pinned = released
        return Storage(made.name, made.size_bytes, made.maker, released, pinned)
