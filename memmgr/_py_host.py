"""The tier below a device on the accounting path: host memory, page-locked where the device can, copied to by torch.

The methods are those of `_py_tier.Tier`, but what is copied are storages. A copy is queued on one of two side streams and
nobody waits for it on the CPU; each wait between streams is a rule of `_py_streams.RULES`.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from typing import Any

import torch

from ._py_streams import Streams, mark
from ._py_tier import STATS, Faults
from ._py_versions import bytes_of, quiet

CHUNK_BYTES = 64 << 20  # page-locked at a time: that is slow, and torch rounds up to a power of two
ALIGN = 512


class Room:
    """First fit in a range of addresses."""

    def __init__(self, size: int) -> None:
        self._free = [(0, size)]

    def take(self, size: int) -> int | None:
        """An offset, or None."""
        for i, (offset, room) in enumerate(self._free):
            if room >= size:
                self._free[i : i + 1] = [(offset + size, room - size)] if room > size else []
                return offset
        return None

    def give_back(self, offset: int, size: int) -> None:
        """What `take` gave."""
        merged: list[tuple[int, int]] = []
        for start, room in sorted([*self._free, (offset, size)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((start, room))
        self._free = merged


class _Slot:
    __slots__ = ("chunk", "host", "offset", "read", "room", "size", "written")

    def __init__(self, chunk: int, offset: int, room: int, host: torch.Tensor) -> None:
        self.chunk, self.offset, self.room, self.size = chunk, offset, room, host.numel()
        self.host = host
        self.written: Any = None  # events
        self.read: Any = None


class HostTier:
    """At most `capacity` bytes of host memory, taken as they are needed."""

    ordered = True  # copies are in stream order, so nobody has to wait until one is over

    def __init__(self, device: torch.device, capacity: int, streams: Streams) -> None:
        self._device, self._capacity, self._streams = device, capacity, streams
        self._lock = threading.RLock()
        self._chunks: list[tuple[torch.Tensor, Room]] = []
        self._taken = 0
        self._locks_pages = True
        self._slots: dict[int, _Slot] = {}
        self._next = 0
        self._stats = dict.fromkeys([*STATS, "direct"], 0)
        self._stats["capacity_bytes"] = capacity
        self._faults = Faults()
        self._write_stream, self._read_stream = streams.new(), streams.new()
        self._queued: dict[str, deque[tuple[Any, int]]] = {"write": deque(), "read": deque()}

    # -- room --

    def _host(self, size: int) -> torch.Tensor:
        silence = quiet()
        try:
            if self._locks_pages:
                try:
                    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
                except (RuntimeError, NotImplementedError):
                    self._locks_pages = False  # then copies wait for their end
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        finally:
            del silence

    def _grow(self, size: int) -> bool:
        """One more chunk for so many bytes."""
        left = self._capacity - self._taken
        most = 1 << (left.bit_length() - 1) if left > 0 else 0
        chunk = min(most, max(CHUNK_BYTES, 1 << (size - 1).bit_length()))
        if chunk < size:
            return False
        try:
            self._chunks.append((self._host(chunk), Room(chunk)))
        except RuntimeError:  # the machine has none left
            return False
        self._taken += chunk
        self._stats["file_bytes"] = self._taken
        return True

    def _take(self, size: int) -> _Slot | int:
        rounded = -(-size // ALIGN) * ALIGN
        first = 0
        while True:
            for i, (host, room) in enumerate(self._chunks[first:], first):
                offset = room.take(rounded)
                if offset is not None:
                    self._stats["used_bytes"] += rounded
                    self._stats["used_peak_bytes"] = max(self._stats["used_peak_bytes"], self._stats["used_bytes"])
                    return _Slot(i, offset, rounded, host[offset : offset + size])
            first = len(self._chunks)
            if not self._grow(rounded):
                return -errno.ENOSPC

    # -- copies --

    def _copy(self, kind: str, stream: Any, to: torch.Tensor, of: torch.Tensor) -> Any:
        """Queues it; returns the event of its end."""
        begun = time.monotonic_ns()
        silence = quiet()
        with stream, torch.no_grad():
            to.copy_(of, non_blocking=self._locks_pages)
        del silence
        event = stream.record_event()
        word = "written" if kind == "write" else "read"
        self._stats[f"{word}_bytes"] += to.numel()
        self._stats[f"{kind}s"] += 1
        self._stats[f"{kind}_nanoseconds"] += time.monotonic_ns() - begun
        self._queued[kind].append((event, to.numel()))
        return event

    def _fails(self, kind: str) -> int:
        code = self._faults.next(kind)
        self._stats["errors"] += bool(code)
        return -code

    def write(self, src: Any, size: int) -> int:
        """Queues a copy of `src`, which nobody can write any more; it may be freed at once."""
        streams = self._streams
        with self._lock:
            if code := self._fails("write"):
                return code
            silence = quiet()
            slot = self._take(size)
            del silence
            if isinstance(slot, int):
                return slot
            if streams.keeps("offload.behind"):
                streams.behind_all(self._write_stream)
            slot.written = self._copy("write", self._write_stream, slot.host, bytes_of(src))
            if streams.keeps("offload.source"):
                mark(src, [self._write_stream])
            number, self._next = self._next, self._next + 1
            self._slots[number] = slot
            return number

    write_now = write

    def read(self, slot: int, dst: Any) -> int:
        """Queues a copy to `dst`, which the current stream has just been given; `use` before anybody reads it."""
        streams = self._streams
        with self._lock:
            if code := self._fails("read"):
                return code
            found = self._slots[slot]
            if streams.keeps("reload.target"):
                self._read_stream.wait_event(streams.current().record_event())
            if streams.keeps("reload.written"):
                self._read_stream.wait_event(found.written)
            found.read = self._copy("read", self._read_stream, bytes_of(dst), found.host)
            if streams.keeps("reload.filling"):
                mark(dst, [self._read_stream])
            return 0

    def use(self, slot: int) -> int:
        """The current stream waits for the last read."""
        found = self._slots[slot]
        if self._streams.keeps("reload.use"):
            self._streams.current().wait_event(found.read)
        return 0

    def read_now(self, slot: int, dst: Any) -> int:
        return self.read(slot, dst) or self.use(slot)

    def poll(self, slot: int) -> int:
        found = self._slots[slot]
        if self._streams.quiet:
            return 0
        return int(all(event is None or event.query() for event in (found.written, found.read)))

    def wait(self, slot: int) -> int:
        found = self._slots[slot]
        for event in (found.written, found.read):
            if event is not None:
                event.synchronize()
        return 0

    def free(self, slot: int) -> None:
        with self._lock:
            found = self._slots.pop(slot, None)
            if found is None:
                return
            # The next one to be copied there is on the write stream, as this one was, and behind all streams, one of which
            # waits for the last read, if anybody wants what it read.
            self._chunks[found.chunk][1].give_back(found.offset, found.room)
            self._stats["used_bytes"] -= found.room

    def stats(self) -> dict[str, int]:
        with self._lock:
            for kind, queue in self._queued.items():
                while queue and not self._streams.quiet and queue[0][0].query():
                    queue.popleft()
                self._stats[f"queued_{kind}_bytes"] = sum(size for _, size in queue)
            return dict(self._stats)

    def inject(self, write_errno: int, after_writes: int, read_errno: int, after_reads: int) -> None:
        self._faults.set(write_errno, after_writes, read_errno, after_reads)

    def close(self) -> None:
        for stream in (self._write_stream, self._read_stream):
            stream.synchronize()
        self._slots.clear()
        self._chunks.clear()
