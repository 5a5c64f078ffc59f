"""The double of libcuda for Python tests: its entry points and its ``fake_*`` controls, by ctypes."""

import ctypes as c
from pathlib import Path

from .device_abi import core_abi

PROMPT, RANDOM, LATE, THREADED, TIMED = range(5)
SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED = 0, 1, 2, 3
INVALID_CONTEXT, INVALID_HANDLE, NOT_READY, ILLEGAL_ADDRESS, CAPTURE_UNSUPPORTED = 201, 400, 600, 700, 900
CONTEXT_IS_DESTROYED, ALREADY_REGISTERED, NOT_REGISTERED, NOT_SUPPORTED = 709, 712, 713, 801

HOST_FN = c.CFUNCTYPE(None, c.c_void_p)


class Location(c.Structure):
    _fields_ = [("type", c.c_int), ("id", c.c_int)]


class AllocationProperties(c.Structure):
    _fields_ = [
        ("type", c.c_int),
        ("handle_types", c.c_int),
        ("location", Location),
        ("windows", c.c_void_p),
        ("flags", c.c_ubyte * 8),
    ]


class Access(c.Structure):
    _fields_ = [("location", Location), ("flags", c.c_int)]


TYPES = core_abi.TYPES | dict.fromkeys(("CUresult", "CUdevice"), c.c_int) | {"float": c.c_float}
TYPES |= dict.fromkeys(("CUcontext", "CUstream", "CUevent", "CUmodule", "CUfunction"), c.c_void_p)
TYPES |= dict.fromkeys(("CUdeviceptr", "CUmemGenericAllocationHandle"), c.c_uint64)
TYPES |= {"CUmemAllocationProp": AllocationProperties, "CUmemAccessDesc": Access}
PROTOTYPES = core_abi.prototypes(Path(__file__).with_name("fake_driver.cpp").read_text(), TYPES)
PROTOTYPES["cuLaunchHostFunc"] = (c.c_int, [c.c_void_p, HOST_FN, c.c_void_p])
PROTOTYPES["fake_launch_check"][1][-1] = c.c_void_p  # an address, of a number that stays


class DriverError(RuntimeError):
    def __init__(self, name: str, code: int):
        super().__init__(f"{name}: {code}")
        self.code = code


class FakeDriver:
    """``driver.cuX(...)`` returns the result; ``driver("cuX", ...)`` raises unless it is 0. Controls: ``driver.reset``..."""

    def __init__(self, path: Path):
        self.path = path
        self.library = c.CDLL(str(path))
        for name, (result, arguments) in PROTOTYPES.items():
            if (function := getattr(self.library, name, None)) is None:
                continue  # compiled without it, for a test
            function.restype, function.argtypes = result, arguments
            if name.startswith("fake_") and not name.startswith("fake_launch"):
                setattr(self, name.removeprefix("fake_"), function)
        self.break_ = self.library.fake_break
        self.cuInit(0)

    def __getattr__(self, name: str):
        if name.startswith(("cu", "fake_launch")):
            return getattr(self.library, name)
        raise AttributeError(name)

    def __call__(self, name: str, *arguments) -> None:
        code = getattr(self.library, name)(*arguments)
        if code:
            raise DriverError(name, code)

    def use_device(self, ordinal: int) -> None:
        """Makes this device's primary context the calling thread's."""
        context = c.c_void_p()
        self("cuDevicePrimaryCtxRetain", c.byref(context), ordinal)
        self("cuCtxSetCurrent", context)

    def stream(self) -> int:
        handle = c.c_void_p()
        self("cuStreamCreate", c.byref(handle), 1)
        return handle.value

    def event(self, flags: int = 2) -> int:
        handle = c.c_void_p()
        self("cuEventCreate", c.byref(handle), flags)
        return handle.value

    def alloc(self, size: int) -> int:
        address = c.c_uint64()
        self("cuMemAlloc_v2", c.byref(address), size)
        return address.value

    def host_alloc(self, size: int) -> int:
        address = c.c_void_p()
        self("cuMemHostAlloc", c.byref(address), size, 0)
        return address.value

    def fill(self, stream: int | None, address: int, size: int, value: int) -> None:
        self("fake_launch_fill", stream, address, size, value)

    def add(self, stream: int | None, to: int, source: int, size: int, delta: int) -> None:
        self("fake_launch_add", stream, to, source, size, delta)

    def check(self, stream: int | None, address: int, size: int, value: int, wrong: c.c_uint64) -> None:
        self("fake_launch_check", stream, address, size, value, c.addressof(wrong))
