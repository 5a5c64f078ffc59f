"""Sums, comparisons and fills by the core's kernels: on the double, whose kernels have the same source, and on a GPU."""

import ctypes as c
import errno
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from threads import in_threads

from memmgr.tools.house import kernels_ptx

from . import build
from .device_abi import MIB, UNLIMITED, load
from .fake import LATE, PROMPT, RANDOM, THREADED, FakeDriver

SIZES = [*range(1, 101), *range(511, 514), 4096 + 3, MIB - 1, MIB, MIB + 8, MIB + 17]
MODES = {RANDOM: "random", LATE: "late", THREADED: "threaded"}
MASK = 2**64 - 1
DIFFERS, GAPS, OTHER, WRITTEN = 1, 2, 4, 8  # mm_compared
NO_KERNELS, CAPTURED = -errno.ENOSYS, -errno.EBUSY
NAMES = ("kernel.done", "sum.done", "stream.done")


def mix(word: int, at: int) -> int:
    word ^= (at + 1) * 0x9E3779B97F4A7C15 & MASK
    word ^= word >> 32
    word = word * 0xD6E8FEB86659FD93 & MASK
    word ^= word >> 29
    word = word * 0xD6E8FEB86659FD93 & MASK
    return word ^ word >> 32


def sum_of(content: bytes) -> int:
    """The reference: mixed words of 8 bytes, zeros behind the end, added up."""
    content += bytes(-len(content) % 8)
    words = memoryview(content).cast("Q")
    return sum(mix(word, at) for at, word in enumerate(words)) & MASK


class Kernels:
    """Device 0 of a driver and a stream of the program on it."""

    def __init__(self, library: c.CDLL, path: str | None):
        self.library = library
        error = c.create_string_buffer(300)
        driver = library.mm_driver_load(path.encode() if path else None, error, len(error))
        if not driver:
            pytest.skip(f"no driver: {error.value.decode()}")
        self._driver, count = c.CDLL(path or "libcuda.so.1"), c.c_int()
        if self._driver.cuInit(0) or self._driver.cuDeviceGetCount(c.byref(count)) or count.value < 1:
            pytest.skip("no device")
        self.handle = library.mm_device_open(driver, 0, UNLIMITED, 0, error, len(error))
        assert self.handle, error.value
        context = c.c_void_p()
        assert self._driver.cuDevicePrimaryCtxRetain(c.byref(context), 0) == 0
        assert self._driver.cuCtxSetCurrent(context) == 0
        self.stream = self.new_stream()

    def new_stream(self) -> int:
        stream = c.c_void_p()
        assert self._driver.cuStreamCreate(c.byref(stream), 1) == 0
        assert stream.value
        return stream.value

    def alloc(self, size: int) -> int:
        address = self.library.mm_device_alloc(self.handle, size, self.stream)
        assert address
        return address

    def free(self, *addresses: int) -> None:
        for address in addresses:
            self.library.mm_device_free(self.handle, address)

    def put(self, address: int, content: bytes) -> None:
        source = c.cast(content, c.c_void_p)
        assert self.library.mm_device_copy(self.handle, address, source, len(content), self.stream) == 0

    def get(self, address: int, size: int) -> bytes:
        out = c.create_string_buffer(size)
        assert self.library.mm_device_fetch(self.handle, c.addressof(out), address, size, self.stream) == 0
        return out.raw

    def sum(self, address: int, size: int) -> int:
        out = c.c_uint64()
        assert self.library.mm_device_sum(self.handle, address, size, self.stream, c.byref(out)) == 0
        return out.value

    def begin(self, address: int, size: int, stream: int | None = None) -> int:
        out = c.c_void_p()
        assert self.library.mm_device_sum_begin(self.handle, address, size, stream or self.stream, c.byref(out)) == 0
        assert out.value
        return out.value

    def end(self, pending: int) -> int:
        out = c.c_uint64()
        assert self.library.mm_device_sum_end(self.handle, pending, c.byref(out)) == 0
        return out.value

    def drop(self, pending: int) -> None:
        self.library.mm_device_sum_drop(self.handle, pending)

    def compare(self, first: int, second: int, size: int, fill: int = -1) -> int:
        out = c.c_uint(0xFFFF)
        to = (self.stream, c.byref(out))
        assert self.library.mm_device_compare(self.handle, first, second, size, fill, *to) == 0
        return out.value

    def same(self, a: int, b: int, size: int) -> bool:
        found = self.compare(a, b, size)
        assert found in (WRITTEN, WRITTEN | DIFFERS | OTHER)
        return found == WRITTEN

    def fill(self, address: int, byte: int, size: int) -> None:
        assert self.library.mm_device_fill(self.handle, address, byte, size, self.stream) == 0

    def close(self) -> None:
        assert self._driver.cuStreamSynchronize(c.c_void_p(self.stream)) == 0
        assert self.library.mm_device_close(self.handle) == 0


@pytest.fixture(scope="session")
def library(fake_driver_path: Path) -> c.CDLL:
    return load(build.core_with_mutations())


@pytest.fixture
def on_double(library: c.CDLL, driver: FakeDriver) -> Iterator[Callable[..., Kernels]]:
    """Makes a device of the double, in late mode by default; closed at the end, when nothing may be left."""
    opened: list[Kernels] = []

    def make(mode: int = LATE, seed: int = 0) -> Kernels:
        driver.reset(seed, mode)
        driver.cuInit(0)
        opened.append(Kernels(library, str(driver.path)))
        return opened[-1]

    yield make
    library.mm_test_leave_out(b"")
    for kernels in opened:
        kernels.close()
    assert driver.capture_violations() == 0
    for what in (b"memory", b"handles", b"maps", b"host", b"events", b"bytes"):
        assert driver.outstanding(what) == 0, what


@pytest.fixture(params=[*MODES.values(), pytest.param("gpu", marks=pytest.mark.gpu)])
def kernels(request: pytest.FixtureRequest, library: c.CDLL) -> Iterator[Kernels]:
    if request.param == "gpu":
        device = Kernels(library, None)
        yield device
        device.close()
    else:
        mode = next(mode for mode, name in MODES.items() if name == request.param)
        yield request.getfixturevalue("on_double")(mode)


def test_sums_of_any_size_and_start(kernels: Kernels) -> None:
    assert kernels.library.mm_device_has_kernels(kernels.handle) == 1
    rng = random.Random(0)
    block = kernels.alloc(MIB + 64)
    content = rng.randbytes(MIB + 64)
    kernels.put(block, content)
    for size in SIZES:
        begin = 0 if size > 4200 else rng.choice([0, 0, 16, 8, rng.randrange(64)])
        assert kernels.sum(block + begin, size) == sum_of(content[begin : begin + size]), (begin, size)
    kernels.free(block)


def test_a_sum_is_another_one_where_one_byte_is(kernels: Kernels) -> None:
    block, size = kernels.alloc(4096 + 3), 4096 + 3
    content = bytearray(size)
    sums = set()
    for at in [None, 0, 7, 8, 15, 16, 2048, 4095, 4096, 4098]:
        changed = bytearray(content)
        if at is not None:
            changed[at] ^= 0x80
        kernels.put(block, bytes(changed))
        sums.add(kernels.sum(block, size))
    assert len(sums) == 10
    kernels.free(block)


def test_comparisons_see_each_byte_and_no_other(kernels: Kernels) -> None:
    rng = random.Random(1)
    a, b = kernels.alloc(MIB + 64), kernels.alloc(MIB + 64)
    content = rng.randbytes(MIB + 64)
    kernels.put(a, content)
    for size in [*range(1, 40), 511, 512, 513, 4096 + 3, MIB + 17]:
        begin = rng.choice([0, 16, rng.randrange(40)])
        kernels.put(b, content)
        assert kernels.same(a + begin, b + begin, size), (begin, size)
        for outside in (begin - 1, begin + size):
            if outside >= 0:
                kernels.put(b + outside, bytes([content[outside] ^ 1]))
        assert kernels.same(a + begin, b + begin, size), (begin, size)
        for inside in {0, size - 1, rng.randrange(size)}:
            kernels.put(b + begin + inside, bytes([content[begin + inside] ^ 0x10]))
            assert not kernels.same(a + begin, b + begin, size), (begin, size, inside)
            kernels.put(b + begin + inside, content[begin + inside : begin + inside + 1])
    kernels.free(a, b)


def compared(first: bytes, second: bytes, fill: int) -> int:
    """The reference: words of 4 bytes, those of the fill behind the end."""
    end, found = bytes([fill]) * (-len(first) % 4), 0
    for one, two in zip(memoryview(first + end).cast("I"), memoryview(second + end).cast("I"), strict=True):
        left_alone = two == fill * 0x01010101
        found |= DIFFERS * (one != two) | (GAPS if left_alone else WRITTEN) | OTHER * (one != two and not left_alone)
    return found


def test_words_that_hold_the_fill_are_gaps_and_not_other(kernels: Kernels) -> None:
    rng = random.Random(4)
    a, b = kernels.alloc(MIB + 64), kernels.alloc(MIB + 64)
    seen = set()
    for size in [*range(1, 40), *[4096 + 3] * 60, MIB + 17]:
        begin, fill = rng.choice([0, 16, rng.randrange(40)]), rng.choice([0, 0xFF, 0xCD])
        first = bytearray(rng.randbytes(size))
        second = bytearray(first)
        for _ in range(rng.choice([0, 1, 3])):  # the op leaves words as they are
            at = 4 * rng.randrange((size + 3) // 4)
            second[at : at + 4] = bytes([fill]) * len(second[at : at + 4])
            if rng.random() < 0.5:
                first[at : at + 4] = second[at : at + 4]
        if rng.random() < 0.3:
            second[rng.randrange(size)] ^= 0x10
        if rng.random() < 0.1:
            second = bytearray([fill]) * size
        kernels.put(a + begin, bytes(first))
        kernels.put(b + begin, bytes(second))
        found = kernels.compare(a + begin, b + begin, size, fill)
        assert found == compared(bytes(first), bytes(second), fill), (begin, size, fill)
        seen.add(found)
    assert seen >= {WRITTEN, WRITTEN | GAPS, WRITTEN | GAPS | DIFFERS, WRITTEN | DIFFERS | OTHER, GAPS | DIFFERS}
    kernels.free(a, b)


def test_fills_end_where_they_should(kernels: Kernels) -> None:
    rng = random.Random(2)
    block = kernels.alloc(8192)
    for size in [*range(1, 40), 511, 512, 513, 4096 + 3]:
        begin, byte = rng.choice([0, 16, rng.randrange(40)]), rng.randrange(256)
        content = rng.randbytes(8192)
        kernels.put(block, content)
        kernels.fill(block + begin, byte, size)
        want = content[:begin] + bytes([byte]) * size + content[begin + size :]
        assert kernels.get(block, 8192) == want, (begin, size)
    kernels.free(block)


def test_pending_sums_are_of_the_bytes_at_their_place_in_the_stream(kernels: Kernels) -> None:
    """Each block is freed, and filled by its next owner, while its sum is under way; words are used many times."""
    rng = random.Random(3)
    waiting: list[tuple[int, int]] = []
    for _ in range(300):
        size = rng.choice([512, 5000, 70_001])
        content = rng.randbytes(size)
        block = kernels.alloc(size)
        kernels.put(block, content)
        other = kernels.new_stream() if rng.random() < 0.02 else None
        if other:  # the sum is taken on another stream than the block's home
            assert kernels.library.mm_device_wait_block(kernels.handle, other, block) == 0
        waiting.append((kernels.begin(block, size, other), sum_of(content)))
        kernels.free(block)
        taken = kernels.alloc(size)
        kernels.fill(taken, 0xCD, size)
        kernels.free(taken)
        while len(waiting) > 20 or (waiting and rng.random() < 0.5):
            pending, want = waiting.pop(rng.randrange(len(waiting)))
            if rng.random() < 0.2:
                kernels.drop(pending)
            else:
                assert kernels.end(pending) == want
    for pending, want in waiting:
        assert kernels.end(pending) == want


def test_more_sums_than_words(kernels: Kernels) -> None:
    """The oldest sums end first to make room, and keep their values."""
    block = kernels.alloc(512)
    contents = [random.Random(n).randbytes(512) for n in range(4)]
    pending = []
    for number in range(1300):
        kernels.put(block, contents[number % 4])
        pending.append(kernels.begin(block, 512))
    for number in range(0, 1300, 7):
        assert kernels.end(pending[number]) == sum_of(contents[number % 4])
    for number in set(range(1300)) - set(range(0, 1300, 7)):
        kernels.drop(pending[number])
    kernels.free(block)


def test_a_pending_sum_waits_for_nothing(on_double: Callable[..., Kernels], driver: FakeDriver) -> None:
    """It queues two kernels and a page-locked copy: no byte is fetched, and the CPU waits only at its end."""
    kernels = on_double(LATE)
    block = kernels.alloc(MIB)
    kernels.fill(block, 3, MIB)
    waits = (b"cuCtxSynchronize", b"cuStreamSynchronize", b"cuEventSynchronize", b"pageable bytes")
    before = [driver.call_count(name) for name in waits]
    pending = kernels.begin(block, MIB)
    kernels.free(block)
    assert [driver.call_count(name) for name in waits] == before
    assert driver.outstanding(b"work") > 0
    assert kernels.end(pending) == sum_of(b"\3" * MIB)
    assert [driver.call_count(name) - was for name, was in zip(waits, before, strict=True)] == [0, 0, 1, 0]


def test_a_delay_is_a_kernel_that_nobody_waits_for(on_double: Callable[..., Kernels], driver: FakeDriver) -> None:
    kernels = on_double(LATE)
    assert kernels.library.mm_device_has_kernels(kernels.handle) == 1
    before = driver.call_count(b"cuLaunchKernel")
    assert kernels.library.mm_device_delay(kernels.handle, 3_000_000, kernels.stream) == 0
    assert driver.call_count(b"cuLaunchKernel") == before + 1
    assert driver.outstanding(b"work") == 1
    driver.drain()


@pytest.mark.gpu
def test_a_delay_takes_its_time(library: c.CDLL) -> None:
    kernels = Kernels(library, None)
    begun = time.perf_counter()
    assert kernels.library.mm_device_delay(kernels.handle, 20_000_000, kernels.stream) == 0
    assert kernels.library.mm_device_synchronize_stream(kernels.handle, kernels.stream) == 0
    assert 15e-3 < time.perf_counter() - begun < 1  # the clock of a fast device passes 2 GHz
    kernels.close()


def test_only_its_own_stream_is_waited_for(on_double: Callable[..., Kernels], driver: FakeDriver) -> None:
    kernels = on_double(LATE)
    block, beside = kernels.alloc(4096), kernels.alloc(4096)
    other = kernels.new_stream()
    driver.fill(other, beside, 4096, 1)
    kernels.fill(block, 3, 4096)
    assert kernels.sum(block, 4096) == sum_of(b"\3" * 4096)
    assert kernels.same(block, block, 4096)
    assert kernels.library.mm_device_synchronize_stream(kernels.handle, kernels.stream) == 0
    assert driver.call_count(b"cuCtxSynchronize") == driver.call_count(b"pageable bytes") == 0
    assert driver.outstanding(b"work") == 1
    driver.drain()
    kernels.free(block, beside)


@pytest.mark.parametrize("wait", NAMES)
def test_without_its_wait_the_result_is_another_one(
    on_double: Callable[..., Kernels], driver: FakeDriver, wait: str
) -> None:
    kernels = on_double(LATE)
    assert wait in kernels.library.mm_test_wait_names().decode().split()
    block = kernels.alloc(4096)
    assert kernels.sum(block, 4096)  # loads the module
    results = []
    for left_out in ("", wait):
        assert kernels.library.mm_test_leave_out(left_out.encode()) == 0
        kernels.fill(block, 3, 4096)
        kernels.fill(block, 4 + len(results), 4096)
        if wait == "kernel.done":
            results.append(kernels.sum(block, 4096) == sum_of(bytes([4 + len(results)]) * 4096))
        elif wait == "sum.done":
            results.append(kernels.end(kernels.begin(block, 4096)) == sum_of(bytes([4 + len(results)]) * 4096))
        else:
            assert kernels.library.mm_device_synchronize_stream(kernels.handle, kernels.stream) == 0
            results.append(driver.outstanding(b"work") == 0)
    driver.drain()
    kernels.free(block)
    assert results == [True, False]


def test_threads_have_words_of_their_own(on_double: Callable[..., Kernels], driver: FakeDriver) -> None:
    kernels = on_double(THREADED)
    wrong = []

    def work(number: int) -> None:
        driver.use_device(0)
        content = random.Random(number).randbytes(9000)
        block = kernels.alloc(9000)
        kernels.put(block, content)
        for _ in range(30):
            pending = kernels.begin(block, 9000)
            if kernels.sum(block, 9000) != sum_of(content) or kernels.end(pending) != sum_of(content):
                wrong.append(number)
        kernels.free(block)

    in_threads(work, range(4))
    assert not wrong


def test_nothing_is_queued_on_a_stream_in_capture(on_double: Callable[..., Kernels], driver: FakeDriver) -> None:
    kernels = on_double(LATE)
    block, out, found, pending = kernels.alloc(4096), c.c_uint64(), c.c_uint(), c.c_void_p()
    driver.set_capturing(kernels.stream, 1)
    library, where = kernels.library, (block, 4096, kernels.stream)
    assert library.mm_device_has_kernels(kernels.handle) == 1  # loaded in relaxed mode
    assert library.mm_device_sum(kernels.handle, *where, c.byref(out)) == CAPTURED
    assert library.mm_device_sum_begin(kernels.handle, *where, c.byref(pending)) == CAPTURED
    compared = library.mm_device_compare(kernels.handle, block, block, 4096, -1, kernels.stream, c.byref(found))
    assert compared == CAPTURED
    assert library.mm_device_fill(kernels.handle, block, 1, 4096, kernels.stream) == CAPTURED
    assert library.mm_device_delay(kernels.handle, 1000, kernels.stream) == CAPTURED
    assert library.mm_device_synchronize_stream(kernels.handle, kernels.stream) == CAPTURED
    assert driver.call_count(b"cuLaunchKernel") == 0
    # Another stream goes on.
    other = kernels.new_stream()
    assert library.mm_device_fill(kernels.handle, block, 7, 4096, other) == 0
    assert library.mm_device_sum(kernels.handle, block, 4096, other, c.byref(out)) == 0
    assert out.value == sum_of(b"\7" * 4096)
    driver.set_capturing(kernels.stream, 0)
    kernels.free(block)


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction", "cuMemAlloc", "cuMemHostAlloc"])
def test_a_module_that_is_refused_is_not_asked_for_again(
    on_double: Callable[..., Kernels], driver: FakeDriver, call: str
) -> None:
    kernels = on_double(LATE)
    block, out = kernels.alloc(4096), c.c_uint64()
    driver.fail_next(call.encode(), 0, 222)  # CUDA_ERROR_UNSUPPORTED_PTX_VERSION
    for _ in range(2):
        assert kernels.library.mm_device_has_kernels(kernels.handle) == 0
        assert kernels.library.mm_device_sum(kernels.handle, block, 4096, kernels.stream, c.byref(out)) == NO_KERNELS
        assert kernels.library.mm_device_delay(kernels.handle, 1000, kernels.stream) == NO_KERNELS
    assert driver.call_count(b"cuModuleLoadData") == 1
    assert driver.call_count(b"cuLaunchKernel") == 0
    assert driver.outstanding(b"host") == 0
    kernels.free(block)


@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuEventCreate", "cuEventRecord"])
@pytest.mark.parametrize("after", [0, 1])
def test_an_error_takes_nothing(on_double: Callable[..., Kernels], driver: FakeDriver, call: str, after: int) -> None:
    """The next sums are right, also when each word is in use once."""
    kernels = on_double(LATE)
    block, pending = kernels.alloc(4096), c.c_void_p()
    kernels.fill(block, 9, 4096)
    kernels.end(kernels.begin(block, 4096))
    busy = [kernels.begin(block, 4096) for _ in range(3)]  # no event is left over
    driver.fail_next(call.encode(), after, 1)
    codes = []
    for _ in range(2):
        codes.append(kernels.library.mm_device_sum_begin(kernels.handle, block, 4096, kernels.stream, c.byref(pending)))
        if codes[-1] == 0:
            assert pending.value
            busy.append(pending.value)
    assert codes in ([-errno.EINVAL, 0], [0, -errno.EINVAL])
    for one in busy:
        assert kernels.end(one) == sum_of(b"\x09" * 4096)
    for one in [kernels.begin(block, 4096) for _ in range(600)]:
        assert kernels.end(one) == sum_of(b"\x09" * 4096)
    kernels.free(block)


@pytest.mark.parametrize("name", ["cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel", "cuModuleUnload"])
def test_a_driver_without_the_functions_opens(
    library: c.CDLL, fake_driver_path: Path, tmp_path: Path, name: str
) -> None:
    """The double, with the name of one function written over, so that dlsym does not find it."""
    whole = fake_driver_path.read_bytes()
    path = tmp_path / f"without_{name}.so"
    path.write_bytes(whole.replace(b"\0" + name.encode() + b"\0", b"\0xx" + name.encode()[2:] + b"\0"))
    own = FakeDriver(path)
    with pytest.raises(AttributeError):
        getattr(own.library, name)
    own.use_device(0)
    kernels = Kernels(library, str(path))
    assert library.mm_device_has_kernels(kernels.handle) == (name == "cuModuleUnload")
    kernels.close()
    own.reset(0, PROMPT)


def ptx() -> str:
    return kernels_ptx.HEADER.read_text().split('R"PTX(', 1)[1].split(')PTX"', 1)[0]


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="no ptxas")
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_the_text_assembles(tmp_path: Path, target: str) -> None:
    source = tmp_path / "kernels.ptx"
    source.write_text(ptx())
    command = ["ptxas", f"-arch={target}", "-o", os.devnull, str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "not defined for option 'gpu-name'" in done.stderr:
        pytest.skip(f"this ptxas does not know {target}")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_the_text_is_that_of_the_source() -> None:
    header = kernels_ptx.HEADER.read_text()
    if f"nvcc {kernels_ptx.release()}." not in header:
        pytest.skip("another nvcc than that of the header")
    assert kernels_ptx.header() == header


@pytest.mark.gpu
def test_sums_at_the_speed_of_memory(library: c.CDLL) -> None:
    """A gibibyte that is summed on the device, against the same bytes over the link."""
    size = 1 << 30
    kernels = Kernels(library, None)
    begun = time.perf_counter()
    assert library.mm_device_has_kernels(kernels.handle) == 1, "the driver refuses the PTX"
    loaded = time.perf_counter() - begun
    block = kernels.alloc(size)
    kernels.fill(block, 5, size)
    first = kernels.sum(block, size)
    begun = time.perf_counter()
    assert all(kernels.sum(block, size) == first for _ in range(10))
    each = (time.perf_counter() - begun) / 10
    begun = time.perf_counter()
    for _ in range(1000):
        kernels.sum(block, 64)
    small = (time.perf_counter() - begun) / 1000
    begun = time.perf_counter()
    pending = [kernels.begin(block, size) for _ in range(10)]
    queued = (time.perf_counter() - begun) / 10
    assert all(kernels.end(one) == first for one in pending)
    print(
        f"module {loaded:.3f} s, sum of 1 GiB {size / each / 1e9:.0f} GB/s, of 64 bytes {1e6 * small:.0f} us,"
        f" queueing one {1e6 * queued:.0f} us"
    )
    kernels.free(block)
    kernels.close()
    assert size / each > 200e9 and small < 200e-6 and queued < each / 5
