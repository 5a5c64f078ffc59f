"""The same device and tier on a real GPU, and on the double: only calls that both support, through the C ABI."""

import ctypes as c
import random

import pytest

from .fake import THREADED
from .tier_abi import UNLIMITED, HostTier

MIB = 1 << 20


class AnyDevice:
    """Device 0 of a driver, a stream of the program, and a tier."""

    def __init__(self, library: c.CDLL, path: bytes | None, capacity: int):
        self.library = library
        text = c.create_string_buffer(300)
        driver = library.mm_driver_load(path, text, len(text))
        if not driver:
            pytest.skip(f"no driver: {text.value.decode()}")
        own, count = c.CDLL(path.decode() if path else "libcuda.so.1"), c.c_int()
        if own.cuInit(0) or own.cuDeviceGetCount(c.byref(count)) or count.value < 1:
            pytest.skip("the driver has no device")
        self.handle = library.mm_device_open(driver, 0, UNLIMITED, 0, text, len(text))
        assert self.handle, text.value
        self.tier = HostTier(self, capacity)
        context, stream = c.c_void_p(), c.c_void_p()
        own.cuCtxSetCurrent.argtypes, own.cuStreamSynchronize.argtypes = [c.c_void_p], [c.c_void_p]
        assert own.cuDevicePrimaryCtxRetain(c.byref(context), 0) == 0
        assert own.cuCtxSetCurrent(context) == 0
        assert own.cuStreamCreate(c.byref(stream), 1) == 0
        self.stream, self._own = stream.value, own

    def alloc(self, size: int) -> int:
        address = self.library.mm_device_alloc(self.handle, size, self.stream)
        assert address
        return address

    def free(self, address: int) -> None:
        self.library.mm_device_free(self.handle, address)

    def copy(self, to: int, source: int, size: int) -> None:
        assert self.library.mm_device_copy(self.handle, to, source, size, self.stream) == 0

    def fetch(self, address: int, size: int) -> bytes:
        out = c.create_string_buffer(size)
        assert self.library.mm_device_fetch(self.handle, c.addressof(out), address, size, self.stream) == 0
        return out.raw

    def close(self) -> None:
        self.tier.close()
        assert self._own.cuStreamSynchronize(self.stream) == 0
        assert self.library.mm_device_close(self.handle) == 0


@pytest.fixture(params=["double", pytest.param("gpu", marks=pytest.mark.gpu)])
def make_device(request, core):
    def make(capacity: int) -> AnyDevice:
        if request.param == "gpu":
            return AnyDevice(core, None, capacity)
        driver = request.getfixturevalue("driver")
        driver.reset(3, THREADED)
        driver.cuInit(0)
        return AnyDevice(core, str(driver.path).encode(), capacity)

    return make


def test_random_rounds(make_device) -> None:
    """Blocks go down and come back behind slow copies, under a slab that is too small for all of them."""
    device = make_device(6 * MIB)
    rng, tier = random.Random(0), device.tier
    slow = [device.alloc(8 * MIB), device.alloc(8 * MIB)]
    cells: list[tuple[bytes, int | None, int | None]] = []
    parked = 0
    for _ in range(150):
        content = rng.randbytes(rng.choice([1000, 70_000, 1_000_000]))
        for _ in range(rng.randrange(3)):
            device.copy(slow[0], slow[1], 8 * MIB)
        block = device.alloc(len(content))
        device.copy(block, c.cast(content, c.c_void_p).value, len(content))
        slot = rng.choice([tier.write, tier.write_now])(block, len(content))
        if slot >= 0:
            device.free(block)
            parked += 1
            cells.append((content, None, slot))
        else:
            cells.append((content, block, None))
        while len(cells) > 12 or (cells and rng.random() < 0.3):
            content, block, slot = cells.pop(rng.randrange(len(cells)))
            if slot is not None:
                block = device.alloc(len(content))
                assert tier.read(slot, block) == 0 and tier.use(slot, device.stream) == 0
                tier.free(slot)
            assert device.fetch(block, len(content)) == content
            device.free(block)
    for _, block, slot in cells:
        device.free(block) if slot is None else tier.free(slot)
    assert parked > 75
    stats = tier.stats
    assert stats.used_bytes == 0 and stats.errors == 0 and stats.read_nanoseconds > 0
    for block in slow:
        device.free(block)
    device.close()


@pytest.mark.gpu
def test_copies_are_asynchronous(core) -> None:
    """The CPU returns from write and read while the GPU is still busy with earlier work."""
    size = 256 * MIB
    device = AnyDevice(core, None, size)
    big = [device.alloc(size), device.alloc(size)]
    for _ in range(400):  # 200 GB of traffic: no GPU does that within the calls below
        device.copy(big[0], big[1], size)
    slot = device.tier.write(big[0], size)
    assert slot >= 0
    assert device.tier.read(slot, big[1]) == 0
    assert device.tier.poll(slot) == 0, "the CPU waited for the device"
    assert device.tier.wait(slot) == 0 and device.tier.poll(slot) == 1
    for block in big:
        device.free(block)
    device.close()
