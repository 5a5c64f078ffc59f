"""The ladder: device, page-locked memory, file. The same bytes whichever of them they lay in."""

import ctypes as c
import errno
import os
from pathlib import Path

import pytest
from threads import in_threads

from .fake import LATE, PROMPT, RANDOM, THREADED, FakeDriver
from .test_host_tier import KIB, MODES, Bench
from .tier_abi import HostTier
from .workload import run_seed


class Ladder(Bench):
    """A slab of 8 KiB, and below it a file."""

    def __init__(self, library: c.CDLL, driver: FakeDriver, mode: int, folder: Path, below: int = 0, throttle: int = 0):
        super().__init__(library, driver, mode)
        self.tier.close()
        self.tier = HostTier(self.device, 8 * KIB, folder, below, throttle)

    def away(self, value: int, size: int = 1000) -> int:
        block = self.filled(size, value)
        slot = self.tier.write_now(block, size)
        self.device.free(block)
        return slot

    def back(self, slot: int, value: int, size: int = 1000, ahead: bool = False) -> None:
        block = self.device.alloc(size, self.stream)
        if not ahead or self.tier.read(slot, block) != 0:
            assert self.tier.read_now(slot, block) == 0
        assert self.tier.use(slot, self.stream) == 0
        self.check(block, size, value)
        self.device.free(block)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_more_than_the_host_memory_comes_back(core, driver: FakeDriver, mode: int, ahead: bool, tmp_path: Path) -> None:
    bench = Ladder(core, driver, mode, tmp_path)
    slots = [bench.away(value) for value in range(40)]
    assert min(slots) >= 0
    for value in [*range(40), *range(39, -1, -1)]:
        bench.back(slots[value], value, ahead=ahead)
    for slot in slots:
        bench.tier.free(slot)
    assert bench.tier.stats.used_bytes == 0
    bench.close()


def test_page_locked_memory_is_what_was_asked_for(core, driver: FakeDriver, tmp_path: Path) -> None:
    bench = Ladder(core, driver, RANDOM, tmp_path)
    for value in range(40):
        assert bench.away(value) >= 0
    assert driver.outstanding(b"host") == 1
    assert bench.tier.stats.file_bytes >= 40 * 1000 - 8 * KIB
    bench.close()


def test_what_was_written_last_is_still_in_memory(core, driver: FakeDriver, tmp_path: Path) -> None:
    """A backward asks for it first: it needs no disk, however slow that is."""
    bench = Ladder(core, driver, PROMPT, tmp_path, throttle=20_000)  # half a second for each KiB from the file
    slots = [bench.away(value) for value in range(10)]
    before = bench.tier.stats.read_bytes
    block = bench.device.alloc(1000, bench.stream)
    assert bench.tier.read(slots[-1], block) == 0
    assert bench.tier.poll(slots[-1]) == 1  # on a device that is always idle: at once
    assert bench.tier.stats.read_bytes == before + 1000
    bench.tier.close()
    bench.device.free(block)
    assert bench.device.close() == 0


def test_both_full(core, driver: FakeDriver, tmp_path: Path) -> None:
    """A slot in the file comes back without room on the way, and nothing more goes down."""
    bench = Ladder(core, driver, LATE, tmp_path, below=16 * KIB)
    slots = []
    while (slot := bench.away(len(slots), size=2048)) >= 0:
        slots.append(slot)
    assert slot == -errno.ENOSPC
    assert len(slots) > 4  # more than the slab holds
    for value, slot in enumerate(slots):
        bench.back(slot, value, size=2048)
    for slot in slots[::2]:
        bench.tier.free(slot)
    again = [bench.away(100 + n, size=2048) for n in range(len(slots[::2]))]
    assert min(again) >= 0
    for n, slot in enumerate(again):
        bench.back(slot, 100 + n, size=2048)
    bench.close()


def test_larger_than_the_host_memory_stays(core, driver: FakeDriver, tmp_path: Path) -> None:
    bench = Ladder(core, driver, PROMPT, tmp_path)
    kept = bench.away(1)
    assert bench.away(2, size=8 * KIB + 1) == -errno.ENOSPC
    bench.back(kept, 1)
    bench.close()


def test_a_disk_that_fails(core, driver: FakeDriver, tmp_path: Path) -> None:
    bench = Ladder(core, driver, RANDOM, tmp_path)
    slots = [bench.away(value) for value in range(7)]
    for slot in slots:
        bench.tier.wait(slot)
    bench.tier.inject(errno.EIO, 1, 0, 0)
    more = [bench.away(7 + n) for n in range(9)]
    good = [slot for slot in more if slot >= 0]
    assert good and bench.tier.stats.errors > 0
    for value, slot in enumerate([*slots, *good]):  # slots that could not go down stayed in memory
        bench.back(slot, value)
    bench.close()


def test_a_read_that_fails_is_reported_and_can_be_tried_again(core, driver: FakeDriver, tmp_path: Path) -> None:
    bench = Ladder(core, driver, RANDOM, tmp_path)
    slots = [bench.away(value) for value in range(40)]
    block = bench.device.alloc(1000, bench.stream)
    bench.tier.inject(0, 0, errno.EIO, 1)
    assert bench.tier.read_now(slots[0], block) == -errno.EIO
    bench.tier.inject(0, 0, errno.EIO, 1)
    if bench.tier.read(slots[1], block) == 0:
        assert bench.tier.wait(slots[1]) == -errno.EIO == bench.tier.poll(slots[1])
    bench.tier.inject(0, 0, 0, 0)
    bench.device.free(block)
    for value, slot in enumerate(slots):
        bench.back(slot, value)
    bench.close()


def test_slots_that_are_given_back_on_their_way(core, driver: FakeDriver, tmp_path: Path) -> None:
    bench = Ladder(core, driver, RANDOM, tmp_path, throttle=2_000_000)
    slots = [bench.away(value) for value in range(40)]
    for slot in slots[::2]:
        block = bench.device.alloc(1000, bench.stream)
        bench.tier.read(slot, block)
        bench.tier.free(slot)
        bench.device.free(block)
    for value in range(1, 40, 2):
        bench.back(slots[value], value)
        bench.tier.free(slots[value])
    assert bench.tier.stats.used_bytes == 0
    assert bench.tier.poll(slots[0]) == bench.tier.wait(slots[0]) == bench.tier.use(slots[0], None) == -errno.EBADF
    bench.close()


@pytest.mark.parametrize("mode", MODES)
def test_random_programs(core, driver: FakeDriver, mode: int, tmp_path: Path) -> None:
    reads = no_room = 0
    for seed in range(40):
        run = run_seed(core, driver, seed, mode, folder=tmp_path, slab=4096, below=(12 << 10) * (seed % 2))
        reads, no_room = reads + run.reads, no_room + run.no_room
    assert reads > 500 and no_room > 20


@pytest.mark.parametrize(("step", "most"), [(371, 12), (1700, 3)], ids=["many fit", "one fits"])
def test_threads(core, driver: FakeDriver, tmp_path: Path, step: int, most: int) -> None:
    """Where one fits, a write finds the whole host memory with another thread's read, and waits for it."""
    bench = Ladder(core, driver, THREADED, tmp_path)

    def train(number: int) -> None:
        driver.use_device(0)
        stream, tier, device = driver.stream(), bench.tier, bench.device
        held: list[tuple[int, int, int]] = []
        for turn in range(120):
            size, value = 100 + step * ((turn + number) % 5), (turn + 50 * number) % 256
            block = device.alloc(size, stream)
            driver.fill(stream, block, size, value)
            slot = tier.write_now(block, size)
            device.free(block)
            assert slot >= 0
            held.append((slot, size, value))
            if len(held) < most:
                continue
            slot, size, value = held.pop(turn % len(held))
            block = device.alloc(size, stream)
            assert tier.read_now(slot, block) == 0
            driver.check(stream, block, size, value, bench.wrong)
            tier.free(slot)
            device.free(block)
        driver("cuStreamSynchronize", stream)
        for slot, _, _ in held:
            tier.free(slot)

    in_threads(train, range(4))
    assert bench.tier.stats.used_bytes == 0
    bench.close()


def test_a_forked_child(core, driver: FakeDriver, tmp_path: Path) -> None:
    bench = Ladder(core, driver, THREADED, tmp_path)
    slots = [bench.away(value) for value in range(20)]
    child = os.fork()
    if child == 0:
        gone, tier = -errno.ECANCELED, bench.tier
        answers = [tier.write(1, 512), tier.read(slots[0], 1), tier.poll(slots[0]), tier.wait(slots[0])]
        good = answers == [gone] * 4 and tier.stats.used_bytes == 0
        tier.free(slots[0])
        tier.close()
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    for value, slot in enumerate(slots):
        bench.back(slot, value)
    bench.close()


def test_opening_that_fails_leaves_nothing(core, driver: FakeDriver, tmp_path: Path) -> None:
    bench = Ladder(core, driver, PROMPT, tmp_path)
    with pytest.raises(OSError):
        HostTier(bench.device, 8 * KIB, tmp_path / "missing")
    assert driver.outstanding(b"host") == 1
    bench.close()
