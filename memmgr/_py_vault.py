"""Letting go and bringing back on the accounting path: the same rules as in `allocator/shim/vault.cpp`, in Python.

Evicting drops our reference to the storage; bytes that come back are a new storage.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from ._py_columns import Columns
from ._py_device import checksum_of
from ._py_host import HostTier
from ._py_tier import open_tier
from ._py_types import EVICT, EVICTED, KEEP, OFFLOAD, OFFLOADED, PRESENT, Cell, can_evict, only_tensor
from ._py_versions import bytes_of
from ._py_watch import HAPPENED_EVICT, HAPPENED_OFFLOAD, HAPPENED_RELOAD


class Vault(Columns):
    """Releases cells in the order of the policies, and reloads them."""

    def __init__(self) -> None:
        super().__init__()
        self._may_evict = self._may_offload = True
        self._link_seconds_per_byte = 0.0
        self._verify = False
        self._sample = 64

    # -- letting go --

    def _can_offload(self) -> bool:
        return self._tier is not None and self._may_offload

    def _release(self, cell: Cell, action: int) -> bool:
        """Lets the bytes go if they are ours alone. The lock is held; it is dropped while bytes are copied."""
        self._disarm(cell)
        if not self._loose(cell) or cell.incoming is not None or not self._no_capture.is_set():
            return False
        gone = PRESENT
        tier = self._tier
        drop = action == EVICT and self._may_evict and can_evict(cell) and self._room_to_remake(cell)
        if cell.slot >= 0 and tier is not None:
            state, slot = 1 if tier.ordered else tier.poll(cell.slot), cell.slot
            if state == 0:
                # A write is under way. To offload, waiting for it is cheaper than beginning another one; to evict, it
                # has to end before the bytes go, and its copy goes with them.
                cell.slot = -1 if drop else slot
                code = self._unlocked(cell, lambda: tier.free(slot) if drop else tier.wait(slot))
                if code < 0 or not self._loose(cell) or (not drop and cell.slot != slot):
                    return False
                gone = PRESENT if drop else OFFLOADED
            elif state > 0:
                gone = OFFLOADED  # clean: copied when the bytes were ours alone, and nobody has had them since
            else:
                self._tier_failed(state)
                cell.slot = -1
                tier.free(slot)
        if gone == OFFLOADED:
            self._n["clean_drops"] += 1
        if gone == PRESENT and drop and can_evict(cell):  # asked again: the lock was not held all the time
            gone = EVICTED
        if gone == PRESENT and tier is not None and self._may_offload and cell.slot < 0:
            source = self._memory.for_tier(cell.strong)
            slot = self._unlocked(cell, lambda: tier.write_now(source, cell.nbytes))
            del source
            if slot < 0:
                self._tier_failed(slot)
            elif not self._loose(cell):
                tier.free(slot)  # somebody took the bytes meanwhile: the copy may not be what they leave behind
                return False
            else:
                self._n["offloads"] += 1
                self._n["offload_bytes"] += cell.nbytes
                cell.slot = slot
                gone = OFFLOADED
        if gone == PRESENT and self._may_evict and can_evict(cell):
            gone = EVICTED
        if gone == PRESENT:
            return False
        if gone == EVICTED:
            nth, self._n["evictions"] = self._n["evictions"], self._n["evictions"] + 1
            self._n["evicted_bytes"] += cell.nbytes
            self._event(HAPPENED_EVICT, cell)
            if self._verify or (self._sample and nth % self._sample == 0):
                cell.checksum = checksum_of(cell.strong, self._streams)
        else:
            self._offloaded_cells += 1
            self._event(HAPPENED_OFFLOAD, cell)
            if self._verify or (self._sample and self._n["offloads"] % self._sample == 0):
                cell.checksum = checksum_of(cell.strong, self._streams)
        if self._streams is not None:
            self._streams.mark_all(cell.strong, "uses")
        cell.gone = gone
        if cell.listed:
            self._here.pop(cell, None)
            self._handled_bytes = max(0, self._handled_bytes - cell.nbytes)
        self._gone_bytes += cell.nbytes
        self._virtual += cell.nbytes
        if cell.known is not None:
            cell.known.cell = None
        cell.strong = cell.known = None
        self._count_deaths()
        return True

    @staticmethod
    def _loose(cell: Cell) -> bool:
        return cell.ours_alone and cell.fresh

    def _unlocked(self, cell: Cell, transfer: Any) -> int:
        self._tls.critical += 1  # no signal from here on: the lock is not ours all the time
        cell.busy = True
        depth = 0
        while self._lock._is_owned():  # callers may hold it more than once
            self._lock.release()
            depth += 1
        try:
            return int(transfer() or 0)
        finally:
            for _ in range(depth):
                self._lock.acquire()
            cell.busy = False
            self._tls.critical -= 1

    def _tier_failed(self, code: int) -> None:
        self._n["tier_errors"] += 1
        self._tier_error = os.strerror(-code)

    def _cancel_prefetches(self, want: int) -> int:
        """Gives up what was brought back too early, the last needed first: the copies below are still good."""
        released = 0
        for cell in list(self._handled) if self._incoming_bytes else ():
            if released >= want:
                break
            tier, slot = self._tier, cell.slot
            if cell.incoming is None or cell.busy or tier is None:
                continue
            incoming, cell.incoming = cell.incoming, None
            self._incoming_bytes -= cell.nbytes
            if not tier.ordered:
                self._unlocked(cell, lambda tier=tier, slot=slot: tier.wait(slot))
            del incoming
            released += cell.nbytes
            self._n["prefetch_cancels"] += 1
        return released

    def _release_from_vault(self, want: int) -> int:
        """Takes what was ranked, in its order; then, if that was not enough, whatever may leave, oldest save first."""
        released = 0
        self._settle()
        if not self._no_capture.is_set():
            return 0
        with self._lock:
            while released < want and self._armed_next < len(self._armed):
                cell = self._armed[self._armed_next]
                self._armed_next += 1
                if cell is not None and cell.armed != KEEP and self._release(cell, cell.armed):
                    released += cell.nbytes
            if released < want:
                released += self._cancel_prefetches(want - released)
            for cell in self._oldest_first() if released < want else ():
                if released >= want:
                    break
                if not cell.ours_alone:
                    continue
                evictable = self._may_evict and can_evict(cell) and self._room_to_remake(cell)
                if not evictable and not (self._tier is not None and self._may_offload) and cell.slot < 0:
                    continue
                errors = self._n["tier_errors"]
                slow = evictable and cell.cost < self._link_seconds_per_byte * cell.nbytes and cell.slot < 0
                if self._release(cell, EVICT if evictable and (not self._may_offload or slow) else OFFLOAD):
                    released += cell.nbytes
                    self._n["unranked"] += 1
                elif self._n["tier_errors"] != errors:
                    break  # the tier fails: do not try every cell
        return released

    # -- bringing back --

    def bring_back(self, cell: Cell) -> bool:
        """Reloads; True when the cell wants recomputation instead.

        Raises:
            torch.OutOfMemoryError: there is no room.
            OSError: the copy cannot be read and there is no recipe.
            RuntimeError: this thread captures a graph.
        """
        if not self._no_capture.is_set():
            if self._memory.is_capturing():
                raise RuntimeError(
                    "memmgr: while a graph is captured no saved tensor can be brought back to the device"
                )
            self._no_capture.wait()  # another thread does
        with self._lock:
            self._wait_not_busy(cell)
            if cell.gone == PRESENT and cell.present:
                return False
            tier, slot, incoming = self._tier, cell.slot, cell.incoming
            if cell.gone != OFFLOADED or slot < 0 or tier is None:
                return True
            self._tls.critical += 1
            cell.incoming = None
            if incoming is not None:
                self._incoming_bytes -= cell.nbytes
            cell.busy = True
        begun, made_room = time.perf_counter_ns(), self._stalled()
        storage = incoming
        try:
            if self._streams is not None:
                self._streams.note()
            if incoming is not None:
                code = tier.use(slot)
            else:
                storage = self._new_storage(cell.nbytes)
                code = tier.read_now(slot, self._memory.for_tier(storage))
        finally:
            cell.busy = False
            self._tls.critical -= 1
        with self._lock:
            if code < 0:
                self._tier_failed(code)
                if cell.recipe is None or not cell.recipe.ok:
                    raise OSError(
                        -code, f"memmgr: reading a saved tensor back from the disk tier failed: {os.strerror(-code)}"
                    )
                # The copy cannot be read, but the bytes can be made again.
                self._offloaded_cells -= 1
                cell.gone = EVICTED
                self._drop_slot(cell)
                return True
            checked = cell.checksum is not None and not cell.exposed
            if (
                checked and checksum_of(storage, self._streams) != cell.checksum
            ):  # which stays: wrong is wrong next time
                how = "read when needed" if incoming is None else "prefetched"
                raise RuntimeError(
                    f"memmgr: {cell.nbytes} bytes came back from the tier below other than they went ({how}, slot {slot})"
                )
            cell.checksum = None
            self._gone_over(cell)
            self._back(cell)
            cell.strong = storage
            self._enter(storage, cell)
            self._remade(cell.known, storage)
            if self._streams is not None:
                self._streams.filled()
            if self._tier_doomed:
                self._drop_slot(cell)
                self._close_doomed_tier()
        self._n["reloads"] += 1
        self._n["reload_bytes"] += cell.nbytes
        self._n["prefetch_hits" if incoming is not None else "prefetch_misses"] += 1
        spent = time.perf_counter_ns() - begun - (self._stalled() - made_room)
        self._add_stall(spent)
        self._event(HAPPENED_RELOAD, cell, spent)
        return False

    def _stalled(self) -> int:
        return self._tls.stall_ns

    def _add_stall(self, spent: int) -> None:
        self._n["stall_ns"] += spent
        self._tls.stall_ns = self._stalled() + spent

    def prefetch(self, cell: Cell, keep_free: int) -> int:
        """1: begun, 0: no room, -1: nothing to do."""
        if not self._no_capture.is_set():
            return 0
        with self._lock:
            tier = self._tier
            if cell.gone != OFFLOADED or cell.incoming is not None or cell.busy or cell.slot < 0 or tier is None:
                return -1
            if self._resident() + self._promised + self._memory.taken(cell.nbytes) + keep_free > self._budget:
                return 0
            try:
                storage = self._memory.new(cell.nbytes)
            except torch.OutOfMemoryError:
                return 0
            if tier.read(cell.slot, self._memory.for_tier(storage)) < 0:
                return 0
            self._register(storage, True)
            cell.incoming = storage
            self._incoming_bytes += cell.nbytes
            return 1

    def clone_storage(self, cell: Cell) -> torch.Tensor:
        """A private copy of the cell's bytes, for ops that write (rule 2), as a byte tensor."""
        lease = self.lease(cell)
        if lease is None:
            raise RuntimeError("memmgr: the cell's bytes are not in memory")
        source = lease.untyped_storage()
        copy = self._new_storage(source.nbytes())
        if source.nbytes():
            self._memory.copy(copy, source)
        return bytes_of(copy)

    def take(self, cell: Cell, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor, if it alone has the cell's bytes and nobody will ask the cell for them: the caller may write there.

        The cell is one that died with its bytes then. None otherwise: `clone_storage` gives bytes to write to.
        """
        with self._lock:
            known = cell.known
            wanted = cell.handles > 0 or cell.strong is not None or cell.slot >= 0 or cell.busy or cell.managed
            if wanted or cell.gone != PRESENT or known is None or known.cell is not cell:
                return None
            if known() is not tensor.untyped_storage() or not only_tensor(tensor):
                return None
            known.cell = cell.known = None
            return tensor

    def lease(self, cell: Cell) -> torch.Tensor | None:
        """A byte tensor over the whole storage: while it lives the cell is not ours alone, so it stays."""
        with self._lock:
            storage = cell.storage()
            return None if storage is None else bytes_of(storage)

    # -- what the policies say and see --

    def arm(self, ranked: Any) -> None:
        with self._lock:
            if self._armed_next >= len(self._armed):
                self._armed, self._armed_next = [], 0
            for cell, action in ranked:
                if action == KEEP or cell.armed != KEEP or not cell.listed:
                    continue
                cell.armed, cell.armed_at = int(action), len(self._armed)
                self._armed.append(cell)
                self._armed_bytes += cell.nbytes

    def disarm_all(self) -> None:
        with self._lock:
            self._disarm_all()

    def release(self, cell: Cell, action: int) -> bool:
        self._settle()
        with self._lock:
            return self._release(cell, action)

    def write_back(self, cell: Cell) -> bool:
        """Queues an early copy of bytes that are ours alone."""
        with self._lock:
            if self._tier is None or cell.slot >= 0 or not cell.ours_alone or not cell.fresh:
                return False
            if not self._no_capture.is_set():
                return False
            slot = self._tier.write(self._memory.for_tier(cell.strong), cell.nbytes)
            if slot < 0:
                self._tier_failed(slot)
                return False
            cell.slot = slot
            self._n["write_backs"] += 1
            self._n["offloads"] += 1
            self._n["offload_bytes"] += cell.nbytes
            return True

    def offloaded(self, limit: int) -> tuple[list[Cell], int, int]:
        """(cells that backward will need, soonest first, position of the last use, bytes in flight)."""
        found: list[Cell] = []
        in_flight = 0
        with self._lock:
            for cell in reversed(self._handled):
                if len(found) >= limit:
                    break
                if cell.gone != OFFLOADED or cell.managed:
                    continue
                if cell.incoming is None:
                    found.append(cell)
                elif self._tier is not None and cell.slot >= 0 and self._tier.poll(cell.slot) == 0:
                    in_flight += cell.nbytes
        return found, self.position(), in_flight

    def position(self) -> int:
        raise NotImplementedError

    def pressure(self) -> tuple[int, int, int, int, int, int, int]:
        """(resident, budget, handled, gone, armed, largest request, offloaded cells)."""
        return (
            self._resident(),
            self._budget,
            self._handled_bytes,
            max(
                1, self._gone_bytes
            ),  # never 0: where nothing is gone the mode could be taken off, and with it our sight
            self._armed_bytes,
            self._largest,
            self._offloaded_cells,
        )

    def set_options(self, may_evict: bool, may_offload: bool, verify: bool, sample: int) -> None:
        self._may_evict, self._may_offload = bool(may_evict), bool(may_offload)
        self._verify, self._sample = bool(verify), sample

    def set_link(self, seconds_per_byte: float) -> None:
        self._link_seconds_per_byte = seconds_per_byte

    # -- the tier --

    def open_tier(self, folder: str, capacity: int, rate: int, workers: int) -> None:
        self._tier = open_tier(folder, capacity, rate, workers)

    def open_host_tier(self, capacity: int) -> None:
        """Below a device: host memory."""
        assert self._streams is not None
        self._tier = HostTier(self._memory.device, capacity, self._streams)

    def close_tier(self) -> None:
        self._tier_doomed = False
        self._settle()
        with self._lock:
            self._forget_slots()
            tier, self._tier = self._tier, None
        if tier is not None:
            tier.close()

    def doom_tier(self) -> None:
        """Closes the tier when the last cell that needs it is gone."""
        self._tier_doomed = self._tier is not None
        self._settle()
        with self._lock:
            self._close_doomed_tier()

    def tier_inject(self, write_errno: int, after_writes: int, read_errno: int, after_reads: int) -> None:
        if self._tier is not None:
            self._tier.inject(write_errno, after_writes, read_errno, after_reads)

    def tier_stats(self) -> dict[str, int]:
        return self._tier.stats() if self._tier is not None else {}

    def tier_probe(self, size: int) -> tuple[float, float] | None:
        """(seconds to write, seconds to read) so many bytes, or None."""
        tier = self._tier
        if tier is None:
            return None
        storage = self._memory.new(size)
        bytes_of(storage).fill_(1)
        place = self._memory.for_tier(storage)
        self._memory.synchronize()
        begun = time.perf_counter()
        slot = tier.write(place, size)
        code = slot if slot < 0 else tier.wait(slot)
        wrote = time.perf_counter()
        if code >= 0:
            code = tier.read(slot, place) or tier.wait(slot)
        done = time.perf_counter()
        if slot >= 0:
            tier.free(slot)
        return None if code < 0 else (wrote - begun, done - wrote)
