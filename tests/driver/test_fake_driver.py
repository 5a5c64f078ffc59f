"""The double itself: it is late, it keeps order only where it must, and it does not forgive."""

import ctypes as c
import os
import subprocess
import sys
import textwrap

import pytest

from .fake import (
    ALREADY_REGISTERED,
    CAPTURE_UNSUPPORTED,
    HOST_FN,
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALID_VALUE,
    LATE,
    NOT_INITIALIZED,
    NOT_READY,
    NOT_REGISTERED,
    OUT_OF_MEMORY,
    PROMPT,
    RANDOM,
    THREADED,
    Access,
    AllocationProperties,
    FakeDriver,
    Location,
)

SIZE = 4096
MODES = [PROMPT, RANDOM, LATE, THREADED]


def ends_with(path, body: str) -> tuple[int, str]:
    """Runs ``body`` on the double in a process of its own: (exit status, stderr)."""
    text = "from tests.driver.fake import *\nfrom pathlib import Path\n"
    text += f"d = FakeDriver(Path({str(path)!r}))\nd.use_device(0)\n{textwrap.dedent(body)}"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ordered", [True, False])
def test_only_an_event_orders_two_streams(driver: FakeDriver, mode: int, ordered: bool) -> None:
    wrong_once = False
    for seed in range(40):
        driver.reset(seed, mode)
        a, b, event = driver.stream(), driver.stream(), driver.event()
        memory, wrong = driver.alloc(SIZE), c.c_uint64(0)
        driver.fill(a, memory, SIZE, 3)
        driver("cuEventRecord", event, a)
        if ordered:
            driver("cuStreamWaitEvent", b, event, 0)
        driver("cuEventDestroy_v2", event)  # a stream that waits for it still does
        driver.check(b, memory, SIZE, 3, wrong)
        driver("cuStreamSynchronize", b)
        wrong_once = wrong_once or wrong.value > 0
    assert wrong_once == (not ordered and mode != PROMPT)


def test_late_work_runs_when_somebody_waits(driver: FakeDriver) -> None:
    for _ in range(100):  # of many queries one runs something; a reset begins to count anew
        driver.reset(0, LATE)
        stream, event, ran = driver.stream(), driver.event(), []
        note = HOST_FN(lambda _, ran=ran: ran.append(driver.cuMemGetInfo_v2(None, None)))
        driver("cuLaunchHostFunc", stream, note, None)
        driver("cuEventRecord", event, stream)
        assert driver.cuEventQuery(event) == NOT_READY and not ran
        driver("cuEventSynchronize", event)
        assert ran == [800]  # a host function may not call the driver
        assert driver.cuStreamQuery(stream) == 0


@pytest.mark.parametrize("mode", MODES)
def test_copies(driver: FakeDriver, mode: int) -> None:
    driver.reset(7, mode)
    stream, a, b, host = driver.stream(), driver.alloc(SIZE), driver.alloc(SIZE), driver.host_alloc(SIZE)
    text = bytes(range(256)) * (SIZE // 256)
    pageable = c.create_string_buffer(text, SIZE)
    driver("cuMemcpyHtoDAsync_v2", a, c.addressof(pageable), SIZE, stream)
    c.memset(pageable, 0, SIZE)  # pageable memory was read before the call returned
    driver("cuMemcpyDtoDAsync_v2", b, a, SIZE, stream)
    driver("cuMemcpyDtoHAsync_v2", host, b, SIZE, stream)
    driver("cuStreamSynchronize", stream)
    assert c.string_at(host, SIZE) == text
    driver("cuMemcpyDtoHAsync_v2", c.addressof(pageable), b, SIZE, stream)
    assert pageable.raw == text
    assert driver.cuMemcpyDtoDAsync_v2(b, a, SIZE + 1, stream) == INVALID_VALUE


def test_a_copy_stays_inside_what_was_registered_at_once(driver: FakeDriver) -> None:
    stream, block = driver.stream(), driver.alloc(SIZE)
    memory = c.create_string_buffer(2 * SIZE)
    start = c.addressof(memory)
    for part in (start, start + SIZE):
        driver("cuMemHostRegister_v2", part, SIZE, 1)
    assert (driver.outstanding(b"host"), driver.outstanding(b"host bytes")) == (2, 2 * SIZE)
    assert driver.cuMemHostRegister_v2(start + 1, SIZE, 1) == ALREADY_REGISTERED
    for name, *between in (("cuMemcpyDtoHAsync_v2", start + 9, block), ("cuMemcpyHtoDAsync_v2", block, start + 9)):
        assert getattr(driver, name)(*between, SIZE, stream) == INVALID_VALUE
    driver("cuMemcpyDtoHAsync_v2", start + SIZE, block, SIZE, stream)
    assert driver.cuMemHostUnregister(start + 1) == NOT_REGISTERED
    assert driver.cuMemFreeHost(start) == INVALID_VALUE
    driver("cuStreamSynchronize", stream)
    for part in (start, start + SIZE):
        driver("cuMemHostUnregister", part)
    assert driver.outstanding(b"host") == 0
    assert driver.cuMemHostRegister_v2(1 << 20, SIZE, 1) == INVALID_VALUE  # nothing is there


def test_mapping_and_limits(driver: FakeDriver) -> None:
    page = 2 << 20
    driver.set_memory(4 * page)
    properties = AllocationProperties(type=1, location=Location(1, 0))
    base, handle, other = c.c_uint64(), c.c_uint64(), c.c_uint64()
    driver("cuMemAddressReserve", c.byref(base), 8 * page, 0, 0, 0)
    driver("cuMemCreate", c.byref(handle), 3 * page, c.byref(properties), 0)
    assert driver.cuMemCreate(c.byref(other), 2 * page, c.byref(properties), 0) == OUT_OF_MEMORY
    driver("cuMemMap", base.value + page, 3 * page, 0, handle, 0)
    stream, host = driver.stream(), driver.host_alloc(SIZE)
    assert driver.cuMemcpyDtoHAsync_v2(host, base.value + page, SIZE, stream) == INVALID_VALUE  # no access yet
    driver("cuMemSetAccess", base.value + page, 3 * page, c.byref(Access(Location(1, 0), 3)), 1)
    driver("cuMemcpyDtoHAsync_v2", host, base.value + page, SIZE, stream)
    driver("cuMemRelease", handle)  # the memory stays while it is mapped
    assert driver.outstanding(b"bytes") == 3 * page
    assert driver.cuMemUnmap(base.value + page, page) == INVALID_VALUE  # the whole mapping only
    assert driver.cuMemAddressFree(base, 8 * page) == INVALID_VALUE
    driver("cuMemUnmap", base.value + page, 3 * page)
    assert driver.outstanding(b"bytes") == 0
    driver("cuMemAddressFree", base, 8 * page)
    free, total = c.c_size_t(), c.c_size_t()
    driver("cuMemGetInfo_v2", c.byref(free), c.byref(total))
    assert free.value == total.value == 4 * page


def test_one_unmapping_takes_several_whole_mappings_without_a_gap(driver: FakeDriver) -> None:
    page = 2 << 20
    properties = AllocationProperties(type=1, location=Location(1, 0))
    base, handle = c.c_uint64(), c.c_uint64()
    driver("cuMemAddressReserve", c.byref(base), 8 * page, 0, 0, 0)
    for at, pages in ((0, 1), (1, 2), (3, 1), (5, 1)):
        driver("cuMemCreate", c.byref(handle), pages * page, c.byref(properties), 0)
        driver("cuMemMap", base.value + at * page, pages * page, 0, handle, 0)
        driver("cuMemRelease", handle)
    for at, pages in ((0, 2), (2, 2), (3, 3), (4, 1)):  # cut in two, or over the gap
        assert driver.cuMemUnmap(base.value + at * page, pages * page) == INVALID_VALUE
    assert driver.outstanding(b"maps") == 4
    before = driver.call_count(b"cuMemUnmap")
    driver("cuMemUnmap", base.value, 4 * page)
    assert driver.call_count(b"cuMemUnmap") - before == 1
    assert driver.outstanding(b"maps") == 1
    driver("cuMemUnmap", base.value + 5 * page, page)
    driver("cuMemAddressFree", base, 8 * page)


def test_contexts_and_stale_handles(driver: FakeDriver) -> None:
    stream, event = driver.stream(), driver.event()
    driver.use_device(1)
    other = driver.stream()
    assert driver.cuEventRecord(event, other) == INVALID_HANDLE  # of another device
    assert driver.cuStreamWaitEvent(other, event, 0) == 0
    driver("cuCtxSetCurrent", None)
    assert driver.cuStreamSynchronize(stream) == INVALID_CONTEXT
    driver.use_device(0)
    driver("cuStreamDestroy_v2", stream)
    assert driver.cuStreamSynchronize(stream) == INVALID_HANDLE


def test_faults_and_counts(driver: FakeDriver) -> None:
    driver.fail_next(b"cuMemAlloc", 1, OUT_OF_MEMORY)
    before = driver.call_count(b"cuMemAlloc_v2")
    driver.alloc(SIZE)
    with pytest.raises(RuntimeError, match="cuMemAlloc"):
        driver.alloc(SIZE)
    driver.alloc(SIZE)
    assert driver.call_count(b"cuMemAlloc") == before + 3
    assert driver.outstanding(b"memory") == 2


def test_captured_work_runs_when_it_is_replayed(driver: FakeDriver) -> None:
    stream, memory, wrong = driver.stream(), driver.alloc(SIZE), c.c_uint64(0)
    driver.fill(stream, memory, SIZE, 1)
    driver.set_capturing(stream, 1)
    driver.fill(stream, memory, SIZE, 2)
    assert driver.cuEventRecord(driver.event(), stream) == CAPTURE_UNSUPPORTED
    assert driver.capture_violations() == 1
    driver.set_capturing(stream, 0)
    driver.check(stream, memory, SIZE, 1, wrong)
    driver.replay(stream, stream)
    driver.check(stream, memory, SIZE, 2, wrong)
    driver("cuStreamSynchronize", stream)
    assert wrong.value == 0


def test_illegal_use_ends_the_process(fake_driver_path) -> None:
    status, text = ends_with(fake_driver_path, "m = d.alloc(64); d('cuMemFree_v2', m); ctypes = c.string_at(m, 1)")
    assert status == -11
    late = "d.reset(0, LATE); s = d.stream(); m = d.alloc(64); d.fill(s, m, 64, 1)\n"
    status, text = ends_with(fake_driver_path, late + "d('cuMemFree_v2', m)")
    assert status == -6 and "cuMemFree of memory that queued work still uses" in text


def test_a_forked_child_gets_errors_and_ends(driver: FakeDriver) -> None:
    driver.reset(0, THREADED)
    stream, memory = driver.stream(), driver.alloc(SIZE)
    driver.fill(stream, memory, SIZE, 1)
    child = os.fork()
    if child == 0:
        refused = driver.cuStreamSynchronize(stream) == driver.cuInit(0) == NOT_INITIALIZED
        os._exit(0 if refused else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_process_ends_with_work_under_way(fake_driver_path) -> None:
    body = "d.reset(0, THREADED)\nfor _ in range(3):\n  s = d.stream()\n  for _ in range(100): d.fill(s, d.alloc(64), 64, 1)"
    assert ends_with(fake_driver_path, body) == (0, "")
