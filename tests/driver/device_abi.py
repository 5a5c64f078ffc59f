"""A device's memory for the tests, by ctypes, in addition to ``tests/core/core_abi``."""

import ctypes as c
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

import core_abi
from core_abi import MIB, UNLIMITED, DeviceStats, PlacesStats, load

__all__ = ["MAPPED", "MIB", "PLAIN", "UNLIMITED", "Device", "DeviceStats", "PlacesStats", "core_abi", "load"]

MAPPED, PLAIN = 0, 1


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
