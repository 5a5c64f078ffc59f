"""A driver that says no: every call in turn, and a device whose memory others have."""

import ctypes as c

import pytest

from .device_abi import MAPPED, MIB, PLAIN, Device
from .fake import (
    CONTEXT_IS_DESTROYED,
    ILLEGAL_ADDRESS,
    INVALID_CONTEXT,
    INVALID_HANDLE,
    LATE,
    NOT_READY,
    OUT_OF_MEMORY,
    FakeDriver,
)
from .test_device import OpenDevice, device_core, open_device

__all__ = ["device_core", "open_device"]  # fixtures

# cuMemRelease is not listed: a handle that the driver does not take back is lost in any case.
CALLS = (
    "cuCtxGetCurrent cuCtxSynchronize cuEventCreate cuEventRecord cuMemCreate cuMemMap cuMemSetAccess cuMemUnmap cuStreamIsCapturing cuStreamQuery cuStreamSynchronize cuStreamWaitEvent"
    " cuThreadExchangeStreamCaptureMode"
).split()


def scenario(driver: FakeDriver, device: Device, streams: list[int]) -> None:
    """Allocations, waits, remaps and trims. After any refusal, all memory that was handed out is free again at the end."""
    live: list[int] = []
    for round_ in range(3):
        for index, stream in enumerate(streams):
            for size in (100, 2 * MIB, 3 * MIB):
                address = device.alloc(size + index * 1000, stream)
                if address is not None:
                    driver.fill(stream, address, size, index)
                    live.append(address)
        for address in live[round_::2]:
            device.free(address)
            live.remove(address)
        large = device.alloc(9 * MIB, streams[round_])
        if large is not None:
            driver.fill(streams[round_], large, 9 * MIB, 1)
            device.free(large)
        device.trim(4 * MIB)
    for address in live:
        device.free(address)
    device.synchronize()


# Calls that get memory are refused for want of it, the others for a wrong handle. The other code of each call is slow.
OF_MEMORY = {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuEventCreate"}
ORDINARY = [(name, OUT_OF_MEMORY if name in OF_MEMORY else INVALID_HANDLE) for name in CALLS]
REFUSALS = [
    pytest.param(name, code, marks=[] if (name, code) in ORDINARY else [pytest.mark.slow])
    for name in CALLS
    for code in (OUT_OF_MEMORY, INVALID_HANDLE)
]


@pytest.mark.parametrize(("name", "code"), REFUSALS)
def test_every_call_may_fail_once(device_core, driver: FakeDriver, name: str, code: int) -> None:
    """Nothing crashes, nothing leaks, and the next allocations work."""
    after = 0
    while True:
        driver.reset(after, LATE)
        driver.use_device(0)
        device = Device(device_core, driver, budget=16 * MIB)
        streams = [driver.stream() for _ in range(3)]
        before = driver.call_count(name.encode())
        driver.fail_next(name.encode(), after, code)
        scenario(driver, device, streams)
        count = driver.call_count(name.encode()) - before
        driver.fail_next(name.encode(), 1 << 30, 0)
        scenario(driver, device, streams)
        whole = device.alloc(16 * MIB, streams[0])
        assert whole is not None
        device.free(whole)
        assert device.close() == 0
        for what in (b"handles", b"maps", b"reservations", b"events", b"bytes"):
            assert driver.outstanding(what) == 0, (what, after)
        if after >= count or after > 60:
            break
        after += 1 if after < 6 else 7
    assert after > 0


@pytest.mark.parametrize("memory", [MAPPED, PLAIN])
def test_open_fails_cleanly(device_core, driver: FakeDriver, memory: int) -> None:
    names = ("cuMemGetInfo", "cuMemGetAllocationGranularity", "cuMemAddressReserve")
    for name in names if memory == MAPPED else ("cuMemGetInfo", "cuMemAlloc"):
        # The arena asks again with fewer addresses, so that one refusal of those is not the end.
        driver.fail_next(name.encode(), 0, OUT_OF_MEMORY)
        try:
            Device(device_core, driver, budget=16 * MIB, memory=memory).close()
            assert name == "cuMemAddressReserve"
        except MemoryError as error:
            assert str(error)
        assert driver.outstanding(None) == 0
    driver.set_memory(8 * MIB)
    if memory == PLAIN:
        with pytest.raises(MemoryError):
            Device(device_core, driver, budget=16 * MIB, memory=memory)


def test_an_error_that_stays_is_not_taken_for_missing_memory(open_device: OpenDevice, driver: FakeDriver) -> None:
    device = open_device(budget=64 * MIB)
    why = c.create_string_buffer(400)
    assert device.core.mm_device_broken(device.handle, why, len(why)) == 0
    block = device.alloc(4 * MIB)
    driver.break_(ILLEGAL_ADDRESS)
    assert device.alloc(8 * MIB) is None  # needs pages
    assert device.core.mm_device_broken(device.handle, why, len(why)) == ILLEGAL_ADDRESS
    assert why.value.startswith(b"an illegal memory access was encountered (driver error 700); ")
    assert why.value.endswith(b"memmgr.pin(tensor) keeps it there")
    driver.break_(INVALID_HANDLE)
    assert device.core.mm_device_broken(device.handle, why, len(why)) == INVALID_HANDLE
    assert b"memmgr.pin" not in why.value
    driver.break_(0)
    device.free(block)


@pytest.mark.parametrize("code", [INVALID_CONTEXT, CONTEXT_IS_DESTROYED])
def test_a_context_that_has_ended_is_named_so(open_device: OpenDevice, driver: FakeDriver, code: int) -> None:
    device = open_device(budget=64 * MIB)
    why = c.create_string_buffer(400)
    driver.break_(code)
    assert device.alloc(4 * MIB) is None
    assert device.core.mm_device_broken(device.handle, why, len(why)) == code
    assert f"(driver error {code}); the device's context has ended, after cudaDeviceReset".encode() in why.value
    assert why.value.endswith(b"the process has to be started anew")
    driver.break_(0)


def test_what_others_have_is_reclaimed_here(open_device: OpenDevice, driver: FakeDriver) -> None:
    """The budget allows it, the device does not: spare pages are given back elsewhere, then reclaim is told."""
    device = open_device(budget=64 * MIB)
    driver.set_memory(32 * MIB)
    stream, other = driver.stream(), driver.stream()
    vault = [device.alloc(4 * MIB, stream) for _ in range(4)]
    theirs = driver.alloc(16 * MIB)
    asked: list[tuple[int, int]] = []

    def reclaim(need: int, request: int, _attempt: int) -> int:
        asked.append((need, request))
        if not vault:
            return 0
        device.core.mm_device_free(device.handle, vault.pop(0))
        return 4 * MIB

    device.on_reclaim(reclaim)
    for block in vault:
        driver.fill(stream, block, 4 * MIB, 1)
    address = device.alloc(10 * MIB, other)
    assert address is not None
    assert len(vault) == 1
    assert all(need > 0 and request == 10 * MIB for need, request in asked)
    assert driver.outstanding(b"bytes") <= 32 * MIB
    # Not even with everything that there is: NULL, and all is as it was.
    assert device.alloc(20 * MIB, other) is None
    assert not vault
    driver("cuMemFree_v2", theirs)
    again = device.alloc(20 * MIB, other)
    assert again is not None
    device.free(address)
    device.free(again)


def test_spare_pages_elsewhere_make_room_without_reclaim(open_device: OpenDevice, driver: FakeDriver) -> None:
    device = open_device(budget=64 * MIB)
    device.on_reclaim(lambda *_: pytest.fail("reclaim was called"))
    driver.set_memory(16 * MIB)
    stream = driver.stream()
    blocks = [device.alloc(2 * MIB, stream) for _ in range(8)]
    for block in blocks:
        driver.fill(stream, block, 2 * MIB, 1)
    for block in blocks[::2]:
        device.free(block)
    address = device.alloc(8 * MIB, stream)
    assert address is not None
    assert driver.outstanding(b"bytes") == 16 * MIB
    for block in [address, *blocks[1::2]]:
        device.free(block)


@pytest.mark.parametrize("integrated", [False, True])
def test_what_is_far_from_fitting_is_not_tried_page_by_page(
    open_device: OpenDevice, driver: FakeDriver, integrated: bool
) -> None:
    """But where the memory is the host's: its caches are not free, and yet to be had."""
    driver.set_integrated(integrated)
    device = open_device()
    before = driver.call_count(b"cuMemCreate")
    assert device.alloc(3 << 30) is None  # the device has a gibibyte
    assert (driver.call_count(b"cuMemCreate") > before) == integrated


def test_access_that_is_not_ready_yet_is_asked_for_again(open_device: OpenDevice, driver: FakeDriver) -> None:
    device = open_device(budget=64 * MIB)
    driver.fail_times(b"cuMemSetAccess", 3, NOT_READY)
    before = driver.call_count(b"cuMemSetAccess")
    address = device.alloc(2 * MIB)
    assert address is not None and device.stats.driver_errors == 0
    assert driver.call_count(b"cuMemSetAccess") - before == 4
    device.free(address)


@pytest.mark.parametrize(("refusals", "given"), [(1, 16), (2, 0)])
def test_a_run_that_cannot_be_unmapped_in_one_call_goes_page_by_page(
    open_device: OpenDevice, driver: FakeDriver, refusals: int, given: int
) -> None:
    """Nothing goes where the first of its pages is refused, too; a later trim finds all of them again."""
    device = open_device(budget=64 * MIB)
    device.free(device.alloc(16 * MIB))
    before = driver.call_count(b"cuMemUnmap")
    driver.fail_times(b"cuMemUnmap", refusals, INVALID_HANDLE)
    assert device.trim() == given * MIB
    assert driver.outstanding(b"bytes") == (16 - given) * MIB
    assert driver.call_count(b"cuMemUnmap") - before == (9 if given else 2)
    assert device.stats.driver_errors == refusals
    assert device.trim() == (16 - given) * MIB
    assert device.stats.unmaps == 8 and driver.outstanding(b"maps") == 0


def test_a_refused_map_changes_nothing(open_device: OpenDevice, driver: FakeDriver) -> None:
    device = open_device(budget=64 * MIB)
    device.free(device.alloc(2 * MIB))
    driver.fail_next(b"cuMemMap", 3, OUT_OF_MEMORY)
    before = device.stats.maps
    address = device.alloc(20 * MIB)
    assert address is not None  # pages mapped before the refusal went back, and the second try found all
    assert device.stats.maps == before + 3 + 9
    device.free(address)
    assert device.stats.driver_errors == 0  # no memory is no error
