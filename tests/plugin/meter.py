"""The meter of CUDA's allocator by ctypes."""

import ctypes as c
import functools
import hashlib
import os
from pathlib import Path
from typing import Any

from driver import build
from driver.device_abi import core_abi

ROWS = ("all", "small", "large")
VISIT = c.CFUNCTYPE(None, *[c.c_uint64] * 7, c.c_int)
COUNT = ("current", "peak", "allocated", "freed")


@functools.cache
def library(core: Path) -> c.CDLL:
    """Compiled once, linked with this build of the core."""
    folder = build.ROOT / "allocator" / "cuda"
    sources = [folder / "meter.cpp", Path(__file__).with_name("meter_abi.cpp")]
    digest = hashlib.sha256((folder / "meter.h").read_bytes()).hexdigest()[:8]
    path = build.build("meter", sources, [f"-I{folder}", f"-DHEADER=0x{digest}", "-Wl,--no-as-needed", str(core)])
    # Its calls go to the core that it was linked with, whichever other one this process has loaded.
    loaded = c.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_DEEPBIND)
    core_abi.typed(loaded, Path(__file__).with_name("meter_abi.cpp").read_text().replace("VISIBLE ", ""))
    loaded.meter_walk.argtypes = [c.c_void_p, VISIT]
    return loaded


class Meter:
    """Counts for one device of the double."""

    def __init__(self, loaded: c.CDLL, device: Any, least_total: int = 0) -> None:
        self._library, self.device = loaded, device
        self.handle = loaded.meter_new(device.handle, least_total)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, f"meter_{name}")
        return lambda *arguments: function(self.handle, *arguments)

    def alloc(self, size: int, stream: int | None = None) -> int | None:
        address = self.device.alloc(size, stream)
        if address is not None:
            self._library.meter_allocated(self.handle, address, size)
        return address

    def free(self, address: int) -> None:
        self._library.meter_freed(self.handle, address)
        self.device.free(address)

    def stats(self) -> dict[str, Any]:
        """By name: {row: {count: n}}, or {count: n}, or a number."""
        row = (c.c_int64 * 64)()
        used = self._library.meter_read(self.handle, row, len(row))
        numbers = iter(row[:used])

        def count() -> dict[str, int]:
            return {name: next(numbers) for name in COUNT}

        found: dict[str, Any] = {name: {r: count() for r in ROWS} for name in ("blocks", "bytes", "requested_bytes")}
        found.update({name: count() for name in ("reserved_bytes", "pages")})
        found.update({name: next(numbers) for name in ("out_of_memory", "retries", "synchronizations")})
        assert next(numbers, None) is None
        return found

    def segments(self) -> dict[tuple[int, int, int, int], list[tuple[int, int, int, int]]]:
        """{(address, bytes, requested, live): [(address, bytes, requested, is live)]}."""
        found: dict[tuple[int, int, int, int], list[tuple[int, int, int, int]]] = {}

        def visit(*values: int) -> None:
            found.setdefault(values[:4], []).append(values[4:])

        self._library.meter_walk(self.handle, VISIT(visit))
        return found
