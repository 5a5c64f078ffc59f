"""The memory that the accounting path keeps a budget for: the host's, or a device's with an allocator that is not ours."""

from __future__ import annotations

import ctypes
import math
import zlib
from typing import Any

import torch

from ._captures import is_capturing
from ._py_streams import Streams
from ._py_tier import address
from ._py_versions import bytes_of, quiet
from ._sizes import UNLIMITED

GRAIN_BYTES = 512  # what torch's caching allocators round a request up to
_CHECKED_AT_ONCE = 64 << 20  # bytes of a device that are on the host for a checksum


class HostMemory:
    """The CPU's."""

    device = torch.device("cpu")
    words = "DefaultCPUAllocator: can't allocate memory:"  # how torch's own error begins
    tier = "disk"
    streams: Streams | None = None
    asynchronous = False

    def taken(self, nbytes: int) -> int:
        """What the allocator takes for so many bytes."""
        return nbytes

    def new(self, nbytes: int) -> Any:
        """A storage."""
        return torch.UntypedStorage(nbytes, device="cpu")

    def copy(self, to: Any, of: Any) -> None:
        """Of one storage's bytes to another's, in the current stream's order."""
        ctypes.memmove(address(to), address(of), of.nbytes())

    def for_tier(self, storage: Any) -> Any:
        """As the tier below takes it."""
        return address(storage)

    def allocated(self) -> int | None:
        """The bytes of all live blocks, if the allocator says."""
        return None

    def empty_cache(self) -> None:
        """Gives back what the allocator keeps for later."""

    def limit(self, limit_bytes: int) -> None:
        """The allocator takes no more from the device than this."""

    def synchronize(self) -> None:
        """Waits for all work."""

    def is_capturing(self) -> bool:
        """Is the calling thread's stream captured into a graph?"""
        return False


class DeviceMemory(HostMemory):
    """An accelerator's, from its own allocator."""

    tier = "host"
    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.words = "CUDA out of memory." if device.type == "cuda" else "Device out of memory."
        self._module: Any = torch.get_device_module(device.type)
        self._share_before: float | None = None
        self.streams: Streams = Streams(device)

    def taken(self, nbytes: int) -> int:
        return -(-nbytes // GRAIN_BYTES) * GRAIN_BYTES

    def new(self, nbytes: int) -> Any:
        silence = quiet()
        storage = torch.empty(nbytes, dtype=torch.uint8, device=self.device).untyped_storage()
        del silence
        return storage

    def copy(self, to: Any, of: Any) -> None:
        silence = quiet()
        with torch.no_grad():
            bytes_of(to).copy_(bytes_of(of))
        del silence

    def for_tier(self, storage: Any) -> Any:
        return storage

    def allocated(self) -> int | None:
        ask = getattr(self._module, "memory_allocated", None)
        return None if ask is None else int(ask(self.device))

    def empty_cache(self) -> None:
        if (empty := getattr(self._module, "empty_cache", None)) is not None:
            empty()

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def is_capturing(self) -> bool:
        return is_capturing(self.device)

    def limit(self, limit_bytes: int) -> None:
        """By `set_per_process_memory_fraction`, where the device's module has one; without a limit, what was set before.

        What the allocator keeps counts against it, so that is given back first.
        """
        set_share = getattr(self._module, "set_per_process_memory_fraction", None)
        if set_share is None:
            return
        if limit_bytes == UNLIMITED:
            if self._share_before is not None:
                set_share(self._share_before, self.device)
                self._share_before = None
            return
        ask = getattr(self._module, "get_per_process_memory_fraction", None)
        before = self._share_before
        if before is None:
            before = float(ask(self.device)) if ask is not None else 1.0
        whole = int(self._module.mem_get_info(self.device)[1])
        share = limit_bytes / whole
        while int(share * whole) > limit_bytes:
            share = math.nextafter(share, 0.0)
        if share >= before:
            return  # somebody has set a lower one
        self.empty_cache()
        set_share(share, self.device)
        self._share_before = before


def checksum_of(storage: Any, streams: Streams | None = None) -> int:
    """Of all bytes. Of a device's they are brought to the host, piece by piece, for which the CPU waits."""
    size = storage.nbytes()
    if size == 0:
        return 0
    if storage.device.type == "cpu":
        memory = (ctypes.c_char * size).from_address(address(storage))
        return zlib.crc32(memory) << 32 | zlib.adler32(memory)
    if streams is not None and streams.several and streams.keeps("checked"):
        streams.behind_all(streams.current())
    silence = quiet()
    crc, adler = 0, 1
    with torch.no_grad():
        whole = bytes_of(storage)
        for begin in range(0, size, _CHECKED_AT_ONCE):
            part = whole[begin : begin + _CHECKED_AT_ONCE].cpu()
            memory = (ctypes.c_char * part.numel()).from_address(address(part.untyped_storage()))
            crc, adler = zlib.crc32(memory, crc), zlib.adler32(memory, adler)
    del silence
    return crc << 32 | adler
