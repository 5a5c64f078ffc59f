"""The host tier of an accelerator: device blocks parked in one page-locked slab, in stream order.

Nothing here makes the CPU wait except `wait`, `host_address` and `close`. Copies run on two side streams beside
compute; what keeps them exact are waits between streams. Each carries a name and stands here once:

    offload   write_stream waits for  offload.last_write    the op that made the bytes (rule 5)
                                      offload.touched       every other stream that touched the block
                                      offload.slot_reuse    reads of who had this piece of the slab before
              memory deferred         offload.source        the block, until it has been read out
    reload    read_stream waits for   reload.allocated      earlier users of the block's memory, on the home stream
                                      reload.write_done     the host bytes: complete only behind the write's event
              memory deferred         reload.target         the block, until it is filled: it may be dropped unused
    use       consumer waits for      reload.use            the bytes on the device
    drop      memory deferred         drop.used             streams other than home that used the block
    overwrite writer waits for        overwrite.write_done  the copy of the old version, if it is still being taken
    CPU       waits for               wait.*, spill.*, close.*

tests/streams/mutations.py lists them all; for each, a test shows that the bytes go wrong without it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from memmgr.tiers.slab import Slab
from memmgr.tiers.streams import Block, BlockTier, Event, HostRange, Reload, Stream, StreamApi, TierStats


@dataclass(slots=True, eq=False)
class Slot:
    """A piece of the slab that holds one cell's bytes.

    Attributes:
        offset_bytes: in the slab.
        nbytes: payload.
        written: passes when the host bytes are complete.
        last_read: passes when the last reload from this slot is done; None before the first.
        read_number: position of that reload among all reads of the tier.
        freed: the tier has it back; using it is an error.
    """

    offset_bytes: int
    nbytes: int
    written: Event
    last_read: Event | None = None
    read_number: int = -1
    freed: bool = False


@dataclass(frozen=True, slots=True)
class _Fence:
    """A piece of the slab that was given back while a read from it may still be running."""

    start: int
    end: int
    read_number: int
    event: Event


class _Link:
    """What is under way in one direction. Events of one stream pass in order, so only the oldest needs asking."""

    def __init__(self, streams: StreamApi) -> None:
        self._streams = streams
        self._queue: deque[tuple[Event, int]] = deque()
        self.queued_bytes = 0
        self.total_bytes = 0
        self.count = 0

    def add(self, event: Event, nbytes: int) -> None:
        self.poll()
        self._queue.append((event, nbytes))
        self.queued_bytes += nbytes
        self.total_bytes += nbytes
        self.count += 1

    def poll(self) -> None:
        while self._queue and self._streams.query(self._queue[0][0]):
            self.queued_bytes -= self._queue.popleft()[1]

    @property
    def last(self) -> Event | None:
        return self._queue[-1][0] if self._queue else None


class HostTier:
    """Parks device blocks in page-locked host memory. Implements `BlockTier[Slot]`.

    The caller owns the cells: it knows for each block its home stream, the event of its last write and the events of
    the streams that used it (rule 5), and that nobody writes to a block between `write` and the `drop` that relies on
    the copy (design, "Clean and dirty"), or says so by `before_overwrite`.

    A clean copy is a `write` without a `drop`: the block stays on the device. Dropping it later is instant, also while
    the copy is still running, because the block's memory is deferred from the moment of the write on. Hence also a
    block that simply dies (the last tensor on it is deleted) is safe. While the copy runs, an implementation of
    `StreamApi` may hold a reference to the block for this; a use count of the storage then reads one higher.

    Threading: any thread. The lock is never held while a block is allocated (that may reclaim, and reclaim may come
    back here) nor while the CPU waits. One slot is not to be freed while another thread reads it.

    Known limitations: one device, one read and one write stream; a block is parked whole and from its first byte; free
    room in the slab may be in pieces, `write` then returns None although `used_bytes + nbytes <= capacity_bytes`.

    Args:
        streams: the device.
        capacity_bytes: size of the slab; page-locked at once, so it is taken from the machine at once.
    """

    def __init__(self, streams: StreamApi, capacity_bytes: int) -> None:
        self._streams = streams
        self._slab = Slab(capacity_bytes)
        self._memory = streams.host_allocate(self._slab.capacity_bytes)
        self._lock = Lock()
        self._fences: list[_Fence] = []
        self._graves: deque[Slot] = deque()  # freed, their room not yet given back; append and popleft are atomic
        self._writes = _Link(streams)
        self._reads = _Link(streams)
        self._closed = False

    # ---- offload -------------------------------------------------------------------------------------------------

    def write(
        self,
        block: Block,
        nbytes: int,
        last_write: Event,
        touched: Sequence[Event] = (),
        home: Stream | None = None,
    ) -> Slot | None:
        """Queues a copy of the block's first `nbytes` bytes into the slab. The block stays as it is and usable.

        Args:
            block: device memory of the cell.
            nbytes: how much of it, at least 1.
            last_write: the event of the block's last known write (for a reloaded block: `Reload.ready`).
            touched: events of other streams that had the block in hand and may have written to it unseen (raw kernels).
            home: the block's home stream if known, see `StreamApi.free`.

        Returns:
            The slot, or None when there is no room; then nothing was queued. If the device refuses the copy, its error
            is raised, the room is given back and the block still has the bytes.
        """
        with self._lock:
            self._check_open()
            self._bury()
            offset = self._slab.allocate(nbytes)
            if offset is None:
                return None
            stream = self._streams.write_stream
            try:
                self._wait("offload.last_write", stream, last_write)
                for event in touched:
                    # A copy is clean only behind every stream that touched the block, not just its recorded writer.
                    self._wait("offload.touched", stream, event)
                self._wait_for_former_readers(offset)
                self._streams.copy_async(HostRange(self._memory, offset), block, nbytes, stream)
                written = self._streams.record(stream)
            except BaseException:
                # Safe even if the copy was queued: who gets this piece next writes on the same stream, so after it.
                self._slab.free(offset)
                raise
            self._writes.add(written, nbytes)
        # From here on the block may be dropped by anyone at any time; its bytes are still being read (rule 5).
        self._free_after("offload.source", block, [written], home)
        return Slot(offset, nbytes, written)

    def _wait_for_former_readers(self, offset: int) -> None:
        """write_stream waits for reloads from the slots that this piece of the slab belonged to before."""
        start, end = offset, offset + self._slab.size_of(offset)
        number, event = max(
            ((f.read_number, f.event) for f in self._fences if f.start < end and start < f.end),
            key=lambda pair: pair[0],
            default=(-1, None),
        )
        if event is None:
            return
        self._wait("offload.slot_reuse", self._streams.write_stream, event)
        # All reads are on one stream and all writes on another: having waited for read n, this write and all later ones
        # are behind the reads 0..n, wherever in the slab they were.
        self._fences = [f for f in self._fences if f.read_number > number]

    def before_overwrite(self, slot: Slot, stream: Stream) -> None:
        """An op on `stream` is about to write to the block that `slot` was copied from: it waits for the copy.

        The slot keeps the old version (rule 2), the block becomes a new cell. To be called also if the slot has been
        freed meanwhile or the write is long done; it costs nothing then.
        """
        if not self._streams.query(slot.written):
            self._wait("overwrite.write_done", stream, slot.written)

    def drop(self, block: Block, used: Sequence[Event] = (), home: Stream | None = None) -> None:
        """Gives up the cell's reference to a block, instantly; its memory is reused when that is safe.

        Copies of this tier need no mention. Of the program's uses, those on the home stream need none either: reuse is
        in the order of that stream.

        Args:
            block: the caller drops its own reference right after this call.
            used: events of all streams other than home that used the block (rule 5).
            home: the block's home stream if known.
        """
        self._free_after("drop.used", block, used, home)

    # ---- reload --------------------------------------------------------------------------------------------------

    def read(self, slot: Slot, consumer: Stream | None = None) -> Reload:
        """Allocates a block on `consumer` and queues the copy that fills it. The slot stays a clean copy until `free`.

        A prefetch and a reload at the moment of need are the same call; a slot may be read more than once.

        Args:
            slot: what `write` returned; the write may still be running.
            consumer: the home stream of the new block; the calling thread's current stream by default. A daemon thread
                names the stream of the thread it works for.

        Returns:
            The block and the event behind which its bytes are there: `use` it before the first op.

        Raises:
            torch.OutOfMemoryError: no room on the device; the slot is as it was.
            ValueError: the slot was freed.
        """
        self._check_held(slot)
        home = self._streams.current_stream() if consumer is None else consumer
        block = self._streams.allocate(slot.nbytes, home)  # without the lock: this may reclaim
        allocated = self._streams.record(home)
        with self._lock:
            self._check_open()
            self._check_held(slot)
            stream = self._streams.read_stream
            # The memory may have had another user, whose last ops are still queued on the home stream.
            self._wait("reload.allocated", stream, allocated)
            self._wait("reload.write_done", stream, slot.written)
            self._streams.copy_async(block, HostRange(self._memory, slot.offset_bytes), slot.nbytes, stream)
            ready = self._streams.record(stream)
            slot.last_read, slot.read_number = ready, self._reads.count
            self._reads.add(ready, slot.nbytes)
        # A prefetched block may be dropped before anybody waited for it; the copy would then fill somebody else's.
        self._free_after("reload.target", block, [ready], home)
        return Reload(block, ready)

    def use(self, reload: Reload, stream: Stream) -> None:
        """Work put on `stream` from now on sees the reloaded bytes. Once for each stream that uses them."""
        self._wait("reload.use", stream, reload.ready)

    # ---- slots ---------------------------------------------------------------------------------------------------

    def poll(self, slot: Slot) -> bool:
        """Whether the write and the last reload of this slot are done. Never blocks."""
        return self._streams.query(slot.written) and (slot.last_read is None or self._streams.query(slot.last_read))

    def wait(self, slot: Slot) -> None:
        """Blocks the calling thread until the write and all reloads of this slot are done."""
        self._synchronize("wait.write_done", slot.written)
        if slot.last_read is not None:
            self._synchronize("wait.read_done", slot.last_read)

    def host_address(self, slot: Slot) -> int:
        """The address of the slot's bytes, complete: what the disk tier below would write. Blocks until they are there.

        The address is valid until `free`; the caller finishes with it before.
        """
        self._check_held(slot)
        self._synchronize("spill.write_done", slot.written)
        return self._streams.host_address(self._memory) + slot.offset_bytes

    def free(self, slot: Slot) -> None:
        """Gives the slot back at once, even while its write or reloads run: the next write into this piece waits.

        Never blocks, so that finalizers may call it, also one that the garbage collector runs inside another call of
        this tier: if the lock is taken, the room comes back with the next `write`, `free` or `stats`.

        Raises:
            ValueError: the slot was freed before.
        """
        self._check_held(slot)
        slot.freed = True
        self._graves.append(slot)
        if self._lock.acquire(blocking=False):
            try:
                self._bury()
            finally:
                self._lock.release()

    def _bury(self) -> None:
        """Gives the room of freed slots back. Called with the lock held."""
        while self._graves:
            slot = self._graves.popleft()
            start = slot.offset_bytes
            # A write that still runs needs no fence: the next one into this piece is on the same stream.
            if slot.last_read is not None and not self._streams.query(slot.last_read):
                end = start + self._slab.size_of(start)
                self._fences.append(_Fence(start, end, slot.read_number, slot.last_read))
            self._slab.free(start)
        while self._fences and self._streams.query(self._fences[0].event):
            del self._fences[0]  # keeps the list as long as what is under way, not as what ever was

    def stats(self) -> TierStats:
        """Counters now. `queued_*` is what the device has not yet reported done."""
        with self._lock:
            self._bury()
            self._writes.poll()
            self._reads.poll()
            return TierStats(
                capacity_bytes=self._slab.capacity_bytes,
                used_bytes=self._slab.used_bytes,
                used_peak_bytes=self._slab.used_peak_bytes,
                written_bytes=self._writes.total_bytes,
                read_bytes=self._reads.total_bytes,
                queued_write_bytes=self._writes.queued_bytes,
                queued_read_bytes=self._reads.queued_bytes,
                writes=self._writes.count,
                reads=self._reads.count,
            )

    def close(self) -> None:
        """Waits for copies under way and gives the slab back. Slots are lost, reloaded blocks stay good (rule 10)."""
        with self._lock:
            if self._closed:
                return
            self._closed = True  # nothing is queued from here on
            last_write, last_read = self._writes.last, self._reads.last
        if last_write is not None:
            self._synchronize("close.write_done", last_write)
        if last_read is not None:
            self._synchronize("close.read_done", last_read)
        self._streams.host_free(self._memory)

    # ---- the three ways to order work; every call names its site ---------------------------------------------------

    def _wait(self, site: str, stream: Stream, event: Event) -> None:
        """`stream` waits for `event`. `site` names the call for the mutation tests and costs nothing."""
        self._streams.wait(stream, event)

    def _free_after(self, site: str, block: Block, events: Sequence[Event], home: Stream | None) -> None:
        """Defers reuse of the block's memory until `events` have passed."""
        self._streams.free(block, events, home)

    def _synchronize(self, site: str, event: Event) -> None:
        """The calling thread waits for `event`; never under the lock."""
        self._streams.synchronize(event)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this host tier is closed")

    @staticmethod
    def _check_held(slot: Slot) -> None:
        if slot.freed:
            raise ValueError(f"the slot at offset {slot.offset_bytes} was freed")


if TYPE_CHECKING:
    _implements: type[BlockTier[Slot]] = HostTier
