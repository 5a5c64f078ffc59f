"""The part of ``memmgr/device.h`` that the tests of the host tier use, by ctypes."""

import ctypes as c
import os
from pathlib import Path
from types import SimpleNamespace

from . import device_abi
from .device_abi import UNLIMITED, core_abi, load

__all__ = ["UNLIMITED", "Device", "HostTier", "TierStats", "load"]

TierStats = core_abi.TierStats


class Device(device_abi.Device):
    """A device of the double that knows its live blocks. Blocks are addresses; a stream is a handle, None the default one."""

    def __init__(self, library: c.CDLL, driver_path: Path, ordinal: int = 0, budget: int = 64 << 20):
        super().__init__(library, SimpleNamespace(path=driver_path), ordinal, budget)
        self.library, self.checks = library, False
        self.live: set[int] = set()

    def alloc(self, size: int, stream: int | None) -> int:
        address = super().alloc(size, stream)
        assert address
        self.live.add(address)
        return address

    def free(self, address: int) -> None:
        self.live.remove(address)
        super().free(address)


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
