"""Measures one pass: every op that runs between two ends of backward, as a `memmgr.policies.trace.Trace`.

The shim notes each op and what lives (`allocator/shim/trace.cpp`); what that means is worked out here when the pass is over, so
that Python does not slow down what is being measured. Nothing is kept but numbers, so measuring changes neither a bit nor what
fits.

What a measured trace means, beyond what `policies/trace/trace.py` says of all traces:

- A storage's size is what it takes of the budget (its block, after alignment).
- The pass begins after the last op that writes to a parameter before anything is saved: that is an optimizer's step.
- Constants are what was there when the pass began. `c.elsewhere` is the rest of what was resident then and is no tensor of
  the pass: optimizer state, gradients that are not touched, memory that no op made. What comes and goes unseen while the
  pass runs (memory that C++ allocates for itself, and our own: generator states, roots that only recipes hold) is a constant
  of the same name that comes and goes.
- `k.scratch` is what op k needed beyond its outputs at the worst moment inside it. It is released right after the op.
- What nobody has a recipe for is `OpKind.ONCE`: ops that run without gradient (backward's own), and what the recorder refuses.
- Batch norm reads and writes its running statistics unseen: a recomputation does without them (design rule 2).
- `(between ops)` is an op without inputs and outputs that takes the time of the program itself and of recording it, some of
  these per pass: a CPU does nothing else meanwhile.
- `uses` of an op are the saved storages that backward asked for before it, and those that the node has which runs it: they
  cannot leave before it ends.
- `pinned_until` counts what holds a storage besides autograd until that lets go for the first time. What autograd never
  saved is pinned until its release: it is not ours to let go of.
- In-place writes reuse their block (`copy_on_write` is False).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from memmgr.policies.trace import OpKind, TierLink

from ._ops import OPAQUE, VIEW, Op, describe
from ._trace_rows import BETWEEN, Measured, OpRow, Rows, StorageRow, leave_bits

if TYPE_CHECKING:
    from ._manager import Manager

MOST_OPS = 200_000  # of a pass: what is longer is no pass, and is not kept
_UNSEEN_SHARE = 1 / 1024  # of what is resident: less is not worth a storage


class Tracer:
    """Records the passes that are asked for, one at a time."""

    def __init__(self, native: Any, manager: Manager) -> None:
        self._native = native
        self._manager = manager
        self._infos: dict[Any, Any] = {}
        self._under_way = False
        self._thread = 0
        self._turned: int | None = None  # events before backward
        self._clear()

    # -- a pass --

    def _clear(self) -> None:
        self._ops: list[OpRow] = []
        self._storages: list[StorageRow] = []
        self._now: dict[int, int] = {}  # block -> the storage that it is now
        self._index: dict[int, int] = {}
        self._turn: int | None = None
        self._unseen = 0  # bytes that are there and belong to no block
        self._base = 0  # of these: there from the start, and not known as a constant yet
        self._came: list[int] = []  # of these: storages that stand for what came later
        self._last: OpRow | None = None
        self._last_at = -1  # its row
        self._began = False
        self._number = 0
        self._peak = 0
        self._asked: dict[int, int] = {}  # of a storage that a node of backward has: the op for which it asked last

    def begin(self) -> None:
        """The next op of this thread is the first of the pass."""
        self._turned = None
        self._thread = threading.get_ident()
        self._native.trace_begin(self._noting, self._wrote, MOST_OPS)
        self._under_way = True

    @property
    def active(self) -> bool:
        """Is a pass under way of which a trace can be made?"""
        return bool(self._under_way and self._native.trace_count() >= 0)

    @property
    def here(self) -> bool:
        """Is a pass of this thread under way?"""
        return self.active and self._thread == threading.get_ident()

    def turn(self) -> None:
        """Backward begins with the next op."""
        self._turned = self._native.trace_count()

    def abort(self) -> None:
        """Forgets the pass that is under way."""
        if self._under_way:
            self._native.trace_end()
            self._under_way = False

    def end(self, links: Sequence[TierLink]) -> Measured | None:
        """The pass is over. `links` are the tiers below. None: an op of it failed, or it was too long to be a pass."""
        if not self.active:
            return None
        taken = self._native.trace_take()
        self.abort()
        if taken is None:
            return None
        begun = time.perf_counter()
        events, spent = taken
        self._clear()
        for number, event in enumerate(events):
            self._event(number, event)
        if self._base > 0:
            self._storages.append(StorageRow("elsewhere", self._base, -1))
        leave_bits(self._ops, self._storages, self._native.bits_seconds)
        rows = Rows(self._ops, self._storages, self._turn, events[-1][4])
        trace = rows.trace(str(self._manager.device), tuple(links))
        index = {rows.order[s]: i for s, i in self._index.items()}
        spent += time.perf_counter() - begun
        measured = Measured(trace, index, tuple(rows.numbers), self._peak, spent)
        self._clear()
        return measured

    # -- while it runs --

    def _info(self, func: Any) -> Op:
        info = self._infos.get(func)
        if info is None:
            info = self._infos[func] = describe(func)
        return info

    def _noting(self, func: Any) -> int:
        """What the shim has to do with such an op: nothing, note it, ask `_wrote` about it too."""
        info = self._info(func)
        if info.name.startswith("profiler::"):
            return 0
        return 2 if info.batch_norm is not None or info.writes or info.cls == OPAQUE else 1

    def _wrote(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, any_saved: int) -> Any:
        """Right after an op that writes: (blocks that it wrote to, bytes that it would leave behind as bits)."""
        info = self._info(func)
        written = self._manager.recorder._written(info, args, kwargs or {})
        blocks = self._native.trace_blocks(written)
        if info.batch_norm is not None:
            return blocks, 0
        if not any_saved and info.writes and any(t.requires_grad and t.is_leaf for t in written):
            self.begin()  # an optimizer's step: the pass begins after it
            return (), 0
        # More than one block is not asked for: see leave_bits().
        return blocks, self._native.as_bits(written[0]) if len(written) == 1 and len(set(blocks)) == 1 else 0

    # -- an event --

    def _event(self, number: int, event: Any) -> None:
        """What happened up to an op, and what the op did; or what happened after the last op."""
        func, lists, need, live, between, extra, peak, wall, seconds = event
        released, alone, ended, saves, uses, inputs, fresh, outputs, new, again = lists
        if number == self._turned:
            self._turn = len(self._ops)  # a constant that is first seen now belongs to backward
        self._known(fresh, need, live)
        read = dict.fromkeys([self._now[b] for b in inputs])
        pending = self._saved(saves, read)
        self._ended(released, alone, ended, need, live)
        if func is None:
            return
        used = tuple(dict.fromkeys(self._now[b] for b in uses))
        info = self._info(func)
        if seconds < 0:
            seconds = wall
        elif info.cls == VIEW or wall < 2 * seconds + 1e-4:  # else an op of a new kind was tried a second time
            between += max(0.0, wall - seconds)
        self._note(info, tuple(read), outputs, new, set(again), extra, seconds, between, need, peak, used, pending)

    def _known(self, fresh: Any, need: int, live: int) -> None:
        """Blocks that no op of the pass made, seen for the first time."""
        grown = need - live + sum(size for _, size, _ in fresh) - self._unseen
        for block, size, leaf in fresh:
            came = self._began and not leaf and grown >= size > 0
            self._constant(block, size, leaf, came)
            grown -= size if came else 0

    def _saved(self, saves: Any, read: Collection[int]) -> list[int]:
        """Autograd saved these since the last op began. Inputs are saved before their op: those among `read` come back."""
        pending: list[int] = []
        for block, index in saves:
            storage = self._now[block]
            self._storages[storage].saved = True
            self._index.setdefault(storage, index)
            # What no op that was seen made counts as there from its first sight on, which is after the last op.
            later = self._last is None or self._storages[storage].maker > self._last_at
            kept = pending if storage in read or later or self._last is None else self._last.saves
            if storage not in kept:
                kept.append(storage)
        return pending

    def _ended(self, released: Any, alone: Any, ended: Any, need: int, live: int) -> None:
        """What else happened before op `len(self._ops)`."""
        at = len(self._ops)
        for block in alone:
            storage = self._storages[self._now[block]]
            if storage.alone < 0:
                storage.alone = at
        for block in ended:
            self._held_by_node(self._now[block], at)
        for block in released:
            self._storages[self._now.pop(block)].released = at
        unseen = need - live
        if not self._began:
            self._began = True
            self._unseen = self._base = max(0, unseen)
        elif abs(unseen - self._unseen) > need * _UNSEEN_SHARE:
            self._unexplained(unseen - self._unseen)

    def _held_by_node(self, storage: int, at: int) -> None:
        """A node of backward has what it asked for until it has ended, so its ops use it, whether they read it or not."""
        since = self._asked.pop(storage, -1)
        if since < 0:
            return
        for op in self._ops[since:at]:
            if op.kind != OpKind.CONSTANT and storage not in op.uses:
                op.uses = (*op.uses, storage)

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
        self._storages.append(StorageRow(name, size, len(self._ops) if came else -1))
        if came:
            self._ops.append(OpRow("constant", 0.0, (), [self._now[block]], OpKind.CONSTANT))

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
            self._storages.append(StorageRow("elsewhere", growth, at))
            self._ops.append(OpRow("constant", 0.0, (), [self._came[-1]], OpKind.CONSTANT))
        elif growth < 0:
            gone = min(self._base, -growth)
            self._base -= gone
            if gone:
                self._storages.append(StorageRow("elsewhere", gone, -1, released=at))

    def _note(
        self, info: Op, read: tuple[int, ...], outputs: Any, new: Any, again: set[int], extra: Any, seconds: float,
        between: float, need: int, peak: int, used: tuple[int, ...], pending: list[int],
    ) -> None:  # fmt: skip
        """The op has run."""
        at = len(self._ops)
        made: list[int] = []
        can_run = True
        for block, size, _ in new:
            self._now[block] = len(self._storages)
            made.append(self._now[block])
            self._storages.append(StorageRow("", size, at))
            # What fills a blank one can be made again, and needs one; nothing needs no recipe.
            can_run &= info.blank or size == 0 or block in again
        self._peak = max(self._peak, peak, need)
        scratch = peak - need - sum(size for _, size, _ in new)
        writes: list[tuple[int, int]] = []
        blocks, bits = extra or ((), 0)
        if info.batch_norm is not None:
            statistics = {self._now[b] for b in blocks}
            read = tuple(s for s in read if s not in statistics)
        else:
            for block in dict.fromkeys(blocks):
                old = self._now[block]
                storage = self._storages[old]
                maker = storage.maker
                can_run &= block in again and maker >= 0 and self._ops[maker].kind == OpKind.COMPUTE
                storage.released = at + 1
                self._now[block] = len(self._storages)
                made.append(self._now[block])
                writes.append((old, self._now[block]))
                self._storages.append(StorageRow("", storage.size_bytes, at, bits=bits))
        kind = OpKind.VIEW if not made else OpKind.COMPUTE if can_run else OpKind.ONCE
        if scratch > need * _UNSEEN_SHARE:
            kind = OpKind.ONCE if kind == OpKind.VIEW else kind
            made.append(len(self._storages))
            self._storages.append(StorageRow("scratch", scratch, at, released=at + 1))
        self._asked.update(dict.fromkeys(used, at))
        op = OpRow(info.name, seconds, read, made, kind, self._number, between, tuple(writes), pending, used)
        self._number += 1
        self._ops.append(op)
        self._last, self._last_at = op, at


__all__ = ["BETWEEN", "Measured", "Tracer"]
