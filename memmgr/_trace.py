"""Measures one pass: every op that runs between two ends of backward, as a `memmgr.policies.trace.Trace`.

The shim hands each op to `Tracer._op` before it is recorded and says what lives (`allocator/shim/trace.cpp`). Nothing is
kept here but numbers, so measuring changes neither a bit nor what fits.

What a measured trace means, beyond what `policies/trace.py` says of all traces:

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

from ._ops import OPAQUE, VIEW, describe
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
        self.active = False
        self._thread = 0
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
        self._between = 0.0
        self._left = time.perf_counter()
        self._waited = self._elsewhere_seconds()
        self._number = 0
        self._peak = 0
        self._spent = 0.0
        self._any_saved = False
        self._asked: dict[int, int] = {}  # of a storage that a node of backward has: the op for which it asked last
        self._noting = False  # between two ops: true only if Ctrl-C came while something was being noted

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
        self._turn = len(self._ops)  # a constant that is first seen there belongs to it

    def abort(self) -> None:
        """Forgets the pass that is under way."""
        if self.active:
            self._native.trace_end()
            self.active = False
            self._clear()

    def end(self, links: Sequence[TierLink]) -> Measured | None:
        """The pass is over. `links` are the tiers below. None: an interrupt left it incomplete."""
        if self._noting or not self.active:
            self.abort()
            return None
        left = time.perf_counter()
        released, alone, ended, saves, _, _, fresh, need, live = self._native.trace_before((), None)
        self._between += max(0.0, left - self._left - (self._elsewhere_seconds() - self._waited))
        self._known(fresh, need, live)
        self._saved(saves, ())
        self._ended(released, alone, ended, need, live)
        self._native.trace_end()
        self.active = False
        if self._base > 0:
            self._storages.append(StorageRow("elsewhere", self._base, -1))
        leave_bits(self._ops, self._storages, self._native.bits_seconds)
        rows = Rows(self._ops, self._storages, self._turn, self._between)
        trace = rows.trace(str(self._manager.device), tuple(links))
        index = {rows.order[s]: i for s, i in self._index.items()}
        measured = Measured(trace, index, tuple(rows.numbers), self._peak, self._spent)
        self._clear()
        return measured

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
        # Forward passes that no backward ends (an evaluation with grad mode on), or noted in part.
        if len(self._ops) >= MOST_OPS or self._noting:
            self.abort()
            return native.run_op(func, types, args, kwargs)
        self._noting = True
        begun = time.perf_counter()
        waited = self._elsewhere_seconds()
        released, alone, ended, saves, uses, inputs, fresh, need, live = native.trace_before(args, kwargs)
        between = self._between + max(0.0, begun - self._left - (waited - self._waited))
        self._known(fresh, need, live)
        read = dict.fromkeys([self._now[b] for b in inputs])
        pending = self._saved(saves, read)
        self._ended(released, alone, ended, need, live)
        used = tuple(dict.fromkeys(self._now[b] for b in uses))
        entered = time.perf_counter()
        self._noting = False
        try:
            out = native.run_op(func, types, args, kwargs)
        except BaseException:
            self.abort()  # what it saved and made before it failed belongs to no op
            raise
        self._noting = True
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
        self._noting = False
        return out

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
            self._any_saved = True
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
            self._storages.append(StorageRow("", size, at))
            # What fills a blank one can be made again, and needs one; nothing needs no recipe.
            can_run &= info.blank or size == 0 or block in again
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
                self._storages.append(StorageRow("", storage.size_bytes, at))
            if len(writes) == 1 and len(written) == 1:
                self._storages[writes[0][1]].bits = self._native.as_bits(written[0])
        kind = OpKind.VIEW if not made else OpKind.COMPUTE if can_run else OpKind.ONCE
        if scratch > need * _UNSEEN_SHARE:
            kind = OpKind.ONCE if kind == OpKind.VIEW else kind
            made.append(len(self._storages))
            self._storages.append(StorageRow("scratch", scratch, at, released=at + 1))
        self._asked.update(dict.fromkeys(used, at))
        op = OpRow(info.name, seconds, read, made, kind, self._number, between, tuple(writes), pending, used)
        self._number += 1
        self._between = 0.0
        self._ops.append(op)
        self._last, self._last_at = op, at

    def _written(self, info: Any, args: Any, kwargs: Any) -> list[Any]:
        return self._manager.recorder._written(info, args, kwargs or {})


__all__ = ["BETWEEN", "Measured", "Tracer"]
