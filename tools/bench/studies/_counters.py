"""Counters of the processor for one thread: cycles and instructions in user mode, by the kernel's `perf_event_open`.

A clock on a shared machine is known to a percent; instructions of one thread are the same from run to run, and its cycles
leave out all the time in which another thread had the core. Linux on x86-64 and arm64, where the kernel permits it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_CALL = {"x86_64": 298, "aarch64": 241}
_HARDWARE, _SIZE = 0, 128
_USER_ONLY = 1 << 5 | 1 << 6  # exclude_kernel, exclude_hv
EVENTS = {"cycles": 0, "instructions": 1}  # PERF_COUNT_HW_*


class NoCounter(OSError):
    """The kernel or the machine has none for us."""


class Counter:
    """Counts one event for the thread that makes it, from then on."""

    def __init__(self, event: str) -> None:
        """Raises `NoCounter`."""
        call = _CALL.get(platform.machine())
        if platform.system() != "Linux" or call is None:
            raise NoCounter(f"no processor counters on {platform.system()} {platform.machine()}")
        attributes = bytearray(_SIZE)
        struct.pack_into("IIQ", attributes, 0, _HARDWARE, _SIZE, EVENTS[event])
        struct.pack_into("Q", attributes, 40, _USER_ONLY)
        libc = ctypes.CDLL(None, use_errno=True)
        buffer = (ctypes.c_char * _SIZE).from_buffer(attributes)
        self._fd = libc.syscall(call, buffer, 0, -1, -1, 0)
        if self._fd < 0:
            why = ctypes.get_errno()
            raise NoCounter(why, f"no counter of {event}: {os.strerror(why)}")

    def read(self) -> int:
        """So many since it was made."""
        return int.from_bytes(os.read(self._fd, 8), "little")

    def close(self) -> None:
        """Gives it back."""
        os.close(self._fd)


def counters() -> dict[str, Counter]:
    """All of them for this thread, by event; empty where there are none."""
    try:
        return {event: Counter(event) for event in EVENTS}
    except NoCounter:
        return {}
