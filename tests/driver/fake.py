"""The double of libcuda for Python tests: its entry points and its ``fake_*`` controls, by ctypes."""

import ctypes as c
from pathlib import Path

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


_P = c.c_void_p
_SIZES = c.POINTER(c.c_size_t)
_ADDRESS = c.POINTER(c.c_uint64)
_SIGNATURES = {
    "cuInit": [c.c_uint],
    "cuGetErrorString": [c.c_int, c.POINTER(c.c_char_p)],
    "cuDeviceGetCount": [c.POINTER(c.c_int)],
    "cuDevicePrimaryCtxRetain": [c.POINTER(_P), c.c_int],
    "cuCtxGetCurrent": [c.POINTER(_P)],
    "cuCtxSetCurrent": [_P],
    "cuCtxSynchronize": [],
    "cuMemGetInfo_v2": [_SIZES, _SIZES],
    "cuMemAlloc_v2": [_ADDRESS, c.c_size_t],
    "cuMemFree_v2": [c.c_uint64],
    "cuMemAddressReserve": [_ADDRESS, c.c_size_t, c.c_size_t, c.c_uint64, c.c_uint64],
    "cuMemAddressFree": [c.c_uint64, c.c_size_t],
    "cuMemCreate": [_ADDRESS, c.c_size_t, c.POINTER(AllocationProperties), c.c_uint64],
    "cuMemRelease": [c.c_uint64],
    "cuMemMap": [c.c_uint64, c.c_size_t, c.c_size_t, c.c_uint64, c.c_uint64],
    "cuMemUnmap": [c.c_uint64, c.c_size_t],
    "cuMemSetAccess": [c.c_uint64, c.c_size_t, c.POINTER(Access), c.c_size_t],
    "cuMemGetAllocationGranularity": [_SIZES, c.POINTER(AllocationProperties), c.c_int],
    "cuMemHostAlloc": [c.POINTER(_P), c.c_size_t, c.c_uint],
    "cuMemFreeHost": [_P],
    "cuMemHostRegister_v2": [_P, c.c_size_t, c.c_uint],
    "cuMemHostUnregister": [_P],
    "cuMemcpyHtoDAsync_v2": [c.c_uint64, _P, c.c_size_t, _P],
    "cuMemcpyDtoHAsync_v2": [_P, c.c_uint64, c.c_size_t, _P],
    "cuMemcpyDtoDAsync_v2": [c.c_uint64, c.c_uint64, c.c_size_t, _P],
    "cuStreamCreate": [c.POINTER(_P), c.c_uint],
    "cuStreamDestroy_v2": [_P],
    "cuStreamWaitEvent": [_P, _P, c.c_uint],
    "cuStreamSynchronize": [_P],
    "cuStreamQuery": [_P],
    "cuStreamIsCapturing": [_P, c.POINTER(c.c_int)],
    "cuEventCreate": [c.POINTER(_P), c.c_uint],
    "cuEventRecord": [_P, _P],
    "cuEventQuery": [_P],
    "cuEventSynchronize": [_P],
    "cuEventElapsedTime": [c.POINTER(c.c_float), _P, _P],
    "cuEventDestroy_v2": [_P],
    "cuLaunchHostFunc": [_P, HOST_FN, _P],
    "fake_launch_fill": [_P, c.c_uint64, c.c_uint64, c.c_int],
    "fake_launch_check": [_P, c.c_uint64, c.c_uint64, c.c_int, _P],
    "fake_launch_add": [_P, c.c_uint64, c.c_uint64, c.c_uint64, c.c_int],
}
_CONTROLS = {
    "fake_reset": (None, [c.c_uint64, c.c_int]),
    "fake_drain": (None, []),
    "fake_fail_next": (None, [c.c_char_p, c.c_int, c.c_int]),
    "fake_fail_times": (None, [c.c_char_p, c.c_int, c.c_int]),
    "fake_break": (None, [c.c_int]),
    "fake_set_integrated": (None, [c.c_int]),
    "fake_call_count": (c.c_uint64, [c.c_char_p]),
    "fake_set_memory": (None, [c.c_uint64]),
    "fake_set_granularity": (None, [c.c_uint64]),
    "fake_set_devices": (None, [c.c_int]),
    "fake_set_capturing": (None, [_P, c.c_int]),
    "fake_replay": (None, [_P, _P]),
    "fake_set_lenient": (None, [c.c_int]),
    "fake_illegal_uses": (c.c_uint64, []),
    "fake_capture_violations": (c.c_uint64, []),
    "fake_outstanding": (c.c_uint64, [c.c_char_p]),
    "fake_set_figure": (None, [c.c_char_p, c.c_double]),
    "fake_set_hollow": (None, [c.c_int]),
    "fake_now": (c.c_double, []),
}


class DriverError(RuntimeError):
    def __init__(self, name: str, code: int):
        super().__init__(f"{name}: {code}")
        self.code = code


class FakeDriver:
    """``driver.cuX(...)`` returns the result; ``driver("cuX", ...)`` raises unless it is 0. Controls: ``driver.reset``..."""

    def __init__(self, path: Path):
        self.path = path
        self.library = c.CDLL(str(path))
        for name, arguments in _SIGNATURES.items():
            function = getattr(self.library, name)
            function.restype, function.argtypes = c.c_int, arguments
        for name, (result, arguments) in _CONTROLS.items():
            function = getattr(self.library, name)
            function.restype, function.argtypes = result, arguments
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

    # ---- shorter ways ------------------------------------------------------------------------------------------------

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
