"""A device's memory for the tests, by ctypes. Mirrors ``memmgr/device.h``; the arena's part is ``tests/core/core_abi``."""

from __future__ import annotations

import ctypes as c
import importlib.util
from pathlib import Path

_found = importlib.util.spec_from_file_location("memmgr_core_abi", Path(__file__).parents[1] / "core" / "core_abi.py")
assert _found is not None
assert _found.loader is not None
core_abi = importlib.util.module_from_spec(_found)
_found.loader.exec_module(core_abi)

MAPPED, PLAIN = 0, 1
UNLIMITED = core_abi.UNLIMITED
MIB = core_abi.MIB

_P = c.c_void_p


class DeviceStats(c.Structure):
    _fields_ = [
        (name, c.c_uint64)
        for name in (
            "waits cross_reuses synchronizations maps unmaps map_nanoseconds unmap_nanoseconds streams pools driver_errors"
        ).split()
    ]


class PlacesStats(c.Structure):
    _fields_ = [
        (name, c.c_uint64)
        for name in "rows frames computations asked_bytes displaced_bytes lacking_periods lacking_bytes".split()
    ]


_SIGNATURES = {
    "mm_places_make": (_P, []),
    "mm_places_end": (None, [_P, _P]),
    "mm_places_stats_get": (None, [_P, c.POINTER(PlacesStats)]),
    "mm_arena_follow": (None, [_P, _P]),
    "mm_arena_at": (None, [_P, c.c_uint32]),
    "mm_driver_load": (_P, [c.c_char_p, c.c_char_p, c.c_size_t]),
    "mm_device_open": (_P, [_P, c.c_int, c.c_uint64, c.c_int, c.c_char_p, c.c_size_t]),
    "mm_device_close": (c.c_int, [_P]),
    "mm_device_arena": (_P, [_P]),
    "mm_device_ordinal": (c.c_int, [_P]),
    "mm_device_memory": (c.c_int, [_P, c.POINTER(c.c_uint64), c.POINTER(c.c_uint64)]),
    "mm_device_broken": (c.c_int, [_P, c.c_char_p, c.c_size_t]),
    "mm_device_allow": (c.c_int, [_P, c.c_int]),
    "mm_device_alloc": (_P, [_P, c.c_size_t, _P]),
    "mm_device_try_alloc": (_P, [_P, c.c_size_t, c.c_uint64, _P]),
    "mm_device_free": (None, [_P, _P]),
    "mm_device_mark": (None, [_P, _P]),
    "mm_device_used": (None, [_P, _P, _P]),
    "mm_device_home": (_P, [_P, _P]),
    "mm_device_wait_block": (c.c_int, [_P, _P, _P]),
    "mm_device_lend": (None, [_P, _P, c.c_uint64, _P]),
    "mm_device_lent_ends": (None, [_P, _P]),
    "mm_device_forget_lent": (None, [_P]),
    "mm_device_synchronize": (c.c_int, [_P]),
    "mm_device_trim": (c.c_uint64, [_P, c.c_uint64]),
    "mm_device_copy": (c.c_int, [_P, _P, _P, c.c_size_t, _P]),
    "mm_device_fetch": (c.c_int, [_P, _P, _P, c.c_size_t, _P]),
    "mm_device_has_kernels": (c.c_int, [_P]),
    "mm_device_delay": (c.c_int, [_P, c.c_uint64, _P]),
    "mm_device_fill": (c.c_int, [_P, _P, c.c_int, c.c_size_t, _P]),
    "mm_device_compare": (c.c_int, [_P, _P, _P, c.c_size_t, c.c_int, _P, c.POINTER(c.c_uint)]),
    "mm_device_sum": (c.c_int, [_P, _P, c.c_size_t, _P, c.POINTER(c.c_uint64)]),
    "mm_device_sum_begin": (c.c_int, [_P, _P, c.c_size_t, _P, c.POINTER(_P)]),
    "mm_device_sum_end": (c.c_int, [_P, _P, c.POINTER(c.c_uint64)]),
    "mm_device_sum_drop": (None, [_P, _P]),
    "mm_device_synchronize_stream": (c.c_int, [_P, _P]),
    "mm_device_begin_pool": (c.c_int, [_P, c.c_uint64, c.c_uint64]),
    "mm_device_end_pool": (c.c_int, [_P, c.c_uint64, c.c_uint64]),
    "mm_device_release_pool": (c.c_int, [_P, c.c_uint64, c.c_uint64]),
    "mm_device_stats_get": (None, [_P, c.POINTER(DeviceStats)]),
    "mm_test_leave_out": (c.c_int, [c.c_char_p]),
    "mm_test_wait_names": (c.c_char_p, []),
}


def load(path: Path) -> c.CDLL:
    """The core at ``path``, with the functions of both headers typed."""
    library = c.CDLL(str(path))
    for name, (result, arguments) in {**core_abi._SIGNATURES, **_SIGNATURES}.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Device:
    """A device's memory, checked after every call that changes it."""

    def __init__(self, core: c.CDLL, driver, ordinal: int = 0, budget: int = UNLIMITED, memory: int = MAPPED):
        self.core = core
        self.checks = True
        error = c.create_string_buffer(300)
        table = core.mm_driver_load(str(driver.path).encode(), error, len(error))
        assert table, error.value
        self.handle = core.mm_device_open(table, ordinal, budget, memory, error, len(error))
        if not self.handle:
            raise MemoryError(error.value.decode())
        self._reclaim = core_abi.RECLAIM_FN()

    @property
    def arena(self) -> int:
        return self.core.mm_device_arena(self.handle)

    def alloc(self, size: int, stream: int | None = None) -> int | None:
        return self._checked(self.core.mm_device_alloc(self.handle, size, stream))

    def try_alloc(self, size: int, stream: int | None = None, keep_free: int = 0) -> int | None:
        return self._checked(self.core.mm_device_try_alloc(self.handle, size, keep_free, stream))

    def free(self, address: int) -> None:
        self._checked(self.core.mm_device_free(self.handle, address))

    def used(self, address: int, stream: int | None) -> None:
        self.core.mm_device_used(self.handle, address, stream)

    def home(self, address: int) -> int | None:
        return self.core.mm_device_home(self.handle, address)

    def synchronize(self) -> int:
        return self._checked(self.core.mm_device_synchronize(self.handle))

    def trim(self, keep: int = 0) -> int:
        return self._checked(self.core.mm_device_trim(self.handle, keep))

    def set_budget(self, size: int) -> None:
        self._checked(self.core.mm_arena_set_budget(self.arena, size))

    def on_reclaim(self, function) -> None:
        """``function(need, request, attempt) -> released``."""
        self._reclaim = core_abi.RECLAIM_FN(lambda _user, need, request, attempt: function(need, request, attempt))
        self.core.mm_arena_set_reclaim(self.arena, self._reclaim, None)

    def begin_pool(self, number: int) -> int:
        return self.core.mm_device_begin_pool(self.handle, number, 0)

    def end_pool(self, number: int) -> int:
        return self.core.mm_device_end_pool(self.handle, number, 0)

    def release_pool(self, number: int) -> int:
        return self._checked(self.core.mm_device_release_pool(self.handle, number, 0))

    def close(self) -> int:
        result = self.core.mm_device_close(self.handle)
        if result == 0:
            self.handle = None
        return result

    @property
    def stats(self) -> DeviceStats:
        out = DeviceStats()
        self.core.mm_device_stats_get(self.handle, out)
        return out

    @property
    def arena_stats(self):
        out = core_abi.ArenaStats()
        self.core.mm_arena_stats_get(self.arena, out)
        return out

    def check(self) -> str:
        error = c.create_string_buffer(300)
        result = self.core.mm_arena_check(self.arena, error, len(error))
        return error.value.decode() if result else ""

    def _checked(self, result):
        if self.checks:
            wrong = self.check()
            assert not wrong, wrong
        return result
