"""A device's memory in stream order, on the double of libcuda: necessary and unnecessary waits, and the budget."""

import ctypes as c
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threads import in_threads

from . import build
from .device_abi import MAPPED, MIB, PLAIN, UNLIMITED, Device, core_abi, load
from .device_program import Program
from .fake import LATE, PROMPT, PROTOTYPES, RANDOM, THREADED, FakeDriver

KIB = 1024
MODES = {PROMPT: "prompt", RANDOM: "random", LATE: "late", THREADED: "threaded"}
# The waits of device.cpp, heap.cpp; host_tier.cpp's have their own tests.
NAMES = (
    "close.all coalesce.time coalesce.touched fetch.done freed.time pool.touched reuse.touched split.time split.touched"
    " synchronize.all trim.touched used.touched"
).split()
OF_COPIES = "used.time"  # since when a copy is at work on a block: test_tier_waits.py
LENT = "lent.touched"  # of blocks that are another allocator's
OF_SITES = {"frame.touched", "site.touched"}  # test_places.py

OpenDevice = Callable[..., Device]


@pytest.fixture(scope="session")
def device_core(fake_driver_path) -> c.CDLL:
    return load(build.core_with_mutations())


@pytest.fixture
def open_device(device_core, driver: FakeDriver) -> Iterator[OpenDevice]:
    """Opens devices on the double in late mode; those still open at the end must close and leave nothing behind."""
    driver.reset(0, LATE)
    driver.use_device(0)
    opened: list[Device] = []

    def make(**options) -> Device:
        opened.append(Device(device_core, driver, **options))
        return opened[-1]

    yield make
    for device in opened:
        if device.handle:
            assert device.close() == 0
    assert driver.capture_violations() == 0
    for what in (b"memory", b"handles", b"maps", b"reservations", b"bytes"):
        assert driver.outstanding(what) == 0


def calls(driver: FakeDriver) -> int:
    """All calls of the driver so far."""
    return sum(driver.call_count(name.encode()) for name in PROTOTYPES if name.startswith("cu"))


def waits(device: Device) -> int:
    return device.stats.waits


@pytest.mark.parametrize("memory", [MAPPED, PLAIN])
def test_one_stream_reuses_at_once_without_a_call(open_device: OpenDevice, driver: FakeDriver, memory: int) -> None:
    device = open_device(budget=32 * MIB, memory=memory)
    stream = driver.stream()
    address = device.alloc(10 * MIB, stream)
    small = device.alloc(100, stream)
    driver.fill(stream, address, 10 * MIB, 1)
    before = calls(driver)
    for _ in range(100):
        device.free(address)
        assert device.alloc(10 * MIB, stream) == address
        device.free(small)
        assert device.alloc(100, stream) == small
    assert calls(driver) == before
    device.free(address)
    device.free(small)


def test_another_stream_waits_for_the_tail(open_device: OpenDevice, driver: FakeDriver) -> None:
    device = open_device(budget=32 * MIB)
    one, other = driver.stream(), driver.stream()
    wrong = c.c_uint64()
    address = device.alloc(10 * MIB, one)
    driver.fill(one, address, 10 * MIB, 1)
    driver.check(one, address, 10 * MIB, 1, wrong)
    device.free(address)
    assert device.alloc(10 * MIB, other) == address
    assert device.home(address) == other
    assert waits(device) == 1
    assert device.stats.cross_reuses == 1
    driver.fill(other, address, 10 * MIB, 2)
    driver("cuStreamSynchronize", other)
    assert wrong.value == 0
    # From now on it is the other stream's alone.
    device.free(address)
    assert device.alloc(10 * MIB, other) == address
    assert waits(device) == 1
    device.free(address)


def test_an_idle_stream_need_not_be_waited_for(open_device: OpenDevice, driver: FakeDriver) -> None:
    device = open_device(budget=32 * MIB)
    one, other = driver.stream(), driver.stream()
    device.free(device.alloc(10 * MIB, one))
    address = device.alloc(10 * MIB, other)
    assert waits(device) == 0
    assert driver.call_count(b"cuEventRecord") == 0
    device.free(address)


def test_what_was_declared_used_is_waited_for(open_device: OpenDevice, driver: FakeDriver) -> None:
    device = open_device(budget=32 * MIB)
    one, other = driver.stream(), driver.stream()
    wrong = c.c_uint64()
    address = device.alloc(10 * MIB, one)
    driver.fill(one, address, 10 * MIB, 1)
    driver("cuStreamSynchronize", one)
    device.used(address, other)
    driver.check(other, address, 10 * MIB, 1, wrong)
    device.free(address)
    assert device.alloc(10 * MIB, one) == address  # even its home has to wait for the other one
    assert waits(device) == 1
    driver.fill(one, address, 10 * MIB, 2)
    driver("cuStreamSynchronize", one)
    driver.drain()
    assert wrong.value == 0
    device.free(address)


@pytest.mark.parametrize("omit", ["", LENT, "used.touched"])
def test_who_gets_memory_that_was_lent_waits(open_device: OpenDevice, driver: FakeDriver, omit: str) -> None:
    """Its owner hands it on in order of its home, at once; another stream still reads it."""
    device = open_device(budget=32 * MIB)
    one, other = driver.stream(), driver.stream()
    address, wrong = driver.alloc(MIB), c.c_uint64()
    device.core.mm_test_leave_out(omit.encode())
    try:
        device.core.mm_device_lend(device.handle, address, MIB, one)
        assert device.home(address) == one
        driver.fill(one, address, MIB, 1)
        driver("cuStreamSynchronize", one)
        device.used(address, other)
        driver.check(other, address, MIB, 1, wrong)
        device.core.mm_device_lent_ends(device.handle, address)
    finally:
        device.core.mm_test_leave_out(b"")
    driver.fill(one, address, MIB, 2)
    driver("cuStreamSynchronize", one)
    driver.drain()
    assert (wrong.value > 0) == bool(omit)
    assert device.home(address) is None
    driver("cuMemFree_v2", address)


def test_who_asks_for_memory_that_is_lent_waits_for_its_home(open_device: OpenDevice, driver: FakeDriver) -> None:
    device = open_device(budget=32 * MIB)
    one, other = driver.stream(), driver.stream()
    address, wrong = driver.alloc(MIB), c.c_uint64()
    device.core.mm_device_lend(device.handle, address, MIB, one)
    driver.fill(one, address, MIB, 1)
    assert device.core.mm_device_wait_block(device.handle, other, address) == 0
    driver.check(other, address, MIB, 1, wrong)
    driver("cuStreamSynchronize", other)
    assert wrong.value == 0
    device.core.mm_device_lent_ends(device.handle, address)
    driver("cuMemFree_v2", address)


def test_what_is_lent_counts(open_device: OpenDevice, driver: FakeDriver) -> None:
    device = open_device(budget=32 * MIB)
    stream, lend, ends = driver.stream(), device.core.mm_device_lend, device.core.mm_device_lent_ends
    block = device.alloc(4 * MIB, stream)
    for address, size in ((64, MIB), (128, 2 * MIB), (64, 3 * MIB)):  # the first one's end was not reported
        lend(device.handle, address, size, stream)
    assert device.arena_stats.outside_bytes == 5 * MIB
    assert device.try_alloc(24 * MIB, stream) is None  # the budget is theirs, too
    ends(device.handle, 128)
    ends(device.handle, 128)
    assert device.arena_stats.outside_bytes == 3 * MIB
    device.core.mm_device_forget_lent(device.handle)
    assert device.arena_stats.outside_bytes == 0
    assert waits(device) == 0
    device.free(block)


def test_who_takes_several_neighbours_waits_for_all_of_their_streams(
    open_device: OpenDevice, driver: FakeDriver
) -> None:
    device = open_device(budget=64 * MIB)
    streams = [driver.stream() for _ in range(4)]
    wrong = c.c_uint64()
    blocks = [device.alloc(4 * MIB, stream) for stream in streams[:3]]
    for block, stream in zip(blocks, streams, strict=False):
        driver.fill(stream, block, 4 * MIB, 1)
        driver.check(stream, block, 4 * MIB, 1, wrong)
    for block in (blocks[1], blocks[0], blocks[2]):
        device.free(block)
    assert device.alloc(12 * MIB, streams[3]) == blocks[0]
    assert waits(device) == 3
    driver.fill(streams[3], blocks[0], 12 * MIB, 5)
    driver("cuStreamSynchronize", streams[3])
    driver.drain()
    assert wrong.value == 0
    device.free(blocks[0])


def test_the_rest_of_a_run_is_still_touched(open_device: OpenDevice, driver: FakeDriver) -> None:
    device = open_device(budget=64 * MIB)
    one, two, three = (driver.stream() for _ in range(3))
    address = device.alloc(8 * MIB, one)
    driver.fill(one, address, 8 * MIB, 1)
    device.free(address)
    low, high = device.alloc(4 * MIB, two), device.alloc(4 * MIB, three)
    assert {low, high} == {address, address + 4 * MIB}
    assert waits(device) == 2
    device.free(low)
    device.free(high)


def test_new_pages_are_nobodys(open_device: OpenDevice, driver: FakeDriver) -> None:
    device = open_device(budget=64 * MIB)
    one, other = driver.stream(), driver.stream()
    first = device.alloc(4 * MIB, one)
    driver.fill(one, first, 4 * MIB, 1)
    device.free(first)
    again = device.alloc(4 * MIB, one)
    assert device.alloc(8 * MIB, other) is not None  # the untouched end has been coalesced with freed memory
    assert waits(device) == 0
    device.free(again)
    device.free(again + 4 * MIB)


def test_after_a_synchronization_nothing_is_touched(open_device: OpenDevice, driver: FakeDriver) -> None:
    device = open_device(budget=64 * MIB)
    one, other, third = (driver.stream() for _ in range(3))
    kept, freed = device.alloc(4 * MIB, one), device.alloc(4 * MIB, one)
    device.used(kept, third)
    assert device.synchronize() == 0 or not driver.outstanding(b"work")
    driver.fill(one, freed, 4 * MIB, 1)
    device.free(freed)
    assert device.synchronize() == 0
    assert driver.outstanding(b"work") == 0
    driver.fill(one, kept, 4 * MIB, 1)
    assert device.alloc(4 * MIB, other) == freed
    assert waits(device) == 0
    # A live block stays in use by those it was handed to.
    driver.fill(third, kept, 4 * MIB, 1)
    device.free(kept)
    assert device.alloc(4 * MIB, other) == kept
    assert waits(device) == 2
    device.free(freed)
    device.free(kept)


def test_a_stream_that_was_destroyed_is_waited_for_all_the_same(open_device: OpenDevice, driver: FakeDriver) -> None:
    device = open_device(budget=32 * MIB)
    one, other = driver.stream(), driver.stream()
    wrong = c.c_uint64()
    address = device.alloc(10 * MIB, one)
    driver.fill(one, address, 10 * MIB, 1)
    driver.check(one, address, 10 * MIB, 1, wrong)
    device.free(address)
    driver("cuStreamDestroy_v2", one)
    assert device.alloc(10 * MIB, other) == address
    assert driver.outstanding(b"work") == 0  # the CPU waited
    assert device.stats.synchronizations > 0
    assert wrong.value == 0
    device.free(address)


def test_memory_of_a_stream_that_was_destroyed_takes_one_synchronization_of_the_device(
    open_device: OpenDevice, driver: FakeDriver
) -> None:
    """Not one for each piece of it, whether it is reused by a stream that still exists or its pages are given back."""
    device = open_device(budget=64 * MIB)
    one, other = driver.stream(), driver.stream()
    wrong = c.c_uint64()
    blocks = [device.alloc(2 * MIB, one) for _ in range(16)]
    between = blocks[1::2]  # which keep the others from one another
    for block in blocks[::2]:
        driver.fill(one, block, 2 * MIB, 1)
        driver.check(one, block, 2 * MIB, 1, wrong)
        device.free(block)
    driver("cuStreamDestroy_v2", one)
    before = driver.call_count(b"cuCtxSynchronize"), device.stats.synchronizations
    reused = [device.alloc(2 * MIB, other) for _ in range(6)]
    assert set(reused) < set(blocks[::2])
    for block in reused:
        driver.fill(other, block, 2 * MIB, 2)
    assert device.trim() == 4 * MIB
    assert driver.call_count(b"cuCtxSynchronize") - before[0] == device.stats.synchronizations - before[1] == 1
    driver.drain()
    assert wrong.value == 0
    for block in between + reused:
        device.free(block)


def test_more_streams_than_there_are_bits(open_device: OpenDevice, driver: FakeDriver) -> None:
    device = open_device(budget=512 * MIB)
    streams = [driver.stream() for _ in range(70)]
    wrong = c.c_uint64()
    blocks = [device.alloc(2 * MIB, stream) for stream in streams]
    for block, stream in zip(blocks, streams, strict=True):
        assert device.home(block) == stream
        driver.fill(stream, block, 2 * MIB, 1)
        driver.check(stream, block, 2 * MIB, 1, wrong)
    for block in blocks:
        device.free(block)
    # The last ones share a bit: a block that one of them touched counts as touched by all of them.
    for stream in (streams[69], streams[0]):
        address = device.alloc(140 * MIB, stream)
        assert address == blocks[0]
        driver.fill(stream, address, 140 * MIB, 2)
        driver("cuStreamSynchronize", stream)
        device.free(address)
    assert device.stats.streams == 70
    assert wrong.value == 0


def test_more_sets_than_there_are_ids(open_device: OpenDevice, driver: FakeDriver) -> None:
    """A set without an id of its own counts as touched by everything: the CPU waits, and then all is as before."""
    device = open_device(budget=64 * MIB)
    device.checks = False
    home, *others = (driver.stream() for _ in range(18))
    for members in range(1 << 17):
        if device.stats.synchronizations > 0:
            break
        block = device.alloc(1000, home)
        for bit in range(17):
            if members >> bit & 1:
                device.used(block, others[bit])
        device.free(block)
    assert device.stats.synchronizations == 1
    assert members > 60_000
    # The sets that no memory has are forgotten then, so there are ids again.
    block = device.alloc(1000, home)
    driver.fill(others[3], block, 1000, 1)
    device.used(block, others[3])
    device.free(block)
    before = waits(device)
    assert device.alloc(1000, others[5]) == block
    assert waits(device) == before + 1
    assert device.stats.synchronizations == 1
    device.free(block)
    assert device.check() == ""


# Each mode has its programs on mapped memory, and the two that show most waits have them on plain memory, too.
PROGRAMS = [
    pytest.param(
        mode, memory, id=f"{name}-{kind}", marks=[pytest.mark.slow] * (memory == PLAIN and mode in (PROMPT, RANDOM))
    )
    for mode, name in MODES.items()
    for memory, kind in ((MAPPED, "mapped"), (PLAIN, "plain"))
]


@pytest.mark.parametrize(("mode", "memory"), PROGRAMS)
def test_random_programs_find_their_bytes(device_core, driver: FakeDriver, mode: int, memory: int) -> None:
    for seed in range(12):
        assert Program(device_core, driver, seed, mode, memory).run() == 0
        assert driver.outstanding(b"bytes") == 0
        assert driver.capture_violations() == 0


@pytest.mark.parametrize("name", NAMES)
def test_without_any_one_wait_they_do_not(fake_driver_path, name: str) -> None:
    """A check fails, or the double ends the process because memory goes that is in use; with all waits neither does."""
    command = [sys.executable, "-m", "tests.driver.device_program", str(build.core_with_mutations())]
    for mode in (LATE, RANDOM):
        arguments = [str(fake_driver_path), str(mode), str(MAPPED), name, "30"]
        done = subprocess.run([*command, *arguments], cwd=build.ROOT, capture_output=True, text=True)
        if done.returncode in (1, -6, -11):  # wrong bytes, abort(), an access to unmapped memory
            return
        assert done.returncode == 0, done.stderr
    pytest.fail(f"no seed notices that {name} is missing")


def test_the_list_of_names_is_complete() -> None:
    sources = [
        build.CORE / f"{name}.cpp"
        for name in "device device_lent device_marks device_pages heap arena shared_frames".split()
    ]
    found = {text.split('"')[1] for path in sources for text in path.read_text().split("Order<")[1:]}
    assert found == {*NAMES, LENT, OF_COPIES, *OF_SITES}


def test_no_wait_passes_by_the_names() -> None:
    """Calls that order work stand in an Order, or in the helpers that are called in one; each has its reason."""
    source = "".join((build.CORE / name).read_text() for name in ("device.cpp", "device_marks.cpp", "device_lent.cpp"))
    ordering = r"StreamWaitEvent|StreamSynchronize|EventSynchronize|EventRecord|CtxSynchronize"
    direct = [line.strip() for line in source.splitlines() if re.search(ordering, line) and "Order<" not in line]
    assert direct == [
        "return DriverErrno(Noted(driver_.CtxSynchronize()));",  # SynchronizeContext
        # WaitForTail: the event, and the CPU for a stream that cannot be asked.
        "error = driver_.EventRecord(event, other);",
        "if (error == CUDA_SUCCESS) error = driver_.StreamWaitEvent(waiter, event, 0);",
        "if (driver_.StreamSynchronize(other) == CUDA_SUCCESS) {",
        "if (Noted(driver_.EventRecord(event, stream)) == CUDA_SUCCESS)",  # Mark: nobody waits yet
        # WaitForMark
        "return driver_.StreamWaitEvent(waiter, mark->event, 0) == CUDA_SUCCESS ? Mark::kQueued : Mark::kNone;",
        # SynchronizeAll
        "if (error == CUDA_SUCCESS) error = driver_.StreamSynchronize(stream);",
        "if (Noted(driver_.StreamSynchronize(settler)) == CUDA_SUCCESS) return 0;",
    ]
    calls = {
        # close.all, synchronize.all, its definition; in SynchronizeAll, for a stream of memmgr's that cannot be waited for
        "SynchronizeContext": 4,
        "WaitForTail": 2,  # its definition, WaitUntil where there is no mark
        "WaitUntil": 2,  # its definition, WaitFor
        "WaitForMark": 3,  # its definition, WaitUntil, SynchronizeAll
        # its definition, WaitForTouched (offload.touched, reload.target), reuse.touched, lent.touched
        "WaitFor": 4,
        "SynchronizeAll": 3,  # its definition, trim.touched, lent.touched
    }
    found = {name: len(re.findall(rf"(?<![\w.]){name}\(", re.sub(r"//.*", "", source))) for name in calls}
    assert found == calls, found


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), budget_pages=st.integers(4, 64))
def test_what_the_driver_gave_obeys_the_budget(device_core, loaded_driver, seed: int, budget_pages: int) -> None:
    """By one page at most, however many blocks there are: others leave for pages that hold ends of blocks, too."""
    driver, dice, page = loaded_driver, random.Random(seed), 64 * KIB
    driver.reset(seed, RANDOM)
    driver.set_granularity(page)
    driver.use_device(0)
    device = Device(device_core, driver, budget=budget_pages * page)
    streams = [driver.stream() for _ in range(3)]
    live: list[int] = []

    def reclaim(_need: int, _request: int, _attempt: int) -> int:
        if live:
            device.core.mm_device_free(device.handle, live.pop(dice.randrange(len(live))))
        return 1 if live else 0

    device.on_reclaim(reclaim)
    for _ in range(150):
        if live and dice.random() < 0.3:
            device.free(live.pop(dice.randrange(len(live))))
        else:
            size = int(2 ** dice.uniform(4, 21))
            address = device.alloc(size, dice.choice(streams))
            assert (address is not None) == (size <= budget_pages * page)
            if address is not None:
                live.append(address)
        assert driver.outstanding(b"bytes") <= (budget_pages + 1) * page
        assert driver.outstanding(b"bytes") == device.arena_stats.committed_bytes
    for address in live:
        device.free(address)
    device.trim()
    assert driver.outstanding(b"bytes") == 0
    whole = device.alloc(budget_pages * page, streams[0])
    assert whole is not None  # after any sequence of calls: the whole budget in one piece, by remap
    assert driver.outstanding(b"bytes") == budget_pages * page
    device.free(whole)
    assert device.close() == 0
    assert driver.outstanding(b"bytes") == 0


@pytest.mark.parametrize("captured", [False, True])
def test_pages_for_bytes_that_fit_pass_the_budget_where_nobody_can_leave(
    open_device: OpenDevice, driver: FakeDriver, captured: bool
) -> None:
    """Reclaim is asked once for the same pages, and never inside a capture."""
    driver.set_granularity(64 * KIB)
    device = open_device(budget=MIB)
    stream, asked = driver.stream(), []

    def reclaim(need: int, _request: int, _attempt: int) -> int:
        asked.append(need)
        return 0

    device.on_reclaim(reclaim)
    blocks = [device.alloc(40 * KIB, stream) for _ in range(25)]
    assert driver.outstanding(b"bytes") == MIB
    for block in blocks[1::2]:
        device.free(block)
    driver.set_capturing(stream, int(captured))
    needs = [] if captured else [2 * 64 * KIB]  # three, without the one by which pages may pass the budget at any time
    for _ in range(2):
        address = device.alloc(200 * KIB, stream)  # the runs of 40 KiB are too short, and none has a whole page
        assert address is not None
        assert driver.outstanding(b"bytes") == MIB + 3 * 64 * KIB
        assert asked == needs
        device.free(address)
        driver.set_capturing(stream, 0)
        assert device.trim() == 3 * 64 * KIB
        driver.set_capturing(stream, int(captured))
    driver.set_capturing(stream, 0)
    for block in blocks[::2]:
        device.free(block)


def test_pages_move_where_they_are_needed(open_device: OpenDevice, driver: FakeDriver) -> None:
    device = open_device(budget=16 * MIB)
    stream = driver.stream()
    wrong = c.c_uint64()
    blocks = [device.alloc(2 * MIB, stream) for _ in range(8)]
    for block in blocks:
        driver.fill(stream, block, 2 * MIB, 1)
        driver.check(stream, block, 2 * MIB, 1, wrong)
    for block in blocks[::2]:
        device.free(block)
    # No run of 8 MiB: it lies further up, and the pages of the runs go there once their stream is done with them.
    address = device.alloc(8 * MIB, stream)
    assert address is not None and address > blocks[-1]
    assert driver.outstanding(b"bytes") == 16 * MIB
    assert device.arena_stats.remapped_bytes == 8 * MIB
    assert wrong.value == 0
    for block in [address, *blocks[1::2]]:
        device.free(block)


@pytest.mark.parametrize(("budget", "pages"), [(UNLIMITED, 1), (256 * MIB, 1), (64 * MIB, 16)])
def test_blocks_of_up_to_a_16th_of_a_page_lie_together(
    open_device: OpenDevice, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, budget: int, pages: int
) -> None:
    """Blocks of a page come and go between small ones that stay. In a short budget only blocks of a 4,096th of it are small."""
    monkeypatch.setenv("MEMMGR_CUDA_PAGE", str(MIB))
    driver.set_granularity(MIB)
    device = open_device(budget=budget)
    small, large = [], []
    for _ in range(16):
        small.append(device.alloc(MIB // 32))
        large.append(device.alloc(MIB))
    for block in large:
        device.free(block)
    device.trim()
    assert driver.outstanding(b"bytes") == pages * MIB
    for block in small:
        device.free(block)


def test_trim_waits_and_gives_back(open_device: OpenDevice, driver: FakeDriver) -> None:
    device = open_device(budget=64 * MIB)
    one, other = driver.stream(), driver.stream()
    address = device.alloc(20 * MIB, one)
    device.used(address, other)
    driver.fill(one, address, 20 * MIB, 1)
    driver.fill(other, address, 20 * MIB, 1)
    device.free(address)
    before = driver.call_count(b"cuMemUnmap")
    assert device.trim(4 * MIB) == 16 * MIB
    assert driver.outstanding(b"bytes") == 4 * MIB
    assert device.stats.synchronizations == 2
    assert device.stats.unmaps == 8
    assert driver.call_count(b"cuMemUnmap") - before == 1  # the pages lie side by side


def test_a_smaller_budget_gives_pages_back(open_device: OpenDevice, driver: FakeDriver) -> None:
    device = open_device(budget=64 * MIB)
    stream = driver.stream()
    kept, freed = device.alloc(4 * MIB, stream), device.alloc(30 * MIB, stream)
    driver.fill(stream, freed, 30 * MIB, 1)
    device.free(freed)
    device.set_budget(10 * MIB)
    assert driver.outstanding(b"bytes") == 10 * MIB
    assert device.alloc(8 * MIB, stream) is None
    device.free(kept)


def test_try_alloc_leaves_room_and_does_not_reclaim(open_device: OpenDevice, driver: FakeDriver) -> None:
    device = open_device(budget=16 * MIB)
    stream = driver.stream()
    device.on_reclaim(lambda *_: pytest.fail("reclaim was called"))
    assert device.try_alloc(8 * MIB, stream, keep_free=9 * MIB) is None
    address = device.try_alloc(8 * MIB, stream, keep_free=8 * MIB)
    assert address is not None
    assert device.try_alloc(9 * MIB, stream) is None
    device.free(address)


def test_reclaim_frees_and_the_request_waits_for_what_it_gets(open_device: OpenDevice, driver: FakeDriver) -> None:
    device = open_device(budget=16 * MIB)
    one, other = driver.stream(), driver.stream()
    wrong = c.c_uint64()
    vault = [device.alloc(4 * MIB, one) for _ in range(4)]
    for block in vault:
        driver.fill(one, block, 4 * MIB, 3)
        driver.check(one, block, 4 * MIB, 3, wrong)
    asked: list[int] = []

    def reclaim(need: int, _request: int, _attempt: int) -> int:
        asked.append(need)
        device.core.mm_device_free(device.handle, vault.pop())
        return 4 * MIB

    device.on_reclaim(reclaim)
    address = device.alloc(8 * MIB, other)
    assert address is not None
    assert asked == [8 * MIB, 4 * MIB]
    driver.fill(other, address, 8 * MIB, 4)
    driver("cuStreamSynchronize", other)
    driver.drain()
    assert wrong.value == 0
    for block in [address, *vault]:
        device.free(block)


def test_a_window_is_waited_for_with_all_of_its_blocks(open_device: OpenDevice, driver: FakeDriver) -> None:
    """Its blocks were three streams': the one that gets the run waits for the tails of all of them, and of no other."""
    price = core_abi.Price
    device = open_device(budget=16 * MIB, memory=PLAIN)
    core, arena = device.core, device.arena
    core.mm_arena_set_layout(arena, core_abi.REMAP_NEVER)
    *homes, other, bystander = (driver.stream() for _ in range(5))
    wrong = c.c_uint64()
    beside = device.alloc(2 * MIB, bystander)
    blocks = [device.alloc(4 * MIB, stream) for stream in homes]
    driver.fill(bystander, beside, 2 * MIB, 1)
    for block, stream in zip(blocks, homes, strict=True):
        driver.fill(stream, block, 4 * MIB, 1)
        driver.check(stream, block, 4 * MIB, 1, wrong)
        core.mm_arena_price(arena, price(block, block, 1.0, 0.0), 1)
    chosen: list[int] = []

    def reclaim(need: int, request: int, _attempt: int) -> int:
        victims = (core_abi.Victim * 16)()
        count = core.mm_arena_choose(arena, need, request, 1.0, victims, len(victims))
        for victim in victims[: max(0, count)]:
            chosen.append(victim.p)
            core.mm_device_free(device.handle, victim.p)
        return 4 * MIB * max(0, count)

    device.on_reclaim(reclaim)
    address = device.alloc(12 * MIB, other)
    assert chosen == blocks and address == blocks[0]
    assert waits(device) == 3
    driver.fill(other, address, 12 * MIB, 2)
    driver("cuStreamSynchronize", other)
    driver.drain()
    assert wrong.value == 0
    device.free(address)
    device.free(beside)


@pytest.mark.parametrize("memory", [MAPPED, PLAIN])
def test_unlimited(open_device: OpenDevice, driver: FakeDriver, memory: int) -> None:
    device = open_device(memory=memory)
    assert device.arena_stats.budget_bytes == UNLIMITED
    address = device.alloc(600 * MIB)
    assert address is not None
    assert device.alloc(600 * MIB) is None  # the device has a gibibyte
    device.free(address)
    assert device.home(address) is None


def test_plain_memory_is_one_piece_of_the_budget(open_device: OpenDevice, driver: FakeDriver) -> None:
    device = open_device(budget=64 * MIB, memory=PLAIN)
    assert driver.outstanding(b"memory") == 1
    assert driver.outstanding(b"bytes") == 64 * MIB
    address = device.alloc(60 * MIB)
    device.free(address)
    assert device.trim() == 0
    device.set_budget(128 * MIB)
    assert device.alloc(100 * MIB) is None
    assert driver.outstanding(b"bytes") == 64 * MIB


def test_two_devices_keep_apart(open_device: OpenDevice, driver: FakeDriver) -> None:
    first, second = open_device(budget=16 * MIB), open_device(ordinal=1, budget=16 * MIB)
    assert first.core.mm_device_ordinal(second.handle) == 1
    # The default stream is that of each device, regardless of the thread's context.
    a, b = first.alloc(4 * MIB), second.alloc(4 * MIB)
    assert a is not None and b is not None
    context, now = c.c_void_p(), c.c_void_p()
    driver("cuCtxGetCurrent", c.byref(context))
    second.free(b)
    driver.use_device(1)
    other = driver.stream()
    driver.fill(None, b, 4 * MIB, 1)
    driver.use_device(0)
    assert second.alloc(4 * MIB, other) == b
    assert waits(second) == 1 and waits(first) == 0
    driver("cuCtxGetCurrent", c.byref(now))
    assert now.value == context.value
    first.free(a)
    second.free(b)


def test_a_thread_has_the_context_that_it_had(device_core, driver: FakeDriver) -> None:
    """None, too: the runtime goes by it, and the program's next tensor would lie on the budget's device."""
    context = c.c_void_p()
    driver("cuCtxSetCurrent", None)
    device = Device(device_core, driver, ordinal=1, budget=16 * MIB)
    block = device.alloc(4 * MIB)
    assert block is not None
    fetched = c.create_string_buffer(8)
    assert device.core.mm_device_fetch(device.handle, c.addressof(fetched), block, 8, None) == 0
    device.free(block)
    assert device.synchronize() == 0 and device.trim() > 0
    driver("cuCtxGetCurrent", c.byref(context))
    assert context.value is None
    assert device.close() == 0
    driver("cuCtxGetCurrent", c.byref(context))
    assert context.value is None


@pytest.mark.parametrize("memory", [MAPPED, PLAIN])
def test_blocks_lie_as_torchs_own_do(open_device: OpenDevice, driver: FakeDriver, memory: int) -> None:
    """Also small ones: libraries look at the alignment when they choose a kernel, and refuse workspaces below 256."""
    device = open_device(budget=64 * MIB, memory=memory)
    blocks = [device.alloc(size) for size in (1, 4, 100, 513, 5000, 8192, 8193, 3 * MIB)]
    assert all(block is not None and block % 512 == 0 for block in blocks)
    for block in blocks:
        device.free(block)


def test_a_stream_of_another_device_may_use_a_block(open_device: OpenDevice, driver: FakeDriver) -> None:
    device = open_device(budget=16 * MIB)
    driver.use_device(1)
    far = driver.stream()
    wrong = c.c_uint64()
    driver.use_device(0)
    near = driver.stream()
    address = device.alloc(4 * MIB, near)
    driver.fill(near, address, 4 * MIB, 1)
    driver("cuStreamSynchronize", near)
    device.used(address, far)
    driver.use_device(1)
    driver.check(far, address, 4 * MIB, 1, wrong)
    driver.use_device(0)
    device.free(address)
    assert device.alloc(4 * MIB, near) == address
    driver.fill(near, address, 4 * MIB, 2)
    driver("cuStreamSynchronize", near)
    driver.drain()
    assert wrong.value == 0
    device.free(address)


def test_threads_without_a_context_share_a_device(open_device: OpenDevice, driver: FakeDriver) -> None:
    driver.reset(3, THREADED)
    driver.use_device(0)
    device = open_device(budget=32 * MIB)
    streams = [driver.stream() for _ in range(4)]
    wrongs = [c.c_uint64() for _ in range(4)]
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            dice, stream, live = random.Random(index), streams[index], []
            for _ in range(150):
                size = dice.choice([100, 40 * KIB, MIB, 3 * MIB])
                address = device.core.mm_device_alloc(device.handle, size, stream)
                if address is not None:  # the first call of the driver's that this thread makes is ours
                    if not live:
                        driver.use_device(0)
                    value = dice.randrange(256)
                    driver.fill(stream, address, size, value)
                    live.append((address, size, value))
                while live and (address is None or len(live) > 6 or dice.random() < 0.4):
                    old, size, value = live.pop(dice.randrange(len(live)))
                    driver.check(stream, old, size, value, wrongs[index])
                    device.core.mm_device_free(device.handle, old)
                    address = old
            for old, _, _ in live:
                device.core.mm_device_free(device.handle, old)
        except BaseException as error:
            failures.append(error)

    in_threads(work, range(4))
    assert not failures
    assert device.check() == ""
    driver.drain()
    assert [wrong.value for wrong in wrongs] == [0] * 4


def test_a_forked_child_leaves_the_device_alone(open_device: OpenDevice, driver: FakeDriver) -> None:
    device = open_device(budget=32 * MIB)
    stream = driver.stream()
    address = device.alloc(4 * MIB, stream)
    child = os.fork()
    if child == 0:
        device.checks = False
        good = device.alloc(100, stream) is None and device.try_alloc(100, stream) is None
        device.free(address)
        device.used(address, stream)
        good = good and device.trim() == 0 and device.synchronize() != 0 and device.close() == -1
        good = good and device.begin_pool(1) == -1
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    device.free(address)


def test_a_device_with_a_live_block_stays_open(open_device: OpenDevice, driver: FakeDriver) -> None:
    device = open_device(budget=32 * MIB)
    address = device.alloc(100)
    assert device.close() == -1
    device.free(address)
    assert device.close() == 0


def test_open_says_why_it_cannot(device_core, driver: FakeDriver) -> None:
    with pytest.raises(MemoryError, match=r"device 7: .*driver error 101"):
        Device(device_core, driver, ordinal=7)
    with pytest.raises(MemoryError, match="cannot reserve"):
        Device(device_core, driver, budget=2048 * MIB, memory=PLAIN)
    error = c.create_string_buffer(200)
    assert device_core.mm_driver_load(str(Path("/no/such/library")).encode(), error, len(error)) is None
    assert error.value
    assert driver.outstanding(None) == 0


def test_memory_is_what_the_driver_says(open_device: OpenDevice, driver: FakeDriver) -> None:
    device = open_device(budget=32 * MIB)
    address = device.alloc(4 * MIB)
    free, total = c.c_uint64(), c.c_uint64()
    assert device.core.mm_device_memory(device.handle, c.byref(free), c.byref(total)) == 0
    assert (free.value, total.value) == (1020 * MIB, 1024 * MIB)
    device.free(address)
