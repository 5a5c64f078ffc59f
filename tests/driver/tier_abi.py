"""The part of ``memmgr/device.h`` that the tests of the host tier use, by ctypes."""

from __future__ import annotations

import ctypes as c
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

from core_abi import TierStats

_P, _U64 = c.c_void_p, c.c_uint64
_SIGNATURES = {
    "mm_driver_load": (_P, [c.c_char_p, c.c_char_p, c.c_size_t]),
    "mm_device_open": (_P, [_P, c.c_int, _U64, c.c_int, c.c_char_p, c.c_size_t]),
    "mm_device_close": (c.c_int, [_P]),
    "mm_device_alloc": (_P, [_P, c.c_size_t, _P]),
    "mm_device_free": (None, [_P, _P]),
    "mm_device_used": (None, [_P, _P, _P]),
    "mm_device_copy": (c.c_int, [_P, _P, _P, c.c_size_t, _P]),
    "mm_device_fetch": (c.c_int, [_P, _P, _P, c.c_size_t, _P]),
    "mm_device_mark": (None, [_P, _P]),
    "mm_device_clock": (_P, []),
    "mm_device_note_use": (None, [_P, _P, _U64]),
    "mm_device_defer_waits": (c.c_int, [c.c_int]),
    "mm_device_trim": (_U64, [_P, _U64]),
    "mm_device_wait_block": (c.c_int, [_P, _P, _P]),
    "mm_device_sum": (c.c_int, [_P, _P, c.c_size_t, _P, c.POINTER(_U64)]),
    "mm_device_sum_begin": (c.c_int, [_P, _P, c.c_size_t, _P, c.POINTER(_P)]),
    "mm_device_sum_end": (c.c_int, [_P, _P, c.POINTER(_U64)]),
    "mm_device_lend": (None, [_P, _P, _U64, _P]),
    "mm_device_lent_ends": (None, [_P, _P]),
    "mm_tier_open": (_P, [c.c_char_p, _U64, _U64, c.c_int, c.c_char_p, c.c_size_t]),
    "mm_tier_open_host": (_P, [_P, _U64, c.c_char_p, c.c_size_t]),
    "mm_tier_open_ladder": (_P, [_P, _U64, c.c_char_p, _U64, _U64, c.c_int, c.c_char_p, c.c_size_t]),
    "mm_tier_close": (None, [_P]),
    "mm_tier_write": (c.c_int64, [_P, _P, _U64]),
    "mm_tier_write_now": (c.c_int64, [_P, _P, _U64]),
    "mm_tier_read": (c.c_int, [_P, c.c_int64, _P]),
    "mm_tier_read_now": (c.c_int, [_P, c.c_int64, _P]),
    "mm_tier_use": (c.c_int, [_P, c.c_int64, _P]),
    "mm_tier_bytes": (_P, [_P, c.c_int64]),
    "mm_tier_poll": (c.c_int, [_P, c.c_int64]),
    "mm_tier_wait": (c.c_int, [_P, c.c_int64]),
    "mm_tier_free": (None, [_P, c.c_int64]),
    "mm_tier_stats_get": (None, [_P, c.POINTER(TierStats)]),
    "mm_tier_inject": (None, [_P, c.c_int, c.c_int, c.c_int, c.c_int]),
    "mm_test_leave_out": (c.c_int, [c.c_char_p]),
    "mm_test_wait_names": (c.c_char_p, []),
    "mm_test_lock_pieces": (c.c_int, [_U64, _U64, c.c_int]),
}
UNLIMITED = 2**64 - 1
MAPPED, PLAIN = 0, 1


def load(path: Path) -> c.CDLL:
    library = c.CDLL(os.fspath(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Device:
    """A device of the double. Blocks are addresses; a stream is a handle, None the default one."""

    def __init__(self, library: c.CDLL, driver_path: Path, ordinal: int = 0, budget: int = 64 << 20):
        self.library = library
        text = c.create_string_buffer(300)
        driver = library.mm_driver_load(os.fsencode(driver_path), text, len(text))
        assert driver, text.value
        self.handle = library.mm_device_open(driver, ordinal, budget, MAPPED, text, len(text))
        assert self.handle, text.value
        self.live: set[int] = set()

    def alloc(self, size: int, stream: int | None) -> int:
        address = self.library.mm_device_alloc(self.handle, size, stream)
        assert address
        self.live.add(address)
        return address

    def free(self, address: int) -> None:
        self.live.remove(address)
        self.library.mm_device_free(self.handle, address)

    def used(self, address: int, stream: int | None) -> None:
        self.library.mm_device_used(self.handle, address, stream)

    def close(self) -> int:
        return self.library.mm_device_close(self.handle)


class HostTier:
    """``tier.write(address, size)`` and so on are ``mm_tier_*``. With a folder there is a file of ``below`` bytes there."""

    def __init__(self, device: Device, capacity: int, folder: Path | None = None, below: int = 0, throttle: int = 0):
        self.library = device.library
        text = c.create_string_buffer(300)
        if folder is None:
            self.handle = self.library.mm_tier_open_host(device.handle, capacity, text, len(text))
        else:
            name = os.fsencode(folder)
            self.handle = self.library.mm_tier_open_ladder(
                device.handle, capacity, name, below, throttle, 2, text, len(text)
            )
        if not self.handle:
            raise OSError(text.value.decode())

    def __getattr__(self, name: str):
        function = getattr(self.library, f"mm_tier_{name}")
        return lambda *arguments: function(self.handle, *arguments)

    def close(self) -> None:
        self.library.mm_tier_close(self.handle)

    @property
    def stats(self) -> TierStats:
        out = TierStats()
        self.library.mm_tier_stats_get(self.handle, out)
        return out
