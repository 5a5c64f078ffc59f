"""Allocations while a stream is being captured into a graph, and the pools that graphs keep for themselves."""

import ctypes as c
from collections.abc import Iterator

import pytest

from .device_abi import MIB, Device, core_abi
from .fake import LATE, FakeDriver
from .test_device import OpenDevice, calls, device_core, open_device, waits

__all__ = ["device_core", "open_device"]  # fixtures

# Calls that a capture forbids or turns into something else.
ORDERING = ("cuEventRecord", "cuStreamWaitEvent", "cuStreamSynchronize", "cuCtxSynchronize", "cuStreamQuery")


def ordering_calls(driver: FakeDriver) -> int:
    return sum(driver.call_count(name.encode()) for name in ORDERING)


@pytest.fixture
def captured(driver: FakeDriver) -> Iterator[int]:
    """A stream for captures; every capture is ended."""
    driver.reset(0, LATE)
    driver.use_device(0)
    stream = driver.stream()
    yield stream
    driver.set_capturing(stream, 0)


def begin(driver: FakeDriver, device: Device, pages: int) -> tuple[int, int]:
    """Fills the budget with blocks of another stream, frees them with work queued: (stream to capture, that stream)."""
    stream, other = driver.stream(), driver.stream()
    blocks = [device.alloc(2 * MIB, other) for _ in range(pages)]
    for block in blocks:
        driver.fill(other, block, 2 * MIB, 1)
    for block in blocks:
        device.free(block)
    driver.set_capturing(stream, 1)
    return stream, other


def test_a_capture_takes_new_memory_rather_than_wait(open_device: OpenDevice, driver: FakeDriver) -> None:
    device = open_device(budget=16 * MIB)
    between = driver.stream()
    stream, _ = begin(driver, device, 4)
    driver.set_capturing(stream, 0)
    fence = device.alloc(8 * MIB, between)  # memory freed above it is not coalesced with the other stream's runs
    apart = device.alloc(2 * MIB, between)
    driver.fill(between, fence, 8 * MIB, 1)
    device.free(fence)
    driver.set_capturing(stream, 1)
    before = ordering_calls(driver)
    waited = waits(device)
    address = device.alloc(2 * MIB, stream)
    assert address is not None
    assert ordering_calls(driver) == before
    device.free(address)
    assert device.alloc(2 * MIB, stream) == address  # its own it may have again
    assert ordering_calls(driver) == before
    assert waits(device) == waited
    driver.set_capturing(stream, 0)
    device.free(address)
    device.free(apart)


def test_a_capture_does_not_reclaim_and_ends_in_null(open_device: OpenDevice, driver: FakeDriver) -> None:
    device = open_device(budget=16 * MIB)
    device.on_reclaim(lambda *_: pytest.fail("reclaim was called"))
    stream, other = begin(driver, device, 8)  # all pages of the budget are another stream's
    before = ordering_calls(driver)
    assert device.alloc(2 * MIB, stream) is None
    assert device.try_alloc(2 * MIB, stream) is None
    assert device.alloc(100, stream) is None
    assert ordering_calls(driver) == before
    driver.set_capturing(stream, 0)
    address = device.alloc(2 * MIB, stream)
    assert address is not None
    assert waits(device) == 1
    device.free(address)
    device.on_reclaim(lambda *_: 0)
    small = device.alloc(100, other)
    assert small is not None
    device.free(small)


def test_pages_are_mapped_in_relaxed_mode(open_device: OpenDevice, driver: FakeDriver) -> None:
    """The double refuses to map while anything is captured, unless the thread said otherwise before."""
    device = open_device(budget=64 * MIB)
    stream = driver.stream()
    driver.set_capturing(stream, 1)
    mine, others = device.alloc(4 * MIB, stream), device.alloc(4 * MIB, driver.stream())
    assert mine is not None and others is not None
    driver.set_capturing(stream, 0)
    assert driver.capture_violations() == 0
    device.free(mine)
    device.free(others)


def test_others_do_not_wait_for_a_stream_in_capture(open_device: OpenDevice, driver: FakeDriver) -> None:
    """Its tail cannot be recorded: blocks that it touched are left alone, and pages that it touched stay where they are."""
    device = open_device(budget=16 * MIB)
    stream, other = driver.stream(), driver.stream()
    touched = device.alloc(8 * MIB, stream)
    driver.fill(stream, touched, 8 * MIB, 1)
    device.free(touched)
    driver.set_capturing(stream, 1)
    address = device.alloc(8 * MIB, other)
    assert address is not None and address != touched
    assert device.alloc(8 * MIB, other) is None
    assert device.trim() == 0
    assert device.synchronize() != 0
    assert device.close() == -1
    assert driver.capture_violations() == 0
    driver.set_capturing(stream, 0)
    again = device.alloc(8 * MIB, other)
    assert again == touched
    device.free(address)
    assert device.close() == -1
    device.free(again)


def test_a_pool_keeps_its_memory(open_device: OpenDevice, driver: FakeDriver, captured: int) -> None:
    device = open_device(budget=32 * MIB)
    assert device.begin_pool(7) == 0
    pooled, small = device.alloc(4 * MIB, captured), device.alloc(100, captured)
    device.free(pooled)
    assert device.alloc(2 * MIB, captured) == pooled  # reused in the pool
    device.free(pooled)
    device.free(small)
    assert device.end_pool(7) == 0
    # Outside of it the memory has no owner, and counts.
    assert device.arena_stats.live_bytes == 0
    assert device.core.mm_arena_resident(device.arena) == 4 * MIB + 512
    assert device.alloc(30 * MIB, captured) is None
    other = device.alloc(4 * MIB, captured)
    assert other != pooled
    assert device.trim() == 0
    # A second capture with the same pool may use it.
    assert device.begin_pool(7) == 0
    assert device.alloc(4 * MIB, captured) == pooled
    device.free(pooled)
    assert device.end_pool(7) == 0
    assert device.stats.pools == 1
    assert device.release_pool(7) == 0
    assert device.stats.pools == 1  # begun twice
    assert device.release_pool(7) == 0
    assert device.stats.pools == 0
    device.free(other)
    whole = device.alloc(32 * MIB, captured)
    assert whole is not None
    device.free(whole)


def test_a_pool_lives_until_its_blocks_are_free(open_device: OpenDevice, driver: FakeDriver, captured: int) -> None:
    device = open_device(budget=32 * MIB)
    device.begin_pool(7)
    first, second = device.alloc(4 * MIB, captured), device.alloc(4 * MIB, captured)
    device.end_pool(7)
    device.free(first)
    device.release_pool(7)
    assert device.stats.pools == 1
    assert device.core.mm_arena_resident(device.arena) == 8 * MIB
    device.free(second)
    assert device.stats.pools == 0
    assert device.core.mm_arena_resident(device.arena) == 0


def test_memory_of_a_released_pool_waits_for_replays_anywhere(
    open_device: OpenDevice, driver: FakeDriver, captured: int
) -> None:
    device = open_device(budget=8 * MIB)
    wrong = c.c_uint64()
    device.begin_pool(7)
    driver.set_capturing(captured, 1)
    address = device.alloc(8 * MIB, captured)
    driver.fill(captured, address, 8 * MIB, 1)
    driver.check(captured, address, 8 * MIB, 1, wrong)
    driver.set_capturing(captured, 0)
    device.free(address)
    device.end_pool(7)
    driver.replay(captured, driver.stream())  # a stream that we never saw
    device.release_pool(7)
    assert device.alloc(8 * MIB, captured) == address
    assert driver.outstanding(b"work") == 0
    driver.fill(captured, address, 8 * MIB, 2)
    driver.drain()
    assert wrong.value == 0
    before = calls(driver)
    device.free(address)
    assert device.alloc(8 * MIB, captured) == address  # after that it is like any other
    assert calls(driver) == before
    device.free(address)


def test_who_gets_a_pools_memory_waits_for_replays_after_its_free(
    open_device: OpenDevice, driver: FakeDriver, captured: int
) -> None:
    """It was free when a mark of the graph's stream passed; the replay is queued behind that."""
    device = open_device(budget=8 * MIB)
    other, wrong = driver.stream(), c.c_uint64()
    device.begin_pool(7)
    driver.set_capturing(captured, 1)
    address = device.alloc(8 * MIB, captured)
    driver.fill(captured, address, 8 * MIB, 1)
    device.free(address)
    driver.set_capturing(captured, 0)
    device.core.mm_device_mark(device.handle, captured)
    driver.replay(captured, captured)
    assert device.alloc(8 * MIB, other) == address
    driver.fill(other, address, 8 * MIB, 2)
    driver("cuStreamSynchronize", other)
    driver.drain()
    driver.check(other, address, 8 * MIB, 2, wrong)
    driver("cuStreamSynchronize", other)
    assert wrong.value == 0
    device.free(address)
    device.end_pool(7)
    device.release_pool(7)


def test_a_search_does_not_count_on_pools(open_device: OpenDevice, driver: FakeDriver, captured: int) -> None:
    device = open_device(budget=32 * MIB)
    device.begin_pool(7)
    address = device.alloc(4 * MIB, captured)
    device.end_pool(7)

    price = core_abi.Price(address, address, 1.0, 0.0)
    device.core.mm_arena_price(device.arena, price, 1)
    assert device.core.mm_arena_choose(device.arena, MIB, MIB, 1.0, None, 0) == -1
    device.free(address)
    device.release_pool(7)


def test_pools_that_nobody_began(open_device: OpenDevice) -> None:
    device = open_device(budget=32 * MIB)
    assert device.end_pool(7) == -1
    assert device.release_pool(7) == -1
    assert device.begin_pool(7) == 0
    assert device.end_pool(8) == -1
    assert device.end_pool(7) == 0
    assert device.end_pool(7) == -1
    assert device.release_pool(7) == 0
    assert device.release_pool(7) == -1


def test_pools_may_nest_and_run_out(open_device: OpenDevice, driver: FakeDriver, captured: int) -> None:
    device = open_device(budget=32 * MIB)
    begun = 0
    while device.begin_pool(begun) == 0:
        begun += 1
    assert begun == 254
    last = device.alloc(2 * MIB, captured)
    device.end_pool(begun - 1)
    before_last = device.alloc(2 * MIB, captured)
    device.free(last)
    device.free(before_last)
    assert device.alloc(2 * MIB, captured) == before_last  # each has its own
    device.free(before_last)
    for pool in range(begun - 1):
        assert device.end_pool(pool) == 0
    for pool in range(begun):
        assert device.release_pool(pool) == 0
    assert device.stats.pools == 0
    assert device.begin_pool(1) == 0
    assert device.end_pool(1) == 0
