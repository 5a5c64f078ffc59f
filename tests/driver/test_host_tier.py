"""The host tier: there and back, errors, statistics, slots in every state, a child that has forked, and room in the slab: nothing
overlaps, nothing is lost, best fit by address.
"""

import ctypes as c
import errno
import itertools
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .fake import INVALID_VALUE, LATE, OUT_OF_MEMORY, PROMPT, RANDOM, THREADED, FakeDriver
from .tier_abi import Device, HostTier
from .workload import Workload, pattern, run_pair, run_seed

KIB = 1024
MODES = [PROMPT, RANDOM, LATE, THREADED]


class Bench:
    """A device, a host tier of 8 KiB on it, and a stream."""

    def __init__(self, library: c.CDLL, driver: FakeDriver, mode: int, capacity: int = 8 * KIB, seed: int = 5):
        driver.reset(seed, mode)
        driver.cuInit(0)
        driver.use_device(0)
        self.driver = driver
        self.stream = driver.stream()
        self.device = Device(library, driver.path)
        self.tier = HostTier(self.device, capacity)
        self.wrong = c.c_uint64(0)

    def filled(self, size: int, value: int) -> int:
        block = self.device.alloc(size, self.stream)
        self.driver.fill(self.stream, block, size, value)
        return block

    def check(self, block: int, size: int, value: int) -> None:
        self.driver.check(self.stream, block, size, value, self.wrong)

    def close(self) -> None:
        self.tier.close()
        self.driver.drain()
        assert self.wrong.value == 0
        for block in list(self.device.live):
            self.device.free(block)
        assert self.device.close() == 0
        assert self.driver.outstanding(b"host") == self.driver.outstanding(b"events") == 0


@pytest.fixture(params=MODES, ids=["prompt", "random", "late", "threaded"])
def bench(request, core, driver: FakeDriver) -> Iterator[Bench]:
    bench = Bench(core, driver, request.param)
    yield bench
    bench.close()


@pytest.mark.parametrize("now", [False, True])
def test_there_and_back(bench: Bench, now: bool) -> None:
    tier, size = bench.tier, 700
    block = bench.filled(size, 9)
    slot = (tier.write_now if now else tier.write)(block, size)
    assert slot >= 0
    bench.device.free(block)
    again = bench.device.alloc(size, bench.stream)
    assert (tier.read_now if now else tier.read)(slot, again) == 0
    if not now:
        assert tier.use(slot, bench.stream) == 0
    bench.check(again, size, 9)
    assert c.string_at(tier.bytes(slot), size) == pattern(9, size)
    assert tier.wait(slot) == 0 and tier.poll(slot) == 1
    tier.free(slot)
    bench.device.free(again)


def test_calls_only_queue(core, driver: FakeDriver) -> None:
    """On a device that does nothing before a wait, write, read, use and free return, and poll reports pending."""
    bench = Bench(core, driver, LATE)
    tier, size = bench.tier, 700
    block = bench.filled(size, 1)
    slot = tier.write_now(block, size)
    bench.device.free(block)
    again = bench.device.alloc(size, bench.stream)
    assert tier.read_now(slot, again) == 0
    assert tier.poll(slot) == 0
    stats = tier.stats
    assert (stats.queued_write_bytes, stats.queued_read_bytes, stats.writes, stats.reads) == (size, size, 0, 0)
    bench.check(again, size, 1)
    tier.free(slot)
    assert tier.stats.used_bytes == 0 and tier.stats.queued_read_bytes == size
    driver.drain()
    assert tier.stats.queued_read_bytes == 0
    bench.close()


def test_statistics(bench: Bench) -> None:
    tier, size = bench.tier, 700
    block = bench.filled(size, 2)
    slot = tier.write(block, size)
    for _ in range(2):
        assert tier.read(slot, block) == 0
    assert tier.wait(slot) == 0
    stats = tier.stats
    assert (stats.capacity_bytes, stats.used_bytes, stats.used_peak_bytes) == (8 * KIB, KIB, KIB)
    assert (stats.written_bytes, stats.writes, stats.read_bytes, stats.reads) == (size, 1, 2 * size, 2)
    assert (stats.queued_write_bytes, stats.queued_read_bytes, stats.errors, stats.direct) == (0, 0, 0, 0)
    assert stats.write_nanoseconds > 0 and stats.read_nanoseconds > 0
    tier.free(slot)
    assert tier.stats.used_bytes == 0 and tier.stats.used_peak_bytes == KIB


def test_no_room_takes_nothing(bench: Bench) -> None:
    tier = bench.tier
    block = bench.filled(8 * KIB + 1, 3)
    assert tier.write(block, 8 * KIB + 1) == -errno.ENOSPC
    assert tier.stats.used_bytes == 0
    slot = tier.write(block, 8 * KIB)
    assert slot >= 0 and tier.write(block, 1) == -errno.ENOSPC
    tier.free(slot)
    assert tier.write(block, 1) >= 0
    bench.device.free(block)


def test_bad_arguments(bench: Bench) -> None:
    tier = bench.tier
    block = bench.filled(512, 3)
    assert tier.write(None, 5) == tier.write(block, 0) == -errno.EINVAL
    slot = tier.write(block, 512)
    tier.free(slot)
    tier.free(slot)
    again = tier.write(block, 512)
    assert again != slot  # an id is never used twice
    for call in (tier.poll, tier.wait):
        assert call(slot) == -errno.EBADF
    assert tier.use(slot, None) == tier.read(slot, block) == -errno.EBADF
    assert tier.bytes(slot) is None
    assert tier.read(again, None) == -errno.EINVAL


def test_page_locking_that_fails_says_so(core, driver: FakeDriver) -> None:
    bench = Bench(core, driver, PROMPT)
    streams = driver.outstanding(b"streams")
    cannot = "cannot page-lock 1048576 bytes of host memory: out of memory"
    driver.fail_next(b"cuMemHostRegister", 0, OUT_OF_MEMORY)
    with pytest.raises(OSError, match=rf"{cannot} .* that worked is 524288 bytes: lower host= to that"):
        HostTier(bench.device, 1 << 20)
    driver.fail_times(b"cuMemHostRegister", 1000, OUT_OF_MEMORY)
    with pytest.raises(OSError, match=rf"{cannot} .*\. No smaller size worked: pass host="):
        HostTier(bench.device, 1 << 20)
    driver.fail_times(b"cuMemHostRegister", 0, 0)
    with pytest.raises(OSError, match="at least 512"):
        HostTier(bench.device, 511)
    assert driver.outstanding(b"streams") == streams and driver.outstanding(b"host") == 1
    bench.close()


@pytest.mark.parametrize("mode", [RANDOM, LATE])
@pytest.mark.parametrize(
    "name",
    [
        "cuEventCreate",
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuMemcpyDtoHAsync",
        "cuMemcpyHtoDAsync",
        "cuCtxGetCurrent",
    ],
)
def test_a_driver_call_that_fails_loses_nothing(core, driver: FakeDriver, mode: int, name: str) -> None:
    """Whichever call of a write or a read fails: a negative errno, nothing taken, and the next try succeeds."""
    failed = 0
    # In some orders the device makes no event after the first write.
    for after, seed in itertools.product(range(8), range(3)):
        bench = Bench(core, driver, mode, seed=seed)
        tier, size = bench.tier, 600
        block = bench.filled(size, 4)
        other = bench.filled(size, 5)
        first = tier.write(other, size)
        driver.fail_next(name.encode(), after, OUT_OF_MEMORY)
        slot = tier.write(block, size)
        if slot < 0:
            failed += 1
            assert slot in (-errno.ENOMEM, -errno.EBUSY)  # the latter while the device waits for the memory
            assert tier.stats.used_bytes == KIB
            slot = tier.write(block, size)
        assert slot >= 0
        bench.device.free(block)
        target = bench.device.alloc(size, bench.stream)
        result = tier.read_now(slot, target)
        if result < 0:
            failed += 1
            assert result in (-errno.ENOMEM, -errno.EBUSY)
            assert tier.read_now(slot, target) == 0
        driver.fail_next(name.encode(), 1 << 20, 0)  # a failure that it did not use is for no other call
        bench.check(target, size, 4)
        tier.free(slot)
        assert c.string_at(tier.bytes(first), size) == pattern(5, size)
        driver.drain()
        stats = tier.stats
        assert (stats.queued_write_bytes, stats.queued_read_bytes, stats.used_bytes) == (0, 0, KIB)
        bench.close()
    assert failed > 0


@pytest.mark.parametrize("wait", [False, True])
def test_a_copy_that_fails_later_is_reported(core, driver: FakeDriver, wait: bool) -> None:
    bench = Bench(core, driver, LATE)
    tier = bench.tier
    block = bench.filled(512, 6)
    slot = tier.write(block, 512)
    if wait:
        driver.fail_next(b"cuEventSynchronize", 0, INVALID_VALUE)
        assert tier.wait(slot) == -errno.EINVAL
    else:
        driver.fail_next(b"cuEventQuery", 0, INVALID_VALUE)
        assert tier.poll(slot) == -errno.EINVAL
    assert tier.bytes(slot) is None
    assert tier.read(slot, block) == -errno.EINVAL
    assert tier.stats.errors == 1 and tier.stats.queued_write_bytes == 0
    tier.free(slot)
    bench.close()


def test_injected_errors(bench: Bench) -> None:
    tier = bench.tier
    block = bench.filled(512, 7)
    tier.inject(errno.EIO, 2, errno.ENOMEM, 1)
    good, bad = tier.write(block, 512), tier.write(block, 512)
    assert tier.wait(good) == 0 and tier.wait(bad) == -errno.EIO == tier.poll(bad)
    assert tier.read_now(good, block) == -errno.ENOMEM
    assert tier.read_now(good, block) == 0 and tier.wait(good) == 0
    tier.inject(errno.ENOSPC, 1, 0, 0)
    assert tier.write_now(block, 512) == -errno.ENOSPC
    assert tier.stats.used_bytes == KIB


def test_a_thousand_rounds_leave_nothing_behind(bench: Bench) -> None:
    tier, driver = bench.tier, bench.driver
    counts, events = [], []
    for number in range(1000):
        block = bench.filled(600, number % 256)
        slot = tier.write(block, 600)
        bench.device.free(block)
        block = bench.device.alloc(600, bench.stream)
        assert tier.read(slot, block) == 0 and tier.use(slot, bench.stream) == 0
        bench.check(block, 600, number % 256)
        tier.free(slot)
        bench.device.free(block)
        if number % 10 == 9:
            driver("cuStreamSynchronize", bench.stream)
            counts.append([driver.outstanding(what) for what in (b"streams", b"host", b"memory", b"maps")])
            events.append(driver.outstanding(b"events"))
    assert counts[50] == counts[-1]
    assert max(events) <= 64  # ten rounds' copies, each between two events, and the device's own
    assert tier.stats.used_bytes == 0


def test_opening_and_closing_leave_nothing_behind(core, driver: FakeDriver) -> None:
    bench = Bench(core, driver, RANDOM)
    block = bench.filled(600, 1)
    counts = []
    for _ in range(20):
        tier = HostTier(bench.device, 4 * KIB)
        tier.write(block, 600)
        tier.close()
        counts.append([driver.outstanding(what) for what in (b"events", b"streams", b"host")])
    assert counts[1] == counts[-1]
    bench.close()


def test_reads_do_not_hold_up_memory_that_was_used(core, driver: FakeDriver) -> None:
    """A reuse of a reloaded block waits for that block's copy at most, not for all reads that were queued after it."""
    bench = Bench(core, driver, LATE)
    tier, size = bench.tier, 2048
    slots = []
    for value in range(3):
        block = bench.filled(size, value)
        slots.append(tier.write(block, size))
        bench.device.free(block)
    driver.drain()
    first, others = bench.device.alloc(size, bench.stream), [bench.device.alloc(size, bench.stream) for _ in slots[1:]]
    assert tier.read(slots[0], first) == 0 and tier.use(slots[0], bench.stream) == 0
    for slot, block in zip(slots[1:], others, strict=True):
        assert tier.read(slot, block) == 0
    bench.device.free(first)
    again = bench.filled(size, 7)
    assert again == first
    driver("cuStreamSynchronize", bench.stream)
    assert [tier.poll(slot) for slot in slots] == [1, 0, 0]
    bench.close()


def test_the_tier_belongs_to_its_device(core, driver: FakeDriver) -> None:
    """A thread of another device, or of none, may call; its context is as it was afterwards."""
    bench = Bench(core, driver, RANDOM)
    block = bench.filled(512, 8)
    for ordinal in (None, 1):
        if ordinal is None:
            driver("cuCtxSetCurrent", None)
        else:
            driver.use_device(ordinal)
        before, after = c.c_void_p(), c.c_void_p()
        driver("cuCtxGetCurrent", c.byref(before))
        slot = bench.tier.write(block, 512)
        assert slot >= 0 and bench.tier.wait(slot) == 0
        driver("cuCtxGetCurrent", c.byref(after))
        if ordinal is not None:
            assert after.value == before.value
    driver.use_device(0)
    bench.device.free(block)
    bench.close()


def test_a_forked_child(core, driver: FakeDriver) -> None:
    bench = Bench(core, driver, THREADED)
    tier = bench.tier
    block = bench.filled(512, 1)
    slot = tier.write(block, 512)
    child = os.fork()
    if child == 0:
        gone = -errno.ECANCELED
        answers = [tier.write(block, 512), tier.read(slot, block), tier.poll(slot), tier.wait(slot)]
        good = answers == [gone] * 4 and tier.bytes(slot) is None and tier.stats.used_bytes == 0
        tier.free(slot)
        tier.close()
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert tier.wait(slot) == 0
    bench.close()


def test_the_file_tier_has_the_same_calls(core, tmp_path) -> None:
    text = c.create_string_buffer(300)
    tier = core.mm_tier_open(os.fsencode(tmp_path), 0, 0, 1, text, len(text))
    assert tier, text.value
    memory = c.create_string_buffer(pattern(3, 4096), 4096)
    slot = core.mm_tier_write(tier, c.addressof(memory), 4096)
    assert core.mm_tier_use(tier, slot, None) == 0 and core.mm_tier_poll(tier, slot) == 1  # it has waited
    assert core.mm_tier_read(tier, slot, c.addressof(memory)) == 0
    assert core.mm_tier_use(tier, slot, None) == 0 and core.mm_tier_poll(tier, slot) == 1
    assert core.mm_tier_bytes(tier, slot) is None
    core.mm_tier_close(tier)


@pytest.mark.parametrize("mode", MODES)
def test_random_programs(core, driver: FakeDriver, mode: int) -> None:
    checks = no_room = reads = 0
    for seed in range(40):
        workload = run_seed(core, driver, seed, mode)
        checks, no_room, reads = checks + workload.checks, no_room + workload.no_room, reads + workload.reads
    assert checks > 1000 and no_room > 100 and reads > 500  # the programs reach all three often


@settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    rng=st.randoms(use_true_random=False),
    seed=st.integers(0, 2**32 - 1),
    mode=st.sampled_from([RANDOM, LATE]),
    slab=st.sampled_from([512, 1536, 4096, 8192, 1 << 20]),
    steps=st.integers(1, 60),
)
def test_any_program(core, loaded_driver: FakeDriver, rng, seed: int, mode: int, slab: int, steps: int) -> None:
    workload = Workload(core, loaded_driver, seed, mode, slab=slab)
    workload.rng = rng
    workload.run(steps)


@pytest.mark.parametrize("mode", MODES)
def test_random_programs_of_two_threads(core, driver: FakeDriver, mode: int) -> None:
    assert sum(run_pair(core, driver, seed, mode) for seed in range(12)) > 500
    assert driver.call_count(b"cuMemUnmap") > 0


def test_the_same_seed_gives_the_same_run(core, driver: FakeDriver) -> None:
    for mode in (RANDOM, LATE):
        runs = [run_seed(core, driver, 7, mode) for _ in range(2)]
        first, second = [(run.checks, run.no_room, run.reads, run.traffic) for run in runs]
        assert first == second


UNIT = 512


def units(size: int) -> int:
    return -(-size // UNIT)


class Slab(Bench):
    """A tier whose slots are known by their offset in the slab."""

    def __init__(self, library, driver: FakeDriver, capacity: int):
        super().__init__(library, driver, PROMPT, capacity)
        self.block = self.device.alloc(1 << 16, None)
        first = self.tier.write(self.block, 1)
        self.start = self.tier.bytes(first)
        self.tier.free(first)

    def take(self, size: int) -> tuple[int, int] | None:
        """(offset, slot), or None."""
        slot = self.tier.write(self.block, size)
        if slot < 0:
            assert slot == -errno.ENOSPC
            return None
        return self.tier.bytes(slot) - self.start, slot


@pytest.mark.parametrize("capacity", [512, 5000, 1 << 15])
@settings(max_examples=50, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(st.tuples(st.booleans(), st.integers(1, 6000)), max_size=80))
def test_random_events(core, loaded_driver: FakeDriver, capacity: int, events: list[tuple[bool, int]]) -> None:
    slab = Slab(core, loaded_driver, capacity)
    room = bytearray(capacity // UNIT)  # 1: taken
    live: dict[int, tuple[int, int]] = {}
    for take, number in events:
        if take:
            holes = [len(hole) for hole in bytes(room).split(b"\1")]
            found = slab.take(number)
            assert (found is None) == (units(number) > max(holes))
            if found is not None:
                offset, slot = found
                place = slice(offset // UNIT, offset // UNIT + units(number))
                assert offset % UNIT == 0 and offset + number <= capacity and not any(room[place])
                room[place] = b"\1" * units(number)
                live[offset] = (number, slot)
        elif live:
            offset = sorted(live)[number % len(live)]
            size, slot = live.pop(offset)
            slab.tier.free(slot)
            room[offset // UNIT : offset // UNIT + units(size)] = bytes(units(size))
        assert slab.tier.stats.used_bytes == sum(room) * UNIT
    for _, slot in live.values():
        slab.tier.free(slot)
    assert slab.take(capacity // UNIT * UNIT) is not None
    slab.close()


def test_best_fit_then_lowest_address(core, driver: FakeDriver) -> None:
    slab = Slab(core, driver, UNIT * 16)
    slots = dict(slab.take(count * UNIT) for count in (3, 1, 2, 1, 2, 1, 4, 1))
    assert list(slots) == [0, 1536, 2048, 3072, 3584, 4608, 5120, 7168]
    for offset in (0, 3584, 2048, 5120):
        slab.tier.free(slots[offset])
    # the lower one of the two holes of 2 units, not the 3 units at 0; then the 4 units shared with the next object
    assert [slab.take(600)[0] for _ in range(3)] == [2048, 3584, 0]
    slab.close()
