"""Measures one pass: every op that runs between two ends of backward, as a `memmgr.policies.trace.Trace`.

The shim hands each op to `Tracer._op` before it is recorded and says what lives (`allocator/shim/trace.cpp`). Nothing is
kept here but numbers, so measuring changes neither a bit nor what fits.

What a measured trace means, beyond what `policies/trace.py` says of all traces:

- A storage's size is what it takes of the budget (its block, after alignment).
- Constants are what was there when the pass began. `c.elsewhere` is the rest of what was resident then and is no tensor of
  the pass: optimizer state, gradients that are not touched, memory that no op made. What comes and goes unseen while the
  pass runs (memory that C++ allocates for itself, and our own: generator states, roots that only recipes hold) is a constant
  of the same name that comes and goes.
- `k.scratch` is what op k needed beyond its outputs at the worst moment inside it. It is released right after the op.
- An op in a pass that autograd does not record (backward's own, no_grad) is `OpKind.ONCE`: nobody has a recipe for it.
- Batch norm reads and writes its running statistics unseen: a recomputation does without them (design rule 2).
- `(between ops)` is an op without inputs and outputs that takes the time of the program itself and of recording it, some of
  these per pass: a CPU does nothing else meanwhile.
- `pinned_until` counts what holds a storage besides autograd until that lets go for the first time. What autograd never
  saved is pinned until its release: it is not ours to let go of.
- In-place writes reuse their block (`copy_on_write` is False).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memmgr.policies.trace import HELD, Op, OpKind, Storage, TierLink, Trace

from ._ops import OPAQUE, VIEW, describe

if TYPE_CHECKING:
    from ._manager import Manager

BETWEEN = "(between ops)"
_BETWEEN_SHARE = 0.005  # of the pass: so much of the program's own time makes one op of that name
_UNSEEN_SHARE = 1 / 1024  # of what is resident: less is not worth a storage


@dataclass(frozen=True)
class Measured:
    """A measured pass.

    Attributes:
        trace: the pass.
        save_index: of each storage that autograd saved, its place among the cells that the pass saved, by their first save;
            the shim counts the same (`Cell.save_index`), so it names a cell in every pass that starts the same way. A storage
            of the trace is left out where the saved cell was none of it any more.
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
class _Op:
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
class _Storage:
    name: str
    size_bytes: int
    maker: int  # among `Tracer._ops`; -1: there from the start
    released: int = HELD
    alone: int = -1  # the ops that had started when only autograd held it
    saved: bool = False


class Tracer:
    """Records the passes that are asked for, one at a time."""

    def __init__(self, native: Any, manager: Manager) -> None:
        self._native = native
        self._manager = manager
        self._infos: dict[Any, Any] = {}
        self.active = False
        self._thread = 0
        self._clear()

    # -- a pass --

    def begin(self) -> None:
        """The next op of this thread is the first of the pass."""
        self._clear()
        self._thread = threading.get_ident()
        self._native.trace_begin(self._op)
        self.active = True

    @property
    def here(self) -> bool:
        """Is a pass of this thread under way?"""
        return self.active and self._thread == threading.get_ident()

    def turn(self) -> None:
        """Backward begins with the next op."""
        self._turn = len(self._ops)

    def abort(self) -> None:
        """Forgets the pass that is under way."""
        if self.active:
            self._native.trace_end()
            self.active = False
            self._clear()

    def end(self, links: Sequence[TierLink]) -> Measured:
        """The pass is over. `links` are the tiers below."""
        left = time.perf_counter()
        released, alone, saves, uses, _, fresh, need, live = self._native.trace_before((), None)
        self._between += max(0.0, left - self._left - (self._elsewhere_seconds() - self._waited))
        self._settle(released, alone, fresh, need, live)
        for block, index in saves:
            self._save(block, index, -1)
        self._native.trace_end()
        self.active = False
        measured = self._build(tuple(links))
        self._clear()
        return measured

    def _clear(self) -> None:
        self._ops: list[_Op] = []
        self._storages: list[_Storage] = []
        self._now: dict[int, int] = {}  # block -> the storage that it is now
        self._index: dict[int, int] = {}
        self._turn: int | None = None
        self._unseen = 0  # bytes that are there and belong to no block
        self._base = 0  # of these: there from the start, and not known as a constant yet
        self._came: list[int] = []  # of these: storages that stand for what came later
        self._began = False
        self._between = 0.0
        self._left = time.perf_counter()
        self._waited = self._elsewhere_seconds()
        self._number = 0
        self._peak = 0
        self._spent = 0.0
        self._any_saved = False

    def _elsewhere_seconds(self) -> float:
        return self._manager.stall_seconds() + self._manager.replayer.seconds

    # -- an op --

    def _op(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        native = self._native
        info = self._infos.get(func)
        if info is None:
            info = self._infos[func] = describe(func)
        if info.name.startswith("profiler::"):
            return native.run_op(func, types, args, kwargs)
        begun = time.perf_counter()
        waited = self._elsewhere_seconds()
        released, alone, saves, uses, inputs, fresh, need, live = native.trace_before(args, kwargs)
        between = self._between + max(0.0, begun - self._left - (waited - self._waited))
        self._settle(released, alone, fresh, need, live)
        read = dict.fromkeys([self._now[b] for b in inputs])
        for block, index in saves:
            self._save(block, index, len(self._ops) if self._now[block] in read else -1)
        pending = [self._now[b] for b, _ in saves if self._now[b] in read]
        used = tuple(dict.fromkeys(self._now[b] for b in uses))
        entered = time.perf_counter()
        try:
            out = native.run_op(func, types, args, kwargs)
        except BaseException:
            self._between, self._left, self._waited = between, time.perf_counter(), self._elsewhere_seconds()
            raise
        ended = time.perf_counter()
        waited_now = self._elsewhere_seconds()
        outputs, new, again, peak, seconds = native.trace_after(out)
        wall = max(0.0, ended - entered - (waited_now - waited))
        if seconds < 0:
            seconds = wall
        elif info.cls == VIEW or wall < 2 * seconds + 1e-4:  # else an op of a new kind was tried a second time
            between += max(0.0, wall - seconds)
        self._note(
            info, args, kwargs, tuple(read), outputs, new, set(again), seconds, between, need, peak, used, pending
        )
        self._left = time.perf_counter()
        self._waited = waited_now
        self._spent += self._left - ended + entered - begun
        return out

    def _settle(self, released: Any, alone: Any, fresh: Any, need: int, live: int) -> None:
        """What happened before op `len(self._ops)`."""
        at = len(self._ops)
        for block in alone:
            storage = self._storages[self._now[block]]
            if storage.alone < 0:
                storage.alone = at
        for block in released:
            self._storages[self._now.pop(block)].released = at
        grown = need - live + sum(size for _, size, _ in fresh) - self._unseen
        for block, size, leaf in fresh:
            came = self._began and not leaf and grown >= size > 0
            self._constant(block, size, leaf, came)
            grown -= size if came else 0
        unseen = need - live
        if not self._began:
            self._began = True
            self._unseen = self._base = max(0, unseen)
        elif abs(unseen - self._unseen) > need * _UNSEEN_SHARE:
            self._unexplained(unseen - self._unseen)

    def _constant(self, block: int, size: int, leaf: bool, came: bool) -> None:
        """A block that no op of the pass made."""
        if self._began and not came:
            if self._base >= size:  # it was there, and counted among the unseen
                self._base -= size
                self._unseen -= size
            else:
                came = True
        self._now[block] = len(self._storages)
        name = "parameter" if leaf else "tensor"
        self._storages.append(_Storage(name, size, len(self._ops) if came else -1))
        if came:
            self._ops.append(_Op("constant", 0.0, (), [self._now[block]], OpKind.CONSTANT))

    def _unexplained(self, growth: int) -> None:
        """Bytes that belong to no block have come, or gone."""
        at = len(self._ops)
        self._unseen += growth
        while growth < 0 and self._came:
            last = self._storages[self._came.pop()]
            last.released = at
            growth += last.size_bytes
        if growth > 0:
            self._came.append(len(self._storages))
            self._storages.append(_Storage("elsewhere", growth, at))
            self._ops.append(_Op("constant", 0.0, (), [self._came[-1]], OpKind.CONSTANT))
        elif growth < 0:
            gone = min(self._base, -growth)
            self._base -= gone
            if gone:
                self._storages.append(_Storage("elsewhere", gone, -1, released=at))

    def _save(self, block: int, index: int, op: int) -> None:
        storage = self._now.get(block)
        if storage is None:
            return
        self._any_saved = True
        self._storages[storage].saved = True
        self._index.setdefault(storage, index)
        if op < 0 and self._ops and storage not in self._ops[-1].saves:
            self._ops[-1].saves.append(storage)

    def _note(
        self, info: Any, args: Any, kwargs: Any, read: tuple[int, ...], outputs: Any, new: Any, again: set[int],
        seconds: float, between: float, need: int, peak: int, used: tuple[int, ...], pending: list[int],
    ) -> None:  # fmt: skip
        """The op has run."""
        at = len(self._ops)
        made: list[int] = []
        can_run = True
        for block, size, _ in new:
            self._now[block] = len(self._storages)
            made.append(self._now[block])
            self._storages.append(_Storage("", size, at))
            can_run &= info.blank or block in again  # what fills a blank one can be made again, and needs one
        self._peak = max(self._peak, peak, need)
        scratch = peak - need - sum(size for _, size, _ in new)
        writes: list[tuple[int, int]] = []
        if info.batch_norm is not None:
            statistics = set(self._native.trace_blocks(self._written(info, args, kwargs)))
            read = tuple(s for s in read if s not in {self._now[b] for b in statistics})
        elif info.writes or info.cls == OPAQUE:
            written = self._written(info, args, kwargs)
            if not self._any_saved and info.writes and any(t.requires_grad and t.is_leaf for t in written):
                self.begin()  # an optimizer's step: the pass begins after it
                return
            for block in dict.fromkeys(self._native.trace_blocks(written)):
                old = self._now[block]
                storage = self._storages[old]
                maker = storage.maker
                can_run &= block in again and maker >= 0 and self._ops[maker].kind == OpKind.COMPUTE
                storage.released = at + 1
                self._now[block] = len(self._storages)
                made.append(self._now[block])
                writes.append((old, self._now[block]))
                self._storages.append(_Storage("", storage.size_bytes, at))
        kind = OpKind.VIEW if not made else OpKind.COMPUTE if can_run else OpKind.ONCE
        if scratch > need * _UNSEEN_SHARE:
            kind = OpKind.ONCE if kind == OpKind.VIEW else kind
            made.append(len(self._storages))
            self._storages.append(_Storage("scratch", scratch, at, released=at + 1))
        op = _Op(info.name, seconds, read, made, kind, self._number, between, tuple(writes), [], used)
        op.saves = list(dict.fromkeys(pending))
        self._number += 1
        self._between = 0.0
        self._ops.append(op)

    def _written(self, info: Any, args: Any, kwargs: Any) -> list[Any]:
        return self._manager.recorder._written(info, args, kwargs or {})

    # -- the whole --

    def _build(self, links: tuple[TierLink, ...]) -> Measured:
        ops, storages = self._ops, self._storages
        if self._base > 0:
            storages.append(_Storage("elsewhere", self._base, -1))
        start = [i for i, s in enumerate(storages) if s.maker < 0]
        made: list[Op] = []
        numbers: list[int] = []
        order: dict[int, int] = {}  # storage here -> in the trace
        rows: list[Storage] = []
        place: list[int] = []  # op here -> in the trace
        counts: dict[str, int] = {}

        def constant_name(kind: str) -> str:
            n = counts[kind] = counts.get(kind, -1) + 1
            return f"c.{kind}" if kind == "elsewhere" and n == 0 else f"c.{kind}.{n}"

        for i in start:
            order[i] = len(rows)
            rows.append(Storage(constant_name(storages[i].name), storages[i].size_bytes, len(made)))
            made.append(Op("constant", 0.0, (), (order[i],), OpKind.CONSTANT))
            numbers.append(-1)
        total = sum(op.seconds + op.between for op in ops) + self._between
        waiting = 0.0
        turn: int | None = None

        def flush() -> None:
            nonlocal waiting
            made.append(Op(BETWEEN, waiting, (), (), OpKind.VIEW))
            numbers.append(-1)
            waiting = 0.0

        for k, op in enumerate(ops):
            waiting += op.between
            if waiting > total * _BETWEEN_SHARE or (k == self._turn and waiting):
                flush()
            if k == self._turn:
                turn = len(made)
            at = len(made)
            place.append(at)
            for j, i in enumerate(op.outputs):
                s = storages[i]
                order[i] = len(rows)
                name = (
                    constant_name(s.name)
                    if op.kind == OpKind.CONSTANT
                    else f"{at}.scratch"
                    if s.name == "scratch"
                    else f"{at}.{j}"
                )
                rows.append(Storage(name, s.size_bytes, at))
            made.append(
                Op(
                    op.name,
                    op.seconds,
                    tuple(order[i] for i in op.inputs),
                    tuple(order[i] for i in op.outputs),
                    op.kind,
                    tuple((order[a], order[b]) for a, b in op.writes),
                    tuple(order[i] for i in op.saves),
                    tuple(order[i] for i in op.uses),
                )
            )
            numbers.append(op.number)
        if waiting + self._between > 0:
            waiting += self._between
            flush()
        place.append(len(made))

        def moment(k: int) -> int:
            # After op k - 1 had started: what stands between the two in the trace comes after it.
            return HELD if k == HELD else place[k - 1] + 1 if k > 0 else len(start)

        for i, s in enumerate(storages):
            j = order[i]
            released = moment(s.released)
            if rows[j].name.startswith("c."):
                pinned = 0
            else:
                pinned = released if not s.saved or s.alone < 0 else min(released, moment(s.alone))
            rows[j] = Storage(rows[j].name, s.size_bytes, rows[j].maker, released, pinned)
        trace = Trace(
            tuple(made), tuple(rows), str(self._manager.device), turn, links, copy_on_write=False
        ).check()  # fmt: skip
        index = {order[s]: i for s, i in self._index.items()}
        return Measured(trace, index, tuple(numbers), self._peak, self._spent)


__all__ = ["BETWEEN", "Measured", "Tracer"]
