"""The lower tier of the accounting path: the core library's file tier through ctypes, else one in plain Python.

Both have the methods of `allocator/include/memmgr/core.h`: slots are numbers from 0, errors are negative errnos.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
import threading
import time
from collections import deque
from typing import Any, Protocol

import torch

from . import _shim

_data_ptr: Any = torch._C.StorageBase.data_ptr  # type: ignore[attr-defined]
STATS = (
    "capacity_bytes used_bytes used_peak_bytes file_bytes written_bytes read_bytes write_nanoseconds read_nanoseconds "
    "queued_write_bytes queued_read_bytes writes reads errors"
).split()


class Tier(Protocol):
    """A place below the device. What is copied is an address, or, for a tier that is below a device, a storage."""

    ordered: bool  # copies are in the order of the device's streams, so that a slot is as good as written at once

    def write(self, src: Any, size: int) -> int: ...
    def write_now(self, src: Any, size: int) -> int: ...
    def read(self, slot: int, dst: Any) -> int: ...
    def read_now(self, slot: int, dst: Any) -> int: ...
    def poll(self, slot: int) -> int: ...
    def wait(self, slot: int) -> int: ...
    def use(self, slot: int) -> int: ...
    def free(self, slot: int) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def inject(self, write_errno: int, after_writes: int, read_errno: int, after_reads: int) -> None: ...
    def close(self) -> None: ...


class Faults:
    """Errors that tests ask for: the n-th transfer of a kind fails."""

    def __init__(self) -> None:
        self.set(0, 0, 0, 0)

    def set(self, write_errno: int, after_writes: int, read_errno: int, after_reads: int) -> None:
        """0: none."""
        self._faults = {"write": (write_errno, after_writes), "read": (read_errno, after_reads)}

    def next(self, kind: str) -> int:
        """The errno of the transfer that begins, or 0."""
        code, left = self._faults[kind]
        if not code:
            return 0
        self._faults[kind] = (code, left - 1) if left > 1 else (0, 0)
        return code if left <= 1 else 0


class _Stats(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_uint64) for name in STATS), ("direct", ctypes.c_int32)]


class CoreTier:
    """The core's tier: its own threads, large aligned requests. Calls release the GIL."""

    ordered = False

    def __init__(self, folder: str, capacity: int, rate: int, workers: int) -> None:
        lib = self._lib = ctypes.CDLL(str(_shim.core_library()))
        p, u64, i64, i = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int
        for name, result, arguments in (
            ("open", p, [ctypes.c_char_p, u64, u64, i, ctypes.c_char_p, ctypes.c_size_t]),
            ("close", None, [p]),
            ("write", i64, [p, p, u64]),
            ("write_now", i64, [p, p, u64]),
            ("read", i, [p, i64, p]),
            ("read_now", i, [p, i64, p]),
            ("poll", i, [p, i64]),
            ("wait", i, [p, i64]),
            ("free", None, [p, i64]),
            ("stats_get", None, [p, ctypes.POINTER(_Stats)]),
            ("inject", None, [p, i, i, i, i]),
        ):
            function = getattr(lib, f"mm_tier_{name}")
            function.restype, function.argtypes = result, arguments
        error = ctypes.create_string_buffer(256)
        self._tier = lib.mm_tier_open(os.fsencode(folder), capacity, rate, workers, error, len(error))
        if not self._tier:
            raise OSError(f"memmgr: cannot open a tier file in {folder}: {error.value.decode()}")

    def write(self, src: int, size: int) -> int:
        return int(self._lib.mm_tier_write(self._tier, src, size))

    def write_now(self, src: int, size: int) -> int:
        return int(self._lib.mm_tier_write_now(self._tier, src, size))

    def read(self, slot: int, dst: int) -> int:
        return int(self._lib.mm_tier_read(self._tier, slot, dst))

    def read_now(self, slot: int, dst: int) -> int:
        return int(self._lib.mm_tier_read_now(self._tier, slot, dst))

    def poll(self, slot: int) -> int:
        return int(self._lib.mm_tier_poll(self._tier, slot))

    def wait(self, slot: int) -> int:
        return int(self._lib.mm_tier_wait(self._tier, slot))

    use = wait

    def free(self, slot: int) -> None:
        self._lib.mm_tier_free(self._tier, slot)

    def stats(self) -> dict[str, int]:
        found = _Stats()
        self._lib.mm_tier_stats_get(self._tier, ctypes.byref(found))
        return {name: int(getattr(found, name)) for name, *_ in _Stats._fields_}

    def inject(self, write_errno: int, after_writes: int, read_errno: int, after_reads: int) -> None:
        self._lib.mm_tier_inject(self._tier, write_errno, after_writes, read_errno, after_reads)

    def close(self) -> None:
        self._lib.mm_tier_close(self._tier)


class _Slot:
    __slots__ = ("offset", "pending", "result", "size")

    def __init__(self, offset: int, size: int) -> None:
        self.offset, self.size = offset, size
        self.pending = 0
        self.result = 1  # of the last transfer: 1, or a negative errno


class FileTier:
    """One unlinked file of mode 0600 and one thread that copies in the order of the requests."""

    ALIGN = 4096
    ordered = False

    def __init__(self, folder: str, capacity: int, rate: int, workers: int) -> None:
        del workers
        try:
            self._file, path = tempfile.mkstemp(prefix="memmgr-", dir=folder)  # mode 0600
            os.unlink(path)
        except OSError as error:
            raise OSError(f"memmgr: cannot open a tier file in {folder}: {error.strerror}") from error
        self._capacity, self._rate = capacity, rate
        self._slots: dict[int, _Slot] = {}
        self._free: list[tuple[int, int]] = []  # (offset, bytes), by address
        self._end = 0
        self._next = 0
        self._stats = dict.fromkeys([*STATS, "direct"], 0)
        self._stats["capacity_bytes"] = capacity
        self._faults = Faults()
        self._queue: deque[tuple[str, _Slot, int]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._worker = threading.Thread(target=self._work, name="memmgr-tier", daemon=True)
        self._worker.memmgr_own = True  # type: ignore[attr-defined]
        self._worker.start()

    # -- room in the file --

    def _take(self, size: int) -> _Slot | int:
        rounded = -(-size // self.ALIGN) * self.ALIGN
        if self._capacity and self._stats["used_bytes"] + rounded > self._capacity:
            return -errno.ENOSPC
        for i, (offset, room) in enumerate(self._free):
            if room >= rounded:
                self._free[i : i + 1] = [(offset + rounded, room - rounded)] if room > rounded else []
                break
        else:
            offset, self._end = self._end, self._end + rounded
        self._stats["used_bytes"] += rounded
        self._stats["used_peak_bytes"] = max(self._stats["used_peak_bytes"], self._stats["used_bytes"])
        return _Slot(offset, size)

    def _give_back(self, slot: _Slot) -> None:
        rounded = -(-slot.size // self.ALIGN) * self.ALIGN
        self._stats["used_bytes"] -= rounded
        pieces = sorted([*self._free, (slot.offset, rounded)])
        merged: list[tuple[int, int]] = []
        for offset, room in pieces:
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((offset, room))
        if merged and sum(merged[-1]) == self._end:
            self._end = merged.pop()[0]
        self._free = merged

    # -- transfers --

    def _transfer(self, kind: str, slot: _Slot, address: int) -> int:
        begun = time.monotonic_ns()
        try:
            code = self._faults.next(kind)
            if code:
                raise OSError(code, os.strerror(code))
            memory = memoryview((ctypes.c_char * slot.size).from_address(address)).cast("B")
            done = 0
            while done < slot.size:
                part = memory[done : done + (8 << 20)]
                if kind == "write":
                    count = os.pwrite(self._file, part, slot.offset + done)
                else:
                    count = os.preadv(self._file, [part], slot.offset + done)
                if count <= 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                done += count
        except OSError as error:
            self._stats["errors"] += 1
            return -(error.errno or errno.EIO)
        spent = time.monotonic_ns() - begun
        if self._rate and (owed := slot.size * 10**9 // self._rate - spent) > 0:
            time.sleep(owed * 1e-9)
            spent += owed
        word = "written" if kind == "write" else "read"
        self._stats[f"{word}_bytes"] += slot.size
        self._stats[f"{kind}s"] += 1
        self._stats[f"{kind}_nanoseconds"] += spent
        return 1

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if self._closing:
                    return
                kind, slot, address = self._queue.popleft()
            result = self._transfer(kind, slot, address)
            with self._changed:
                self._finish(kind, slot, result)

    def _finish(self, kind: str, slot: _Slot, result: int) -> None:
        slot.pending -= 1
        slot.result = result
        self._stats[f"queued_{kind}_bytes"] -= slot.size
        self._changed.notify_all()

    def _enqueue(self, kind: str, slot: _Slot, address: int) -> None:
        slot.pending += 1
        self._stats[f"queued_{kind}_bytes"] += slot.size
        self._queue.append((kind, slot, address))
        self._changed.notify_all()

    # -- the interface --

    def write(self, src: int, size: int) -> int:
        with self._changed:
            slot = self._take(size)
            if isinstance(slot, int):
                return slot
            number, self._next = self._next, self._next + 1
            self._slots[number] = slot
            self._enqueue("write", slot, src)
            return number

    def write_now(self, src: int, size: int) -> int:
        with self._changed:
            slot = self._take(size)
        if isinstance(slot, int):
            return slot
        result = self._transfer("write", slot, src)
        with self._changed:
            if result < 0:
                self._give_back(slot)
                return result
            number, self._next = self._next, self._next + 1
            self._slots[number] = slot
            return number

    def read(self, slot: int, dst: int) -> int:
        with self._changed:
            self._enqueue("read", self._slots[slot], dst)
        return 0

    def read_now(self, slot: int, dst: int) -> int:
        state = self.wait(slot)
        return state if state < 0 else min(0, self._transfer("read", self._slots[slot], dst))

    def poll(self, slot: int) -> int:
        found = self._slots[slot]
        return 0 if found.pending else found.result

    def wait(self, slot: int) -> int:
        with self._changed:
            found = self._slots[slot]
            while found.pending and not self._closing:
                self._changed.wait()
            return min(0, found.result)

    use = wait

    def free(self, slot: int) -> None:
        with self._changed:
            found = self._slots.get(slot)
            if found is None:
                return
            for item in [item for item in self._queue if item[1] is found]:
                self._queue.remove(item)
                self._finish(item[0], found, -errno.ECANCELED)
            while found.pending and not self._closing:
                self._changed.wait()
            del self._slots[slot]
            self._give_back(found)

    def stats(self) -> dict[str, int]:
        with self._changed:
            return {**self._stats, "file_bytes": self._end}

    def inject(self, write_errno: int, after_writes: int, read_errno: int, after_reads: int) -> None:
        self._faults.set(write_errno, after_writes, read_errno, after_reads)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._worker.join()
        os.close(self._file)


def open_tier(folder: str, capacity: int, rate: int, workers: int) -> Tier:
    """The core's tier, or the Python one where the core library is missing.

    Raises:
        OSError: no file can be made in `folder`.
    """
    try:
        _shim.core_library()
    except _shim.NoShim:
        return FileTier(folder, capacity, rate, workers)
    return CoreTier(folder, capacity, rate, workers)


def address(storage: Any) -> int:
    """Where a storage's bytes are. Not through the public method, which the guards watch."""
    return int(_data_ptr(storage))
