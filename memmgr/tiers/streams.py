"""The seams of the lower tiers: what a tier offers, and what the host tier needs from an accelerator.

A tier is a place below the device where bytes are parked. Two kinds share one shape (`Tier`): the disk tier moves bytes
at raw addresses (`ByteTier`, the Python face of `mm_tier_*` in allocator/include/memmgr/core.h), the host tier moves
device blocks in stream order (`BlockTier`, host.py).

`StreamApi` is everything that the host tier knows about an accelerator. Two classes implement it: cuda_streams.py, and
the double in tests/streams/double.py, which runs copies late and in random order so that a missing wait gives wrong
bytes on a machine without a GPU.

Words:
    stream   a queue of device work; work on one stream runs in order, streams run beside each other
    event    a mark that `record` puts into a stream; it has *passed* once all earlier work of that stream is done
    wait     makes a stream hold its later work until an event has passed; the CPU does not wait
    block    device memory of one cell, held by reference: the memory is given back when the last one is dropped
    home     the stream in whose order a block was allocated; the allocator reuses the memory in this stream's order
    slab     the page-locked host memory of the tier, one allocation
    slot     a piece of the slab that holds the bytes of one cell
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

# Opaque here: each belongs to the StreamApi that made it, is only compared by identity and handed back to it. (Four
# type parameters on every class would say the same in more words.)
Stream: TypeAlias = Any
Event: TypeAlias = Any
Block: TypeAlias = Any
HostMemory: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class HostRange:
    """A place in host memory that a copy can name.

    Attributes:
        memory: what `StreamApi.host_allocate` returned.
        offset_bytes: from its start.
    """

    memory: HostMemory
    offset_bytes: int


class StreamApi(Protocol):
    """Streams, events, device blocks and page-locked memory of one device.

    Every method returns without waiting for the device, except `synchronize`, `host_allocate` and `host_free`. All may
    be called from any thread.

    Known limitations: one stream per direction. The host tier relies on that: two writes into the slab are in order
    because both are on `write_stream`, and a later read's event covers all earlier reads.
    """

    @property
    def write_stream(self) -> Stream:
        """The side stream of all copies from device to host."""
        ...

    @property
    def read_stream(self) -> Stream:
        """The side stream of all copies from host to device."""
        ...

    def current_stream(self) -> Stream:
        """The stream that the calling thread's ops run on."""
        ...

    def record(self, stream: Stream) -> Event:
        """A new event behind all work that is on `stream` now. Events are never recorded a second time."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Work put on `stream` from now on starts after `event` has passed."""
        ...

    def query(self, event: Event) -> bool:
        """Whether `event` has passed."""
        ...

    def synchronize(self, event: Event) -> None:
        """Blocks the calling thread until `event` has passed; other threads go on."""
        ...

    def allocate(self, nbytes: int, stream: Stream) -> Block:
        """A block of at least `nbytes` bytes whose home is `stream`: work on `stream` may use it from now on.

        Earlier users of the same memory may still be running *before* this point of `stream`; work on any other stream
        must wait for an event recorded on `stream` after this call. May reclaim, and so may call back into memmgr: the
        caller holds no lock.

        Raises:
            torch.OutOfMemoryError: there is no room.
        """
        ...

    def free(self, block: Block, after: Sequence[Event], home: Stream | None = None) -> None:
        """Gives up one reference to `block` and keeps its memory from being reused before all of `after` have passed.

        Others may hold the block still; the memory is reused when the last reference is gone *and* the events have
        passed, and then in the order of its home stream, so that uses on the home stream need no event. Never
        `record_stream`: that defers by polling at a time of the allocator's choosing, and fragments.

        Args:
            block: what `allocate` gave, or the storage of a cell.
            after: events of the streams other than home that use or used the block.
            home: the block's home stream if the caller knows it; lets `settle` give the block back early.
        """
        ...

    def settle(self, stream: Stream) -> None:
        """Makes blocks with home `stream` that `free` still defers reusable now: `stream` waits for their events.

        What reclaim calls when memory is needed at once: the device may stall, the CPU does not (design, "Clean and
        dirty"). An implementation whose allocator is stream-ordered by itself does nothing here.
        """
        ...

    def copy_async(self, dst: Block | HostRange, src: Block | HostRange, nbytes: int, stream: Stream) -> None:
        """Queues a copy of the first `nbytes` bytes of `src` to `dst` on `stream`; one of the two is a `HostRange`.

        Raises:
            ValueError: the copy does not fit into `dst` or `src`. Nothing is ever resized (rule 3).
        """
        ...

    def host_allocate(self, nbytes: int) -> HostMemory:
        """Page-locked host memory, the target and source of asynchronous copies. Slow: once per tier."""
        ...

    def host_free(self, memory: HostMemory) -> None:
        """Gives page-locked memory back. No copy that names it may be under way."""
        ...

    def host_address(self, memory: HostMemory) -> int:
        """The address of its first byte."""
        ...


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counters of a tier; the same names as `mm_tier_stats`, all in bytes or counts since the tier was opened.

    Attributes:
        capacity_bytes: room of the tier.
        used_bytes: slots that are held, as rounded by the tier.
        used_peak_bytes: high-water mark of `used_bytes`.
        written_bytes: payload of all writes accepted.
        read_bytes: payload of all reads accepted.
        queued_write_bytes: payload of writes that are not done yet: the queue that a Director sees on the link.
        queued_read_bytes: the same for reads.
        writes: number of writes.
        reads: number of reads.
    """

    capacity_bytes: int
    used_bytes: int
    used_peak_bytes: int
    written_bytes: int
    read_bytes: int
    queued_write_bytes: int
    queued_read_bytes: int
    writes: int
    reads: int


SlotT = TypeVar("SlotT")
SlotT_contra = TypeVar("SlotT_contra", contravariant=True)


class Tier(Protocol[SlotT_contra]):
    """What both kinds of tier have in common: the life of a slot after it was written."""

    def poll(self, slot: SlotT_contra) -> bool:
        """Whether nothing is under way on this slot. Raises OSError when the last operation failed (disk)."""
        ...

    def wait(self, slot: SlotT_contra) -> None:
        """Blocks the calling thread until nothing is under way on this slot. Raises as `poll` does."""
        ...

    def free(self, slot: SlotT_contra) -> None:
        """Gives the slot back, whatever is under way on it; the tier sees to it that its room is reused safely."""
        ...

    def stats(self) -> TierStats: ...

    def close(self) -> None:
        """Waits for what is under way and gives everything back. May be called twice."""
        ...


class ByteTier(Tier[SlotT], Protocol[SlotT]):
    """A tier that moves bytes at raw addresses: the disk tier on the CPU device."""

    def write(self, address: int, nbytes: int) -> SlotT | None:
        """Takes room and queues the write; the bytes must stay valid until it is done. None: no room, nothing taken."""
        ...

    def read(self, slot: SlotT, address: int) -> None:
        """Queues a read of the slot to `address`; done when `poll` says so."""
        ...


class Reload(NamedTuple):
    """A block that is being filled from a lower tier.

    Attributes:
        block: the device memory, valid at once as an object, its bytes only behind `ready`.
        ready: passes when the bytes are there. It is the event of the block's last write from now on.
    """

    block: Block
    ready: Event


class BlockTier(Tier[SlotT], Protocol[SlotT]):
    """A tier that moves device blocks in stream order: the host tier of an accelerator."""

    def write(
        self,
        block: Block,
        nbytes: int,
        last_write: Event,
        touched: Sequence[Event] = (),
        home: Stream | None = None,
    ) -> SlotT | None:
        """Takes room and queues the copy behind `last_write` and `touched`. None: no room, nothing taken."""
        ...

    def read(self, slot: SlotT, consumer: Stream | None = None) -> Reload:
        """Allocates a block in the order of `consumer` and queues the copy that fills it."""
        ...

    def use(self, reload: Reload, stream: Stream) -> None:
        """Work put on `stream` from now on sees the reloaded bytes."""
        ...
