"""The table of cells of the accounting path: which cell a storage is now, what writes make of it, and what they cut."""

from __future__ import annotations

from typing import Any

import torch

from ._py_cells import Cells, written_now
from ._py_predict import is_plain
from ._py_tier import address
from ._py_types import EVICTED, PRESENT, Cell, Known, Recipe, Ref, graveyard
from ._py_versions import Version


class Table(Cells):
    """Finds, makes, overwrites and forgets cells."""

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
        cell = Cell(known, not tensor.requires_grad and (known.exposed or is_foreign(storage)), self._clock)
        # Cells of other devices than the budget's are never let go of.
        cell.pinned = storage.device != self._memory.device or (cell.exposed and self._is_elsewhere(known, storage))
        cell.module = self._module()
        if not tensor.is_inference():
            cell.versions.append(Version(tensor))
        known.cell = cell
        if cell.exposed and not known.counted:
            # Somebody else's handle on memory that is ours (DLPack): whoever has it by its own storage is exposed as well.
            place = address(storage)
            for owner in self.table():
                theirs = owner.storage()
                if theirs is not None and owner is not cell and 0 <= place - address(theirs) < owner.nbytes:
                    self._expose(owner)
        return cell

    @staticmethod
    def _is_elsewhere(known: Known, storage: Any) -> bool:
        """Are the bytes another library's or another process's? They may change as long as that pleases, so no copy of
        them is any good, and letting go of them frees nothing that is counted."""
        return is_foreign(storage) and (not known.counted or storage.is_shared())

    def _find(self, tensor: torch.Tensor) -> Cell | None:
        storage = tensor.untyped_storage()
        known = self._known(storage)
        cell = known.cell if known is not None else None
        if cell is None or tensor.is_inference():
            return cell
        if not cell.fresh or storage.nbytes() != cell.nbytes:  # resized: a write (rule 3)
            return None
        if cell.version_of(tensor) is None:
            cell.versions.append(Version(tensor))
        return cell

    def _written_unseen(self, tensor: torch.Tensor) -> None:
        """A write that nobody announced was noticed: the cell of this storage is no longer what it was."""
        known = self._known(tensor.untyped_storage())
        cell = known.cell if known is not None else None
        if known is None or cell is None:
            return
        if cell.handles > 0 and cell.saved_fresh:
            self._changed_in_place(cell)
            self._settle()
            nbytes = tensor.untyped_storage().nbytes()
            if cell.listed and cell.gone == PRESENT:
                self._handled_bytes += nbytes - cell.nbytes
            if known.nbytes != nbytes:
                self._resized(known, nbytes)
            cell.nbytes = nbytes  # resized, as FSDP does with its parameters
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
                cell = self._find(tensor) or self._make_cell(tensor)
            return cell

    def _expose(self, cell: Cell) -> None:
        """A pointer to the cell's memory is in other hands: from now on its bytes may change unseen (rule 6)."""
        known = cell.known
        storage = known() if known is not None else None
        elsewhere = False
        if known is not None and storage is not None:
            known.exposed = storage.device.type == "cpu"  # on an accelerator a pointer is for one launch
            elsewhere = self._is_elsewhere(known, storage)
        if cell.exposed:
            cell.pinned |= elsewhere
            return
        if cell.handles == 0 and cell.recipe is not None:
            # What was made from it can be made again from its recipe; the storage becomes a root of its own.
            cell.strong = cell.known = None
            if known is not None and known.cell is cell and storage is not None:
                fresh = known.cell = Cell(known, True, self._clock)
                fresh.versions = [version.copy() for version in cell.versions]
                cell = fresh
        else:
            self._cut(cell, False, False)
            self._drop_recipe(cell)
            cell.exposed = True
        cell.pinned |= elsewhere

    def _private_copy(self, cell: Cell) -> Cell | None:
        """A root with the same bytes, which nobody else can write; held until a recipe names it.

        None when there is no room: then there is no recipe, but the op may have all that there is.
        """
        lease = cell.storage()
        try:
            storage = self._new_storage(cell.nbytes)
        except torch.OutOfMemoryError:
            return None
        if cell.nbytes:
            self._memory.copy(storage, lease)
        known = self._known(storage)
        assert known is not None
        copy = known.cell = Cell(known, False, self._clock)
        copy.strong = storage
        return copy

    def _discard(self, copy: Cell) -> None:
        """A private copy that no recipe is going to name."""
        if copy.names == 0:
            self._forget_storage(copy)

    # -- the interface --

    def lookup(self, tensor: Any) -> Cell | None:
        self._settle()
        return self._lookup(tensor) if isinstance(tensor, torch.Tensor) and is_plain(tensor) else None

    def find(self, tensor: Any) -> Cell | None:
        self._settle()
        if not isinstance(tensor, torch.Tensor) or not is_plain(tensor):
            return None
        with self._lock:
            return self._find(tensor)

    def handle(self, tensor: Any) -> Ref | None:
        self._settle()
        if not isinstance(tensor, torch.Tensor) or not is_plain(tensor):
            return None
        with self._lock:
            cell = self._lookup(tensor)
            ref = Ref(tensor, cell, True)
            self._add_handle(cell, tensor, ref)
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
            if cell.gone != PRESENT:
                self._back(cell)
            self._gone_over(cell)
            cell.strong = storage if cell.handles > 0 or (cell.recipe is None and cell.names > 0) else None
            cell.versions = [Version(tensor, cell.handles > 0)]
            cell.checksum = None
            cell.last_access = self._clock
            self._enter(storage, cell)
            known = cell.known
            if known is not None and not known.counted and storage.device == self._memory.device:
                # Made by the replay before the op that filled it, so it passed for something that was given.
                self._count(known)
            self._remade(known, storage)
            if self._streams is not None:
                self._streams.filled()
            self._raise_peaks()

    def overwritten(self, tensor: Any, recipe: Recipe | None) -> Cell | None:
        """The op that just ran wrote to the tensor's storage."""
        if not isinstance(tensor, torch.Tensor) or not is_plain(tensor):
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
                if old.handles > 0 and not old.saved_under(tensor):
                    self._changed_in_place(old)
                    return None
                if old.handles > 0:
                    # Whether this is an error shows when the counter has moved, or has not: see _settle().
                    self._doubtful.append(written_now(old))
                    self._disarm(old)
                else:
                    self._drop_slot(old)
                    self._forget_storage(old)
                known.cell = None
            cell = self._make_cell(tensor)
            if old is not None and old.exposed:
                cell.exposed = True
            cell.unsettled = True
            self._unsettled.append(written_now(cell))
            if recipe is not None:
                cell.recipe, cell.cost = recipe, recipe.cost
                cell.maker = str(recipe._func)
                recipe.note_made(cell)
            return cell

    def would_strand(self, thing: Any) -> list[Cell]:
        """Cells that are wanted, gone, and lost if this storage were overwritten now."""
        with self._lock:
            if isinstance(thing, Cell):
                return self._cut(thing, True, True) if thing.names and thing.recipe is None else []
            if not isinstance(thing, torch.Tensor) or not is_plain(thing):
                return []
            known = self._known(thing.untyped_storage())
            cell = known.cell if known is not None else None
            if cell is None or cell.names == 0:
                return []
            if cell.recipe is None:
                return self._cut(cell, True, True)
            # A write through an alias with a counter of its own keeps this cell and cuts its children: see overwritten().
            return self._cut(cell, False, True) if cell.handles > 0 and not cell.saved_under(thing) else []

    def would_strand_exposed(self, tensor: Any) -> list[Cell]:
        """Cells that are wanted, gone, and lost when the tensor's memory may change unseen."""
        cell = self.find(tensor)
        if cell is None or cell.exposed or (cell.handles == 0 and cell.recipe is not None):
            return []
        with self._lock:
            return self._cut(cell, False, True)

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
        if self._streams is not None:
            self._streams.note()  # whoever was given the pointer uses it there
        cell = self.find(tensor)
        # Parameters are handed to optimizers' and profilers' raw code all the time, and their writes count versions.
        if cell is None or (cell.recipe is None and tensor.requires_grad):
            return
        with self._lock:
            self._expose(cell)

    def table(self) -> list[Cell]:
        with self._lock:
            self._count_deaths()
            return [known.cell for known in self._table.values() if known.cell is not None]

    def misplaced(self) -> int:
        """For tests: how many entries of the table stand for another storage; 0."""
        with self._lock:
            return sum(k.cell is not None and k.cell.known is not k for k in self._table.values())

    def end_pass(self) -> None:
        """What nobody saved and no recipe names needs no recipe; chains get shorter until nothing changes."""
        self._end_of_pass()
        changed = True
        while changed:
            self._settle()
            with self._lock:
                loose = [c for c in self.table() if c.recipe is not None and not c.handles and not c.names]
                for cell in loose:
                    self._drop_recipe(cell)
            changed = bool(loose or graveyard)

    def forget_recipes(self) -> None:
        """Writes went unwatched for a while, so no recipe from before may run any more."""
        self._settle()
        with self._lock:
            for cell in {*self.table(), *self._handled}:
                if cell.gone != EVICTED:
                    self._drop_recipe(cell)

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
            self._disarm_all()
            self._kept_large.clear()

    def handled(self) -> list[Cell]:
        """All cells with handles, oldest save first."""
        self._settle()
        with self._lock:
            return list(self._handled)

    def table_size(self) -> tuple[int, int]:
        return len(self.table()), 0


def is_foreign(storage: Any) -> bool:
    """Memory that another library or process can write: NumPy's, a file's, shared memory, a DLPack capsule's.

    Known limitation: torch does not show who frees a storage, so one that claims to be resizable is taken for torch's own.
    """
    return storage.device.type == "cpu" and (not storage.resizable() or storage.is_shared())
