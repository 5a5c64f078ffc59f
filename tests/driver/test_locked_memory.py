"""Page-locked memory grows in pieces, ahead of need. The sizes are a thousandth of a real tier's, but for one test."""

import ctypes as c
import errno
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from threads import in_threads

from .fake import LATE, NOT_SUPPORTED, OUT_OF_MEMORY, PROMPT, RANDOM, THREADED, FakeDriver
from .test_host_tier import Bench
from .tier_abi import HostTier
from .workload import pattern, run_seed

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
FIRST, PIECE = 64 * KIB, MIB
MODES = [PROMPT, RANDOM, LATE, THREADED]


def settled(what: Callable[[], object], seconds: float = 20) -> object:
    """Returns the function's value once it has been the same for 0.1 s, at the latest after `seconds`."""
    until, last, since = time.monotonic() + seconds, what(), time.monotonic()
    while time.monotonic() < until and time.monotonic() - since < 0.1:
        time.sleep(0.005)
        if (now := what()) != last:
            last, since = now, time.monotonic()
    return last


def locked(driver: FakeDriver) -> int:
    """Page-locked bytes once nothing is being locked any more."""
    return settled(lambda: driver.outstanding(b"host bytes"))


class Tier(Bench):
    """A bench whose tier grows."""

    def __init__(self, library: c.CDLL, driver: FakeDriver, mode: int = PROMPT, capacity: int = 20 * MIB):
        super().__init__(library, driver, mode, capacity)

    def park(self, size: int, value: int) -> int:
        """Writes a block's bytes and frees the block. Returns the slot, or the tier's error."""
        block = self.filled(size, value)
        slot = self.tier.write_now(block, size)
        self.device.free(block)
        return slot

    def check_slot(self, slot: int, size: int, value: int) -> None:
        block = self.device.alloc(size, self.stream)
        assert self.tier.read_now(slot, block) == 0
        self.check(block, size, value)
        self.device.free(block)


@pytest.fixture
def small(core) -> Iterator[c.CDLL]:
    core.mm_test_lock_pieces(FIRST, PIECE, 1)
    yield core
    core.mm_test_lock_pieces(0, 0, 1)


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_opening_locks_little_of_twenty_gigabytes(core, driver: FakeDriver) -> None:
    before = threads()
    bench = Tier(core, driver, capacity=20 * GIB)
    assert bench.tier.stats.capacity_bytes == 20 * GIB
    assert 64 * MIB <= driver.outstanding(b"host bytes") <= 64 * MIB + GIB
    bench.close()  # a piece that is being locked is given up
    assert settled(threads) == before


def test_the_time_of_locking_is_counted(small, driver: FakeDriver) -> None:
    begun = time.monotonic()
    bench = Tier(small, driver, capacity=6 * MIB)
    opened = bench.tier.stats
    assert 0 < opened.lock_wait_nanoseconds <= opened.lock_nanoseconds
    locked(driver)
    ahead = bench.tier.stats
    assert ahead.lock_nanoseconds > ahead.lock_wait_nanoseconds == opened.lock_wait_nanoseconds
    bench.park(6 * MIB, 1)  # waits for a piece of its own
    last = bench.tier.stats
    assert last.lock_wait_nanoseconds > ahead.lock_wait_nanoseconds
    assert ahead.lock_nanoseconds < last.lock_nanoseconds < 1e9 * (time.monotonic() - begun)
    bench.close()


def test_only_the_next_piece_is_locked_ahead(small, driver: FakeDriver) -> None:
    bench = Tier(small, driver)
    assert locked(driver) == FIRST + PIECE
    assert driver.outstanding(b"host") == 2
    bench.close()


# The growth is the host's own work: the order of the device's adds nothing.
@pytest.mark.parametrize(
    "mode", [*(pytest.param(mode, marks=pytest.mark.slow) for mode in (PROMPT, RANDOM)), LATE, THREADED]
)
@pytest.mark.parametrize("size", [64 * KIB, 100_000])
def test_growth_is_ahead_of_need_and_ends_at_the_capacity(small, driver: FakeDriver, mode: int, size: int) -> None:
    bench = Tier(small, driver, mode, capacity=6 * MIB)
    slots: list[int] = []
    while (slot := bench.park(size, len(slots))) >= 0:
        slots.append(slot)
        used = bench.tier.stats.used_bytes
        assert used <= driver.outstanding(b"host bytes") <= used + FIRST + 1.5 * PIECE + size
        if len(slots) % 10 == 0:
            assert locked(driver) - used >= min(PIECE // 2, 6 * MIB - used) - size * driver.outstanding(b"host")
    assert slot == -errno.ENOSPC
    stats = bench.tier.stats
    assert stats.capacity_bytes == driver.outstanding(b"host bytes") == 6 * MIB
    # A slot lies in one piece, so each may have an end that is too small for one.
    assert stats.used_bytes > 6 * MIB - size * driver.outstanding(b"host")
    for value, slot in enumerate(slots):
        bench.check_slot(slot, size, value)
        bench.tier.free(slot)
    assert bench.park(size, 1) >= 0
    bench.close()


def test_a_piece_that_cannot_be_locked_ends_the_growth(small, driver: FakeDriver) -> None:
    driver.reset(5, PROMPT)  # as the bench would
    bench = Tier(small, driver, capacity=8 * KIB)
    driver.fail_next(b"cuMemHostRegister", 1, OUT_OF_MEMORY)
    tier = HostTier(bench.device, 20 * MIB)
    assert settled(lambda: tier.stats.capacity_bytes) == FIRST
    block = bench.filled(FIRST + 1, 1)
    assert tier.write(block, FIRST + 1) == -errno.ENOSPC
    slot = tier.write(block, FIRST)
    assert slot >= 0 and tier.write(block, 1) == -errno.ENOSPC
    tier.free(slot)
    assert tier.write_now(block, 1) >= 0
    calls = driver.call_count(b"cuMemHostRegister")
    assert settled(lambda: driver.call_count(b"cuMemHostRegister")) == calls
    tier.close()
    bench.close()


def test_what_the_slab_cannot_hold_goes_to_the_file(small, driver: FakeDriver, tmp_path: Path) -> None:
    """The ladder counts with the locked bytes, not with the bytes that were asked for."""
    bench = Tier(small, driver, capacity=8 * KIB)
    driver.fail_next(b"cuMemHostRegister", 1, OUT_OF_MEMORY)
    tier = HostTier(bench.device, 20 * MIB, tmp_path, 20 * MIB)
    settled(lambda: tier.stats.capacity_bytes)
    assert tier.stats.capacity_bytes == FIRST + 20 * MIB
    size, slots = 16 * KIB, []
    for value in range(12):
        block = bench.filled(size, value)
        slots.append(tier.write_now(block, size))
        bench.device.free(block)
    assert min(slots) >= 0
    assert tier.stats.file_bytes >= 12 * size - FIRST
    for value, slot in enumerate(slots):
        block = bench.device.alloc(size, bench.stream)
        assert tier.read_now(slot, block) == 0
        bench.check(block, size, value)
        bench.device.free(block)
    large = bench.filled(FIRST + 1, 1)
    assert tier.write_now(large, FIRST + 1) == -errno.ENOSPC
    tier.close()
    bench.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_block_as_large_as_the_capacity_has_room(small, driver: FakeDriver, mode: int) -> None:
    bench = Tier(small, driver, mode, capacity=6 * MIB)
    assert locked(driver) == FIRST + PIECE
    tier = bench.tier
    for value in range(2):
        slot = bench.park(6 * MIB, value)
        assert slot >= 0 and driver.outstanding(b"host") == 1
        assert driver.outstanding(b"host bytes") == tier.stats.used_bytes == 6 * MIB
        bench.check_slot(slot, 6 * MIB, value)
        tier.free(slot)
        small_ones = [bench.park(size, 3) for size in (512, 100 * KIB, MIB)]
        for slot, size in zip(small_ones, (512, 100 * KIB, MIB), strict=True):
            bench.check_slot(slot, size, 3)
            tier.free(slot)
    bench.close()


def test_a_large_block_leaves_what_is_in_use(small, driver: FakeDriver) -> None:
    bench = Tier(small, driver, capacity=6 * MIB)
    locked(driver)
    kept = bench.park(FIRST, 7)  # the first piece
    assert bench.park(6 * MIB - FIRST + 1, 1) == -errno.ENOSPC
    large = bench.park(6 * MIB - FIRST, 2)
    assert large >= 0
    assert driver.outstanding(b"host") == 2
    bench.check_slot(kept, FIRST, 7)
    bench.check_slot(large, 6 * MIB - FIRST, 2)
    bench.close()


def test_a_large_block_that_is_refused_ends_nothing(small, driver: FakeDriver) -> None:
    bench = Tier(small, driver, capacity=6 * MIB)
    locked(driver)
    driver.fail_next(b"cuMemHostRegister", 0, OUT_OF_MEMORY)
    assert bench.park(6 * MIB, 1) == -errno.ENOSPC
    assert locked(driver) == FIRST + PIECE and driver.outstanding(b"host") == 2  # as before
    calls = driver.call_count(b"cuMemHostRegister")
    assert bench.park(6 * MIB, 1) == -errno.ENOSPC
    assert driver.call_count(b"cuMemHostRegister") == calls  # not tried again
    assert bench.tier.stats.capacity_bytes == 6 * MIB
    slots = [bench.park(MIB, value) for value in range(5)]
    assert min(slots) >= 0
    for value, slot in enumerate(slots):
        bench.check_slot(slot, MIB, value)
    bench.close()


def test_what_cannot_be_locked_again_is_no_longer_counted(small, driver: FakeDriver) -> None:
    """Neither the large piece nor the two that it was to be made of."""
    bench = Tier(small, driver, capacity=4 * MIB)
    locked(driver)
    driver.fail_times(b"cuMemHostRegister", 3, OUT_OF_MEMORY)
    assert bench.park(4 * MIB, 1) == -errno.ENOSPC
    assert locked(driver) == PIECE  # the next one
    assert bench.tier.stats.capacity_bytes == 3 * MIB - FIRST
    slots = [bench.park(MIB, value) for value in range(2)]
    assert min(slots) >= 0
    for value, slot in enumerate(slots):
        bench.check_slot(slot, MIB, value)
    bench.close()


@pytest.mark.parametrize("left_out", [False, True])
def test_copies_of_freed_slots_end_before_their_piece_is_unlocked(small, driver: FakeDriver, left_out: bool) -> None:
    bench = Tier(small, driver, LATE, capacity=3 * MIB)
    driver.set_lenient(1)
    locked(driver)
    block = bench.filled(FIRST, 1)
    bench.tier.free(bench.tier.write(block, FIRST))  # its copy has not begun
    whole = bench.filled(3 * MIB, 2)
    assert small.mm_test_leave_out(b"relock.copies" if left_out else b"") == 0
    slot = bench.tier.write(whole, 3 * MIB)
    small.mm_test_leave_out(b"")
    assert slot >= 0
    bench.check_slot(slot, 3 * MIB, 2)
    assert (driver.illegal_uses() > 0) == left_out
    driver.drain()
    bench.close()


def test_a_write_waits_for_the_piece_that_it_needs(small, driver: FakeDriver) -> None:
    """Several threads at once, each with more than is locked."""
    bench = Tier(small, driver, THREADED, capacity=20 * MIB)
    blocks = [bench.filled(900 * KIB, value) for value in range(16)]
    slots: dict[int, int] = {}

    def write(value: int) -> None:
        driver.use_device(0)
        slots[value] = bench.tier.write(blocks[value], 900 * KIB)

    in_threads(write, range(16))
    assert len(slots) == 16 and min(slots.values()) >= 0
    for value, slot in slots.items():
        bench.check_slot(slot, 900 * KIB, value)
    bench.close()


def test_a_fork_while_memory_is_locked(core, driver: FakeDriver) -> None:
    core.mm_test_lock_pieces(MIB, 128 * MIB, 1)
    bench = Tier(core, driver, THREADED, capacity=300 * MIB)
    core.mm_test_lock_pieces(0, 0, 1)
    tier = bench.tier
    block = bench.filled(KIB, 1)
    slot = tier.write(block, KIB)
    for _ in range(4):
        child = os.fork()
        if child == 0:
            gone = -errno.ECANCELED
            good = [tier.write(block, KIB), tier.read(slot, block), tier.wait(slot)] == [gone] * 3
            tier.free(slot)
            tier.close()
            os._exit(0 if good and tier.bytes(slot) is None else 1)
        assert os.waitpid(child, 0)[1] == 0
        time.sleep(0.02)
    assert "dc" in flags_of(tier.bytes(slot))  # a child does not get it: it would copy the locked memory
    assert bench.park(MIB, 2) >= 0  # the thread goes on here
    assert tier.stats.capacity_bytes == 300 * MIB
    bench.close()


def flags_of(address: int) -> list[str]:
    """The kernel's flags of the mapping there."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            begin, end = (int(part, 16) for part in words[0].split("-"))
            inside = begin <= address < end
        elif inside and words[0] == "VmFlags:":
            return words[1:]
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_closing_while_memory_is_locked(core, driver: FakeDriver) -> None:
    before = threads()
    core.mm_test_lock_pieces(MIB, 512 * MIB, 1)
    bench = Tier(core, driver, THREADED, capacity=8 * KIB)
    calls = driver.call_count(b"cuMemHostRegister")
    delays = (0, 0, 0.005, 0.01)
    for delay in delays:
        tier = HostTier(bench.device, GIB)
        time.sleep(delay)
        tier.close()
        assert driver.outstanding(b"host") == 1  # the bench's
    assert driver.call_count(b"cuMemHostRegister") == calls + len(delays)  # pieces that were being touched are given up
    core.mm_test_lock_pieces(0, 0, 1)
    bench.close()
    driver.reset(0, PROMPT)
    assert settled(threads) == before


def test_a_capture_elsewhere_is_left_alone(small, driver: FakeDriver) -> None:
    bench = Tier(small, driver, capacity=8 * KIB)
    other = driver.stream()
    driver.set_capturing(other, 1)
    tier = HostTier(bench.device, 20 * MIB)
    assert locked(driver) == FIRST + PIECE + 8 * KIB
    tier.close()
    assert driver.capture_violations() == 0
    driver.set_capturing(other, 0)
    bench.close()


def test_a_driver_that_cannot_register_allocates(small, driver: FakeDriver) -> None:
    bench = Tier(small, driver, capacity=8 * KIB)
    driver.fail_next(b"cuMemHostRegister", 0, NOT_SUPPORTED)
    tier = HostTier(bench.device, 2 * MIB)
    assert driver.outstanding(b"host bytes") == 2 * MIB + 8 * KIB
    block = bench.filled(2 * MIB, 3)
    slot = tier.write(block, 2 * MIB)
    assert slot >= 0 and c.string_at(tier.bytes(slot), 999) == pattern(3, 999)
    tier.close()
    driver.fail_next(b"cuMemHostRegister", 0, NOT_SUPPORTED)
    driver.fail_next(b"cuMemHostAlloc", 0, OUT_OF_MEMORY)
    with pytest.raises(OSError, match=r"cannot page-lock 2097152 bytes of host memory: out of memory .*host="):
        HostTier(bench.device, 2 * MIB)
    bench.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("below", [0, 64 << 10])
def test_random_programs_while_it_grows(core, driver: FakeDriver, mode: int, below: int, tmp_path: Path) -> None:
    """Blocks of up to half a piece; of more than one; and a file below."""
    more = {"folder": tmp_path, "below": below} if below else {}
    checks = 0
    for seed, first in itertools.product(range(8), (4096, 1)):
        core.mm_test_lock_pieces(first, 4096, 1)
        checks += run_seed(core, driver, seed, mode, slab=3 * 4096 + 512, **more).checks
    core.mm_test_lock_pieces(0, 0, 1)
    assert checks > 300
