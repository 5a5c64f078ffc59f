"""The table of cells of the accounting path: which cell a storage is now, what writes make of it, and what they cut."""

from __future__ import annotations

import ctypes
import threading
import zlib
from typing import Any

import torch

from . import _py_types as types
from ._py_ledger import Ledger
from ._py_tier import Tier, address
from ._py_types import EVICTED, KEEP, OFFLOADED, PRESENT, Cell, Recipe, Ref, Version, graveyard


class Table(Ledger):
    """Finds, makes, overwrites and cuts cells."""

    def __init__(self) -> None:
        super().__init__()
        self._handled: dict[Cell, None] = {}  # cells with handles, oldest save first
        self._armed: list[Cell] = []
        self._armed_next = 0
        self._armed_bytes = 0
        self._handled_bytes = 0  # present bytes of cells with handles
        self._gone_bytes = 0
        self._incoming_bytes = 0
        self._offloaded_cells = 0
        self._unsettled: list[Cell] = []
        self._next_seq = 0
        self._clock = 0.0
        self._stamp = 0
        self._kept_new_bytes = 0
        self._tier: Tier | None = None
        self._tier_doomed = False
        self._burier = threading.local()
        types.bury = self._bury

    # -- endings --

    def _bury(self) -> None:
        """Buries what ended. Called from anywhere: where this thread or another is at work, that one does it."""
        if self._lock._is_owned() or not self._lock.acquire(blocking=False):
            return
        try:
            self._bury_locked()
        finally:
            self._lock.release()

    def _bury_locked(self) -> None:
        while graveyard:
            try:
                what, payload = graveyard.popleft()
            except IndexError:
                return
            if what == "handle":
                self._remove_handle(payload)
            elif what == "recipe":
                for cell in payload[1]:
                    self._unlink(payload[0], cell)
            elif self._tier is not None:
                self._tier.free(payload[0])
            del payload

    def _settle(self) -> None:
        """At a quiet moment: what ended is buried, and what the last in-place op wrote has its new version by now."""
        if not (graveyard or self._unsettled):
            return
        with self._lock:
            self._bury_locked()
            cells, self._unsettled = self._unsettled, []
            for cell in cells:
                for version in cell.versions:
                    version.at = version.twin._version
                cell.unsettled = False

    # -- the life of a cell --

    def _disarm(self, cell: Cell) -> None:
        if cell.armed != KEEP:
            cell.armed = KEEP
            self._armed_bytes = max(0, self._armed_bytes - cell.nbytes)

    def _wait_not_busy(self, cell: Cell) -> None:
        while cell.busy:  # a copy that another thread makes without the lock
            self._lock.release()
            try:
                threading.Event().wait(0.0005)
            finally:
                self._lock.acquire()

    def _drop_slot(self, cell: Cell) -> None:
        slot, incoming = cell.slot, cell.incoming
        cell.slot, cell.incoming = -1, None
        if incoming is not None:
            self._incoming_bytes -= cell.nbytes
        if slot >= 0 and self._tier is not None:
            self._tier.free(slot)  # waits for what is under way, so `incoming` may go after it

    def _release_strong(self, cell: Cell) -> None:
        self._wait_not_busy(cell)
        cell.strong = None
        self._disarm(cell)

    def _hold(self, cell: Cell) -> None:
        if cell.strong is None and cell.known is not None and cell.gone == PRESENT:
            cell.strong = cell.known()

    def _gone_over(self, cell: Cell) -> None:
        """A gone cell is wanted no more, or has its bytes again."""
        if cell.gone == PRESENT:
            return
        if cell.gone == OFFLOADED:
            self._offloaded_cells -= 1
        self._gone_bytes = max(0, self._gone_bytes - cell.nbytes)
        self._virtual -= cell.nbytes
        cell.gone = PRESENT

    def _add_handle(self, cell: Cell) -> None:
        cell.handles += 1
        if cell.handles > 1:
            return
        if cell.seq < 0:
            cell.seq, self._next_seq = self._next_seq, self._next_seq + 1
        self._hold(cell)
        self._handled[cell] = None
        cell.listed = True
        if cell.gone == PRESENT:
            self._handled_bytes += cell.nbytes
        else:
            self._gone_bytes += cell.nbytes

    def _unlist(self, cell: Cell) -> None:
        if cell.listed:
            self._handled.pop(cell, None)
            cell.listed = False
            if cell.gone == PRESENT:
                self._handled_bytes = max(0, self._handled_bytes - cell.nbytes)

    def _remove_handle(self, cell: Cell) -> None:
        cell.handles -= 1
        if cell.handles > 0:
            return
        self._wait_not_busy(cell)
        self._unlist(cell)
        self._disarm(cell)
        root_in_use = cell.recipe is None and cell.names > 0
        if cell.gone != PRESENT:
            # Gone and unwanted. A root that recipes still need keeps its copy below; the rest is forgotten.
            if root_in_use and cell.slot >= 0:
                return
            self._gone_over(cell)
            cell.known = None
            self._drop_slot(cell)
            self._close_doomed_tier()
            return
        self._drop_slot(cell)
        if not root_in_use:
            self._release_strong(cell)

    def _link(self, recipe: Recipe, cell: Cell) -> None:
        cell.named_by[recipe.serial] = types.weakref.ref(recipe)
        cell.names += 1
        if cell.names == 1 and cell.recipe is None and cell.strong is None:
            self._hold(cell)
            self._kept_new_bytes += cell.nbytes

    def _unlink(self, serial: int, cell: Cell) -> None:
        cell.named_by.pop(serial, None)
        cell.names -= 1
        if cell.names == 0 and cell.handles == 0:
            if cell.gone != PRESENT:
                self._gone_over(cell)
                cell.known = None
            self._drop_slot(cell)
            self._release_strong(cell)

    def _drop_recipe(self, cell: Cell) -> None:
        recipe, cell.recipe = cell.recipe, None
        if recipe is not None:
            recipe.made = [ref if ref is not None and ref() is not cell else None for ref in recipe.made]

    def _cut(self, first: Cell, itself: bool, dry_run: bool) -> list[Cell]:
        """`first` can no longer be made again, and what depends on it and has no bytes cannot either.

        Returns:
            The wanted cells that are lost by it; with `dry_run` nothing is changed.
        """
        stranded: list[Cell] = []
        self._stamp += 1
        stamp, work, head = self._stamp, [first], True
        while work:
            cell = work.pop()
            only_children, head = head and not itself, False
            if not only_children and cell is not first:
                if not dry_run:
                    self._drop_recipe(cell)
                if cell.present or cell.slot >= 0:
                    if not dry_run and cell.names > 0:
                        self._hold(cell)
                        self._kept_new_bytes += cell.nbytes
                    continue
                if cell.handles > 0:
                    stranded.append(cell)
                if not dry_run:
                    cell.lost = True
            for recipe in [ref() for ref in list(cell.named_by.values())]:
                if recipe is None or not recipe.ok or recipe.stamp == stamp:
                    continue
                recipe.stamp = stamp
                if not dry_run:
                    recipe.ok = False
                for made in recipe.outputs:
                    if made is not None and made.stamp != stamp:
                        made.stamp = stamp
                        work.append(made)
        return stranded

    # -- finding and making --

    def _enter(self, storage: Any, cell: Cell) -> None:
        known = self._known(storage) or self._register(storage, True)
        known.cell = cell
        cell.known = known

    def _make_cell(self, tensor: torch.Tensor) -> Cell:
        storage = tensor.untyped_storage()
        known = self._known(storage)
        if known is None:
            known = self._register(storage, False)  # not made by an op that was seen
        elif known.nbytes != storage.nbytes():
            self._resized(known, storage.nbytes())
        # Memory that another library owns may be written by it at any time.
        cell = Cell(known, not storage.resizable(), self._clock)
        if not tensor.is_inference():
            cell.versions.append(Version(tensor))
        known.cell = cell
        return cell

    def _find(self, tensor: torch.Tensor) -> Cell | None:
        storage = tensor.untyped_storage()
        known = self._known(storage)
        cell = known.cell if known is not None else None
        if cell is None or tensor.is_inference():
            return cell
        if not cell.fresh or storage.nbytes() != cell.nbytes:  # resized: a write (rule 3)
            return None
        if not cell.shares_counter(tensor):
            cell.versions.append(Version(tensor))
        return cell

    def _written_unseen(self, tensor: torch.Tensor) -> None:
        """A write that nobody announced was noticed: the cell of this storage is no longer what it was."""
        known = self._known(tensor.untyped_storage())
        cell = known.cell if known is not None else None
        if known is None or cell is None:
            return
        if cell.names > 0 and cell.recipe is None:
            cell.lost = True
            self._cut(cell, True, False)
        if cell.handles > 0:
            cell.stale = True
        else:
            self._release_strong(cell)
        cell.known = known.cell = None

    def _lookup(self, tensor: torch.Tensor) -> Cell:
        with self._lock:
            cell = self._find(tensor)
            if cell is None:
                self._written_unseen(tensor)
                cell = self._make_cell(tensor)
            return cell

    # -- the interface --

    def lookup(self, tensor: Any) -> Cell | None:
        self._settle()
        return self._lookup(tensor) if isinstance(tensor, torch.Tensor) and self._is_plain(tensor) else None

    def find(self, tensor: Any) -> Cell | None:
        self._settle()
        if not isinstance(tensor, torch.Tensor) or not self._is_plain(tensor):
            return None
        with self._lock:
            return self._find(tensor)

    def handle(self, tensor: Any) -> Ref | None:
        self._settle()
        if not isinstance(tensor, torch.Tensor) or not self._is_plain(tensor):
            return None
        with self._lock:
            cell = self._lookup(tensor)
            ref = Ref(tensor, cell, True)
            self._add_handle(cell)
            return ref

    def tensor(self, ref: Ref, owner: Any = None) -> torch.Tensor:
        storage = ref.cell.storage() if owner is None else owner.untyped_storage()
        if storage is None:
            raise RuntimeError("memmgr: the cell's bytes are not in memory")
        if storage.nbytes() < ref.cell.nbytes:
            raise RuntimeError("memmgr: a storage shrank under a saved view")
        ref.cell.last_access = self._clock
        return ref.over(storage)

    def fill(self, cell: Cell, tensor: torch.Tensor) -> None:
        """The bytes of `cell` are back; they are the tensor's storage."""
        storage = tensor.untyped_storage()
        if storage.nbytes() != cell.nbytes:
            raise RuntimeError(f"memmgr: recomputation gave {storage.nbytes()} bytes instead of {cell.nbytes}")
        with self._lock:
            if cell.known is not None and cell.known.cell is cell:
                cell.known.cell = None
            if cell.listed and cell.gone != PRESENT:
                self._handled_bytes += cell.nbytes
            self._gone_over(cell)
            cell.strong = storage if cell.handles > 0 or (cell.recipe is None and cell.names > 0) else None
            cell.versions = [Version(tensor)]
            cell.checksum = None
            cell.last_access = self._clock
            self._enter(storage, cell)
            self._raise_peaks()

    def checksum(self, tensor: Any) -> int | None:
        """Of the whole storage."""
        if not isinstance(tensor, torch.Tensor) or not self._is_plain(tensor) or tensor.device.type != "cpu":
            return None
        return _checksum(tensor.untyped_storage())

    def overwritten(self, tensor: Any, recipe: Recipe | None) -> Cell | None:
        """The op that just ran wrote to the tensor's storage."""
        if not isinstance(tensor, torch.Tensor) or not self._is_plain(tensor):
            return None
        with self._lock:
            storage = tensor.untyped_storage()
            known = self._known(storage)
            if known is not None and known.nbytes != storage.nbytes():
                self._resized(known, storage.nbytes())
            old = known.cell if known is not None else None
            if recipe is None and (old is None or (old.handles == 0 and old.names == 0)):
                if old is not None and known is not None:
                    # Nobody asks for the old bytes and nobody can make the new ones: forget it.
                    known.cell = old.known = None
                return None
            if old is not None and known is not None:
                if old.names > 0 and old.recipe is None:
                    old.lost = True
                    self._cut(old, True, False)
                if old.handles > 0 and not tensor.is_inference() and not old.shares_counter(tensor):
                    # A write through `.data` or the like: autograd's own saved tensor would not notice and would read
                    # the new bytes. So the cell stays, with new bytes; what was made from the old ones is cut off.
                    if old.recipe is not None:
                        self._cut(old, False, False)
                        self._drop_recipe(old)
                    return None
                if old.handles > 0:
                    old.stale = True
                self._unlist(old)
                self._disarm(old)
                self._drop_slot(old)
                self._release_strong(old)
                old.known = known.cell = None
            cell = self._make_cell(tensor)
            if old is not None and old.exposed:
                cell.exposed = True
            cell.unsettled = True
            self._unsettled.append(cell)
            if recipe is not None:
                cell.recipe, cell.cost = recipe, recipe.cost
                recipe.made.append(types.weakref.ref(cell))
            return cell

    def would_strand(self, thing: Any) -> list[Cell]:
        """Cells that are wanted, gone, and lost if this storage were overwritten now."""
        with self._lock:
            if isinstance(thing, Cell):
                return self._cut(thing, True, True) if thing.names and thing.recipe is None else []
            if not isinstance(thing, torch.Tensor) or not self._is_plain(thing):
                return []
            known = self._known(thing.untyped_storage())
            cell = known.cell if known is not None else None
            if cell is None or cell.names == 0:
                return []
            if cell.recipe is None:
                return self._cut(cell, True, True)
            if cell.handles > 0 and not thing.is_inference() and not cell.shares_counter(thing):
                return self._cut(cell, False, True)
            return []

    def lose(self, cell: Cell) -> None:
        with self._lock:
            cell.lost = True
            self._cut(cell, True, False)
            if cell.handles == 0:
                self._release_strong(cell)

    def cut_children(self, cell: Cell) -> None:
        with self._lock:
            self._cut(cell, False, False)

    def drop_recipe(self, cell: Cell) -> None:
        with self._lock:
            self._drop_recipe(cell)
            if cell.names > 0:
                self._hold(cell)

    def expose(self, tensor: Any) -> None:
        """A pointer to the tensor's memory was handed out: raw writes may come (rule 6)."""
        cell = self.find(tensor)
        # Parameters are handed to optimizers' and profilers' raw code all the time, and their writes count versions.
        if cell is None or (cell.recipe is None and tensor.requires_grad):
            return
        with self._lock:
            self._drop_recipe(cell)  # what a raw write leaves there, no recipe makes
            if cell.names > 0:
                self._hold(cell)
            cell.exposed = True
            if cell.names > 0 and cell.checksum is None:
                cell.checksum = self.checksum(tensor)

    def table(self) -> list[Cell]:
        with self._lock:
            self._count_deaths()
            return [known.cell for known in self._table.values() if known.cell is not None]

    def end_pass(self) -> None:
        """What nobody saved and no recipe names needs no recipe; chains get shorter until nothing changes."""
        changed = True
        while changed:
            self._settle()
            with self._lock:
                loose = [c for c in self.table() if c.recipe is not None and not c.handles and not c.names]
                for cell in loose:
                    self._drop_recipe(cell)
            changed = bool(loose)

    def kept_roots(self) -> list[Cell]:
        """The roots that are held only because recipes name them."""
        self._settle()
        self._kept_new_bytes = 0
        return [c for c in self.table() if not c.handles and c.names > 0 and c.gone == PRESENT and c.alone]

    def forget_all(self) -> None:
        self._settle()
        with self._lock:
            for cell in self.table():
                if cell.known is not None:
                    cell.known.cell = None
                if cell.gone == PRESENT:
                    self._drop_recipe(cell)
            for cell in self._armed:
                cell.armed = KEEP
            self._armed, self._armed_next, self._armed_bytes = [], 0, 0

    def handled(self) -> list[Cell]:
        """All cells with handles, oldest save first."""
        self._settle()
        with self._lock:
            return list(self._handled)

    def table_size(self) -> tuple[int, int]:
        return len(self.table()), 0

    def _close_doomed_tier(self) -> None:
        if self._tier_doomed and not self._offloaded_cells and self._tier is not None:
            tier, self._tier, self._tier_doomed = self._tier, None, False
            tier.close()

    def _may_leave_bytes(self) -> int:
        return self._handled_bytes + self._incoming_bytes

    def _program_bytes(self) -> int:
        """The bytes of listed cells that the program holds as well."""
        with self._lock:
            return sum(c.nbytes for c in self._handled if c.strong is not None and c.gone == PRESENT and not c.alone)


def _checksum(storage: Any) -> int:
    size = storage.nbytes()
    if size == 0:
        return 0
    memory = (ctypes.c_char * size).from_address(address(storage))
    return zlib.crc32(memory) << 32 | zlib.adler32(memory)


__all__ = ["EVICTED", "Table"]
