"""Every call of the driver that memmgr makes, one after the other, as memmgr makes it: what a real driver answers and what it
takes. Where a training fails, this says whether the driver is other than its double. Needs no torch.
"""

from __future__ import annotations

import ctypes as c
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

MIB = 1 << 20
PAGES = 64
SUCCESS, NOT_READY = 0, 600
ATTRIBUTES = {
    "compute capability, major": 75,
    "compute capability, minor": 76,
    "virtual memory management": 102,
    "unified addressing": 41,
    "copy engines": 40,
    "compute mode": 20,
    "integrated": 18,
    "concurrent managed access": 89,
    "pageable memory access": 88,
    "can flush remote writes": 98,
    "GPUDirect RDMA with virtual memory": 110,
}
Row = tuple[str, str, str]
"""Call, answer, time."""


class _Location(c.Structure):
    _fields_ = (("type", c.c_int), ("id", c.c_int))


class _Properties(c.Structure):
    _fields_ = (
        ("type", c.c_int),
        ("handles", c.c_int),
        ("location", _Location),
        ("windows", c.c_void_p),
        ("flags", c.c_ubyte * 8),
    )


class _Access(c.Structure):
    _fields_ = (("location", _Location), ("flags", c.c_int))


class DriverSaidNo(RuntimeError):
    """A call that must succeed did not."""


class Driver:
    """The driver's library. `driver("cuX", ...)` calls, and raises with the error's name; arguments are ctypes, or ints of 64
    bits.

    Args:
        path: of libcuda, or of a double.
    """

    def __init__(self, path: str) -> None:
        self._library = c.CDLL(path)

    def has(self, name: str) -> bool:
        """Is there such a function?"""
        return hasattr(self._library, name)

    def code(self, name: str, *arguments: Any) -> int:
        """The error that the call ends with; 0: none."""
        wide = [c.c_uint64(a) if isinstance(a, int) else a for a in arguments]
        return int(getattr(self._library, name)(*wide))

    def __call__(self, name: str, *arguments: Any) -> None:
        if code := self.code(name, *arguments):
            raise DriverSaidNo(f"{name}: {self.name_of(code)}")

    def name_of(self, code: int) -> str:
        """Of an error, with its number and text."""
        said = []
        for ask in ("cuGetErrorName", "cuGetErrorString"):
            text = c.c_char_p()
            if self.has(ask) and getattr(self._library, ask)(c.c_int(code), c.byref(text)) == 0 and text.value:
                said.append(text.value.decode())
        return f"{code} ({', '.join(said) or 'unknown'})"


def path() -> str:
    """Of the library that memmgr would take."""
    return os.environ.get("MEMMGR_DRIVER") or "libcuda.so.1"


def rows(ordinal: int = 0) -> Iterator[Row]:
    """What each step says, as soon as it is known; an answer that begins with `**` is wrong. A step that fails is told, and the
    others are tried all the same."""
    try:
        driver = Driver(path())
    except OSError as error:
        yield path(), f"**{error}**", "-"
        return
    for name, act in _Steps(driver, ordinal).all():
        begun = time.perf_counter()
        try:
            answer = act()
        except DriverSaidNo as error:
            answer = f"**{error}**"
        except Exception as error:  # of the probe itself: the rest is worth knowing
            answer = f"**{type(error).__name__}: {error}**"
        yield name, answer, f"{1e3 * (time.perf_counter() - begun):.1f} ms"


class _Steps:
    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.driver, self.ordinal = driver, ordinal
        self.page = 2 * MIB
        self.total = 0
        self.base = c.c_uint64()
        self.host = c.c_void_p()
        self.streams = [c.c_void_p(), c.c_void_p()]
        self.properties = _Properties(type=1, location=_Location(1, ordinal))
        self.access = _Access(_Location(1, ordinal), 3)

    def all(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """In order: later ones need what earlier ones made."""
        yield "cuInit, cuDevicePrimaryCtxRetain", self.begin
        yield "the driver and the device", self.device
        yield "a thread's own context", self.context
        yield "cuMemGetInfo, cuMemGetAllocationGranularity", self.memory
        yield "cuMemAddressReserve, four times the device", self.reserve
        yield f"cuMemCreate, cuMemMap, cuMemRelease, {PAGES} pages; cuMemSetAccess", self.map
        yield "cuMemHostAlloc, 256 MiB", self.pin
        yield "cuStreamCreate, copies over all pages there and back", self.copy
        yield "a page in the middle: cuMemUnmap, another one mapped", self.move
        yield "events: query, wait, elapsed time", self.events
        yield "a stream is captured: what is allowed meanwhile", self.capture
        yield f"cuMemUnmap, {PAGES} pages; cuMemAddressFree, cuMemFreeHost", self.end

    def begin(self) -> str:
        context = c.c_void_p()
        self.driver("cuInit", c.c_uint(0))
        self.driver("cuDevicePrimaryCtxRetain", c.byref(context), c.c_int(self.ordinal))
        self.driver("cuCtxSetCurrent", context)
        return "ok"

    def device(self) -> str:
        said = []
        if self.driver.has("cuDriverGetVersion"):
            version = c.c_int()
            self.driver("cuDriverGetVersion", c.byref(version))
            said.append(f"CUDA {version.value // 1000}.{version.value % 1000 // 10}")
        if self.driver.has("cuDeviceGetAttribute"):
            for name, number in ATTRIBUTES.items():
                value = c.c_int(-1)
                self.driver.code("cuDeviceGetAttribute", c.byref(value), c.c_int(number), c.c_int(self.ordinal))
                said.append(f"{name}: {value.value}")
        return "; ".join(said) or "says nothing"

    def context(self) -> str:
        found: list[int | None] = []

        def look() -> None:
            for begin in (False, True):
                if begin:
                    self.begin()
                    self.driver("cuCtxSetCurrent", c.c_void_p())
                now = c.c_void_p()
                self.driver("cuCtxGetCurrent", c.byref(now))
                found.append(now.value)

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return "ok" if found == [None, None] else f"**{found}**"

    def memory(self) -> str:
        free, total, least, best = (c.c_size_t() for _ in range(4))
        self.driver("cuMemGetInfo_v2", c.byref(free), c.byref(total))
        for out, which in ((least, 0), (best, 1)):
            self.driver("cuMemGetAllocationGranularity", c.byref(out), c.byref(self.properties), c.c_int(which))
        self.total, self.page = total.value, least.value
        return f"{free.value:,} of {total.value:,} bytes free; pages of {least.value:,}, better {best.value:,}"

    def reserve(self) -> str:
        size = -(-4 * self.total // self.page) * self.page
        self._reserved = size
        self.driver("cuMemAddressReserve", c.byref(self.base), size, 0, 0, 0)
        return f"{size:,} bytes at {self.base.value:#x}"

    def _map(self, number: int) -> None:
        handle = c.c_uint64()
        self.driver("cuMemCreate", c.byref(handle), self.page, c.byref(self.properties), 0)
        self.driver("cuMemMap", self.base.value + number * self.page, self.page, 0, handle, 0)
        self.driver("cuMemRelease", handle)

    def _allow(self, first: int, count: int) -> None:
        at = self.base.value + first * self.page
        self.driver("cuMemSetAccess", at, count * self.page, c.byref(self.access), 1)

    def map(self) -> str:
        begun = time.perf_counter()
        for number in range(PAGES):
            self._map(number)
        mapped = time.perf_counter()
        self._allow(0, PAGES)
        allowed = time.perf_counter()
        return (
            f"{1e6 * (mapped - begun) / PAGES:.0f} us a page, access {1e6 * (allowed - mapped) / PAGES:.0f} us a page"
        )

    def pin(self) -> str:
        self.driver("cuMemHostAlloc", c.byref(self.host), 256 * MIB, c.c_uint(1))
        return "ok"

    def copy(self) -> str:
        for stream in self.streams:
            self.driver("cuStreamCreate", c.byref(stream), c.c_uint(1))
        size = min(PAGES * self.page, 128 * MIB)
        assert self.host.value
        there, back = self.host.value, self.host.value + 128 * MIB
        pattern = bytes(range(251)) * 1045
        for at in range(0, size, len(pattern)):
            c.memmove(there + at, pattern, min(len(pattern), size - at))
        c.memset(back, 0, size)
        speeds = []
        for call, to, source in (
            ("cuMemcpyHtoDAsync_v2", self.base.value, there),
            ("cuMemcpyDtoHAsync_v2", back, self.base.value),
        ):
            self.driver("cuStreamSynchronize", self.streams[0])
            begun = time.perf_counter()
            self.driver(call, to, source, size, self.streams[0])
            self.driver("cuStreamSynchronize", self.streams[0])
            speeds.append(size / (time.perf_counter() - begun) / 1e9)
        same = c.string_at(there, size) == c.string_at(back, size)
        return f"{speeds[0]:.1f} GB/s to the device, {speeds[1]:.1f} back" if same else "**other bytes came back**"

    def move(self) -> str:
        number = PAGES // 2
        self.driver("cuCtxSynchronize")
        self.driver("cuMemUnmap", self.base.value + number * self.page, self.page)
        self._map(number)
        self._allow(number, 1)
        size = 3 * self.page  # over its neighbours, which kept theirs
        first = self.base.value + (number - 1) * self.page
        self.driver("cuMemcpyHtoDAsync_v2", first, self.host, size, self.streams[1])
        self.driver("cuStreamSynchronize", self.streams[1])
        return "ok"

    def events(self) -> str:
        events = [c.c_void_p(), c.c_void_p()]
        for event in events:
            self.driver("cuEventCreate", c.byref(event), c.c_uint(0))
        self.driver("cuEventRecord", events[0], self.streams[0])
        for _ in range(8):
            self.driver("cuMemcpyHtoDAsync_v2", self.base.value, self.host, 128 * MIB, self.streams[0])
        self.driver("cuEventRecord", events[1], self.streams[0])
        early = self.driver.code("cuEventQuery", events[1])
        self.driver("cuStreamWaitEvent", self.streams[1], events[1], c.c_uint(0))
        waiting = self.driver.code("cuStreamQuery", self.streams[1])
        self.driver("cuEventSynchronize", events[1])
        taken = c.c_float()
        self.driver("cuEventElapsedTime", c.byref(taken), *events)
        for event in events:
            self.driver("cuEventDestroy_v2", event)
        self.driver("cuStreamSynchronize", self.streams[1])
        said = f"asked at once: {early}, the waiting stream: {waiting}; 1 GiB in {taken.value:.1f} ms"
        return said if {early, waiting} <= {SUCCESS, NOT_READY} else f"**{said}**"

    def capture(self) -> str:
        if not self.driver.has("cuStreamBeginCapture_v2"):
            return "left out: this driver captures nothing"
        status, mode, graph = c.c_int(-1), c.c_int(2), c.c_void_p()
        said: list[str] = []

        def ask(name: str, *arguments: Any) -> None:
            if code := self.driver.code(name, *arguments):
                said.append(f"{name}: {self.driver.name_of(code)}")

        event = c.c_void_p()
        self.driver("cuEventCreate", c.byref(event), c.c_uint(2))
        self.driver("cuEventRecord", event, self.streams[1])
        self.driver("cuStreamBeginCapture_v2", self.streams[0], c.c_int(0))
        ask("cuStreamIsCapturing", self.streams[0], c.byref(status))
        if status.value != 1:
            said.append(f"the captured stream says {status.value}")
        ask("cuStreamIsCapturing", c.c_void_p(), c.byref(status))
        ask("cuThreadExchangeStreamCaptureMode", c.byref(mode))
        acts: tuple[Callable[[], None], ...] = (lambda: self._map(PAGES), lambda: self._allow(PAGES, 1))
        for act in acts:
            try:
                act()
            except DriverSaidNo as error:
                said.append(str(error))
        ask("cuMemGetInfo_v2", c.byref(c.c_size_t()), c.byref(c.c_size_t()))
        ask("cuEventQuery", event)
        ask("cuStreamQuery", self.streams[1])
        ask("cuStreamSynchronize", self.streams[1])
        ask("cuMemcpyHtoDAsync_v2", self.base.value, self.host, MIB, self.streams[1])
        ask("cuEventRecord", event, self.streams[1])
        ask("cuMemUnmap", self.base.value + PAGES * self.page, self.page)
        ask("cuThreadExchangeStreamCaptureMode", c.byref(mode))
        ask("cuStreamEndCapture", self.streams[0], c.byref(graph))  # an error: one of these calls has invalidated it
        if graph.value:
            ask("cuGraphDestroy", graph)
        self.driver("cuEventDestroy_v2", event)
        return f"**{'; '.join(said)}**" if said else "ok"

    def end(self) -> str:
        self.driver("cuCtxSynchronize")
        begun = time.perf_counter()
        for number in range(PAGES):
            self.driver("cuMemUnmap", self.base.value + number * self.page, self.page)
        unmapped = time.perf_counter()
        self.driver("cuMemAddressFree", self.base.value, self._reserved)
        for stream in self.streams:
            self.driver("cuStreamDestroy_v2", stream)
        self.driver("cuMemFreeHost", self.host)
        return f"{1e6 * (unmapped - begun) / PAGES:.0f} us a page"
