"""The life of cells on the accounting path: handles, names, ends, and what a lost cell takes with it."""

from __future__ import annotations

import threading
import time
import weakref

import torch

from . import _py_types as types
from ._py_beside import Beside
from ._py_tier import Tier
from ._py_types import EVICTED, KEEP, OFFLOADED, PRESENT, Cell, Recipe, Ref, graveyard

_RETURNED_SECONDS = 0.1


def written_now(cell: Cell) -> tuple[Cell, int, float]:
    """An entry of the lists of cells that the running op wrote."""
    return cell, threading.get_ident(), time.monotonic()


def _settled(written: list[tuple[Cell, int, float]]) -> tuple[list[Cell], list[tuple[Cell, int, float]]]:
    """What this thread wrote, or another so long ago that its op has returned or the thread has ended; and the rest."""
    me, then = threading.get_ident(), time.monotonic() - _RETURNED_SECONDS
    over = [cell for cell, by, at in written if by == me or at < then]
    return over, [entry for entry in written if entry[1] != me and entry[2] >= then]


class Cells(Beside):
    """The lists that cells are on, and what happens when a handle, a recipe or a cell ends."""

    def __init__(self) -> None:
        super().__init__()
        self._handled: dict[Cell, None] = {}  # cells with handles, oldest save first
        self._here: dict[Cell, None] = {}  # those of them whose bytes are in memory
        self._armed: list[Cell | None] = []
        self._armed_next = 0
        self._armed_bytes = 0
        self._handled_bytes = 0  # present bytes of cells with handles
        self._gone_bytes = 0
        self._incoming_bytes = 0
        self._offloaded_cells = 0
        # Each with the thread that wrote and when: the counter moves only after the op has returned in that thread.
        self._unsettled: list[tuple[Cell, int, float]] = []
        # Written while saved: a moved counter makes them stale, else they have new bytes.
        self._doubtful: list[tuple[Cell, int, float]] = []
        self._next_seq = 0
        self._clock = 0.0
        self._stamp = 0
        self._kept_new_bytes = 0
        self._kept_large: list[
            Cell
        ] = []  # large roots that recipes hold: looked at before every op, so they go in time
        self._tier: Tier | None = None
        self._tier_doomed = False
        types.bury[:] = [self._bury]

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
        # The last cell that needed it may have been a root that only a recipe still named.
        self._close_doomed_tier()

    def _settle(self) -> None:
        """At a quiet moment: what ended is buried, and what the last in-place op wrote has its new version by now."""
        if not (graveyard or self._unsettled or self._doubtful):
            return
        with self._lock:
            self._bury_locked()
            doubtful, self._doubtful = _settled(self._doubtful)
            for cell in doubtful:
                if cell.handles > 0 and not cell.saved_fresh:
                    self._make_stale(cell)  # autograd's error
                elif cell.handles > 0:
                    # The op hides its write, or preserved the counter: autograd would read the new bytes, and so do we.
                    self._cut(cell, False, False)
                    self._drop_recipe(cell)
            cells, self._unsettled = _settled(self._unsettled)
            for cell in cells:
                for version in cell.versions:
                    version.at = version.twin._version
                cell.unsettled = False

    def _changed_in_place(self, cell: Cell) -> None:
        """Written through an alias with a counter of its own (`.data`).

        Autograd's saved tensor would not notice and would read the new bytes. So the cell stays and its bytes change: what
        was made from the old ones is cut off, and so is its recipe.
        """
        self._cut(cell, False, False)
        self._drop_recipe(cell)
        if not cell.unsettled:
            cell.unsettled = True
            self._unsettled.append(written_now(cell))

    def _make_stale(self, cell: Cell) -> None:
        """Off the list of cells that could leave, and without bytes: an unpack is autograd's error (rule 8)."""
        cell.stale = True
        self._wait_not_busy(cell)
        if cell.gone == PRESENT:
            self._unlist(cell)
        self._disarm(cell)
        self._drop_slot(cell)
        self._forget_storage(cell)

    def _forget_storage(self, cell: Cell) -> None:
        self._release_strong(cell)
        if cell.known is not None and cell.known.cell is cell:
            cell.known.cell = None
        cell.known = None

    # -- the life of a cell --

    def _disarm(self, cell: Cell) -> None:
        if cell.armed != KEEP:
            cell.armed = KEEP
            self._armed[cell.armed_at] = None
            self._armed_bytes = max(0, self._armed_bytes - cell.nbytes)

    def _disarm_all(self) -> None:
        for cell in self._armed:
            if cell is not None:
                cell.armed = KEEP
        self._armed, self._armed_next, self._armed_bytes = [], 0, 0

    def _wait_not_busy(self, cell: Cell) -> None:
        while cell.busy:  # a copy that another thread makes without the lock
            self._lock.release()
            try:
                time.sleep(0.0005)
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

    def _add_handle(self, cell: Cell, tensor: torch.Tensor, ref: Ref) -> None:
        ref.version = version = None if tensor.is_inference() else cell.version_of(tensor)
        if version is not None:
            version.saved = True
        cell.handles += 1
        if cell.handles > 1:
            return
        if cell.seq < 0:
            cell.seq, self._next_seq = self._next_seq, self._next_seq + 1
        self._hold(cell)
        self._handled[cell] = None
        cell.listed = True
        if cell.gone == PRESENT:
            self._here[cell] = None
            self._handled_bytes += cell.nbytes
        else:
            self._gone_bytes += cell.nbytes

    def _unlist(self, cell: Cell) -> None:
        if cell.listed:
            self._handled.pop(cell, None)
            self._here.pop(cell, None)
            cell.listed = False
            if cell.gone == PRESENT:
                self._handled_bytes = max(0, self._handled_bytes - cell.nbytes)

    def _back(self, cell: Cell) -> None:
        """The bytes of a listed cell are in memory again."""
        if cell.listed:
            self._here[cell] = None
            self._handled_bytes += cell.nbytes

    def _oldest_first(self) -> list[Cell]:
        """Cells with handles whose bytes are in memory, in the order of their saves."""
        return sorted(self._here, key=lambda cell: cell.seq)

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
            return
        self._drop_slot(cell)
        if not root_in_use:
            self._release_strong(cell)

    def _link(self, recipe: Recipe, cell: Cell) -> None:
        cell.named_by[recipe.serial] = weakref.ref(recipe)
        cell.names += 1
        if cell.names == 1 and cell.recipe is None and cell.strong is None:
            self._hold(cell)
            self._kept_new_bytes += cell.nbytes
            if cell.nbytes > 1 << 20:
                self._kept_large.append(cell)

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
            if cell.names > 0:
                self._hold(cell)  # a root now: who can still be made from it needs its bytes

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

    def _large_root_alone(self) -> bool:
        """Has the program let go of a large root, so that only recipes hold it?"""
        alone, rest = False, []
        for cell in self._kept_large:
            if cell.strong is None or cell.names == 0 or cell.handles > 0:
                continue
            if cell.alone:
                alone = True
            else:
                rest.append(cell)
        self._kept_large = rest
        return alone

    def _forget_slots(self) -> None:
        """Slots are the tier's: who still has one gives it back before the tier goes; what is only there is lost with it."""
        for cell in {*self._handled, *(known.cell for known in list(self._table.values()))}:
            if cell is None or cell.slot < 0:
                continue
            self._drop_slot(cell)
            if cell.gone == OFFLOADED:
                cell.gone = EVICTED
                self._offloaded_cells -= 1

    def _close_doomed_tier(self) -> None:
        if self._tier_doomed and not self._offloaded_cells and self._tier is not None:
            self._forget_slots()
            tier, self._tier, self._tier_doomed = self._tier, None, False
            tier.close()

    def _may_leave_bytes(self) -> int:
        return self._handled_bytes + self._incoming_bytes

    def _cells_here(self) -> int:
        return len(self._here)

    def _program_bytes(self) -> int:
        """The bytes of listed cells that the program holds as well."""
        with self._lock:
            return sum(c.nbytes for c in self._here if c.strong is not None and (c.pinned or not c.alone))
