"""Places on the double of libcuda: in a period that repeats no page is moved, and memory is handed on in stream order."""

import ctypes as c
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import build
from .device_abi import MIB, Device, PlacesStats, core_abi, load
from .fake import LATE, PROMPT, RANDOM, THREADED, FakeDriver

KIB = 1024
PAGE = 64 * KIB
Act = tuple[int, str, int]
"""Position, the name of a block, its bytes: it is asked for, or with 0 bytes freed."""

# A block of half the budget (a loss's logits) comes between small ones that live on: best fit leaves no run for it. `kept` is
# freed in the next period, before that one asks for it.
LONG: list[Act] = [
    *((k, f"a{k}", 2 * MIB) for k in range(8)),
    *((8, f"a{k}", 0) for k in range(0, 8, 2)),
    (9, "kept", 0),
    (9, "kept", 3 * MIB),
    (10, "long", 16 * MIB),
    (11, "grad", 2 * MIB),
    (12, "long", 0),
    *((13 + k, f"b{k}", 3 * MIB) for k in range(4)),
    *((18, f"b{k}", 0) for k in range(4)),
    *((19, f"a{k}", 0) for k in range(1, 8, 2)),
    (20, "grad", 0),
]
PEAK = (8 + 3 + 16 + 2) * MIB


class Periods:
    """A program of periods on one device."""

    def __init__(self, device: Device, stream: int) -> None:
        self.device, self.core, self.stream = device, device.core, stream
        self.places = self.core.mm_places_make()
        self.live: dict[str, int] = {}

    def run(self, acts: list[Act], followed: bool = True) -> None:
        self.core.mm_arena_follow(self.device.arena, self.places if followed else None)
        for position, name, size in acts:
            self.core.mm_arena_at(self.device.arena, position)
            if size:
                block = self.device.alloc(size, self.stream)
                assert block is not None
                self.live[name] = block
            elif name in self.live:
                self.device.free(self.live.pop(name))

    @property
    def stats(self) -> PlacesStats:
        out = PlacesStats()
        self.core.mm_places_stats_get(self.places, out)
        return out

    def end(self) -> None:
        self.core.mm_places_end(self.device.arena, self.places)
        for block in self.live.values():
            self.device.free(block)


@pytest.fixture(scope="session")
def device_core(fake_driver_path: Path) -> c.CDLL:
    return load(build.core_with_mutations())


@pytest.fixture
def open_periods(
    device_core: c.CDLL, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Periods]]:
    """Periods on a device of small pages; at the end everything is given back."""
    monkeypatch.setenv("MEMMGR_CUDA_PAGE", str(PAGE))
    opened: list[Periods] = []

    def make(frames_per_page: int = 1, **options: Any) -> Periods:
        driver.set_granularity(PAGE // frames_per_page)
        opened.append(Periods(Device(device_core, driver, **options), driver.stream()))
        return opened[-1]

    yield make
    for periods in opened:
        periods.end()
        assert periods.device.close() == 0
    for what in (b"handles", b"maps", b"reservations", b"bytes"):
        assert driver.outstanding(what) == 0


def maps(driver: FakeDriver) -> int:
    return driver.call_count(b"cuMemMap") + driver.call_count(b"cuMemUnmap")


@pytest.mark.parametrize("frames_per_page", [1, 8])
def test_no_page_moves_in_a_period_with_places(
    open_periods: Callable[..., Periods], driver: FakeDriver, frames_per_page: int
) -> None:
    periods = open_periods(frames_per_page, budget=PEAK)
    periods.device.on_reclaim(lambda *_: pytest.fail("all blocks have their bytes"))
    counts, bytes_used = [], []
    for period in range(12):
        periods.run(LONG, followed=period >= 6)
        counts.append(maps(driver))
        bytes_used.append(driver.outstanding(b"bytes"))
    assert counts[5] > counts[4]  # as it is without places
    # Two periods are noted. The third maps its sites, and the fourth those that blocks of the second one still had.
    assert counts[11] == counts[10] == counts[9]
    found = periods.stats
    assert (found.computations, found.displaced_bytes) == (1, 0)
    assert found.rows == sum(act[2] > 0 for act in LONG)
    assert found.frames * PAGE == PEAK * frames_per_page  # not one more than live at a time
    assert max(bytes_used) <= PEAK
    assert driver.call_count(b"cuStreamSynchronize") == 0 or counts[11] == counts[9]


@pytest.mark.parametrize("frames_per_page", [1, 8])
def test_a_block_begins_where_another_one_ends_in_a_frame(
    open_periods: Callable[..., Periods], driver: FakeDriver, frames_per_page: int
) -> None:
    """Eight blocks of five quarters of a frame live at a time, and then four. Each has its own bytes."""
    size = 5 * PAGE // frames_per_page // 4
    acts = [
        *((k, f"a{k}", size) for k in range(8)),
        *((9, f"a{k}", 0) for k in range(0, 8, 2)),
        *((10 + k, f"b{k}", size) for k in range(4)),
        *((20, f"b{k}", 0) for k in range(4)),
        *((21, f"a{k}", 0) for k in range(1, 8, 2)),
    ]
    periods = open_periods(frames_per_page, budget=16 * MIB)
    for _ in range(6):
        periods.run(acts)
    assert periods.stats.displaced_bytes == 0
    assert periods.stats.frames == 10  # of sixteen, if each block had whole ones
    wrong = c.c_uint64()
    periods.core.mm_arena_follow(periods.device.arena, periods.places)
    for position, name, _ in acts[:8]:
        periods.core.mm_arena_at(periods.device.arena, position)
        block = periods.device.alloc(size, periods.stream)
        assert block is not None
        periods.live[name] = block
        driver.fill(periods.stream, block, size, position)
    for position, name, _ in acts[:8]:
        driver.check(periods.stream, periods.live[name], size, position, wrong)
    driver.drain()
    assert wrong.value == 0


def test_memory_that_sites_give_up_is_of_few_pages(open_periods: Callable[..., Periods], driver: FakeDriver) -> None:
    """A block without a site takes the memory of idle frames. The other frames of their sites stay mapped, and a plan is
    told how much less would spare that."""
    periods = open_periods(budget=PEAK)
    lacking = []
    for period in range(12):
        before = maps(driver)
        late = [act for act in LONG if act[0] > 12]
        new = [(12, "new", 2 * PAGE + 512 * period), *late, (30, "new", 0)]
        periods.run([act for act in LONG if act[0] <= 12] + (new if period > 3 else late))
        assert driver.outstanding(b"bytes") <= PEAK
        if period > 4:
            assert 0 < maps(driver) - before < periods.stats.frames / 8
        lacking.append(periods.stats.lacking_bytes)
    assert lacking[:6] == [0] * 6, "blocks have other memory while the sites are mapped"
    assert lacking[-1] == 3 * PAGE  # of which 512 bytes and more are in the last page


def test_a_block_without_a_site_gets_one_though_it_takes_memory_from_sites(
    open_periods: Callable[..., Periods],
) -> None:
    periods = open_periods(budget=PEAK)
    for _ in range(7):
        periods.run([act for act in LONG if act[1] != "long"])
    for _ in range(6):
        periods.run(LONG)
    assert (periods.stats.computations, periods.stats.displaced_bytes) == (2, 0)


def test_blocks_leave_for_a_site_that_lacks_memory(open_periods: Callable[..., Periods], driver: FakeDriver) -> None:
    """Another place would take the memory of the site's own frames. If nobody can leave, it is taken all the same."""
    periods = open_periods(budget=PEAK + PAGE)
    acts = [(position, name, size + (1 if size else 0)) for position, name, size in LONG]
    asked: list[int] = []
    periods.device.on_reclaim(lambda need, *_: asked.append(need) or 0)
    for _ in range(6):
        asked.clear()
        periods.run(acts)
    assert 0 < max(asked) <= 11 * PAGE  # so many blocks live at the highest moment


def test_sites_stay_while_they_lack_memory_and_blocks_come_late(open_periods: Callable[..., Periods]) -> None:
    """A program that waits for memory asks at other positions. Sites of such a period would not be those of the next one, which
    has waited elsewhere. The lack is told, and the plan leaves room for them."""
    periods = open_periods(budget=PEAK + PAGE)
    acts = [(position, name, size + (1 if size else 0)) for position, name, size in LONG]
    late = [(position + (name[0] == "b" and size > 0), name, size) for position, name, size in acts]
    for period in range(14):
        periods.run(late if period > 5 and period % 4 < 2 else acts)
    assert periods.stats.computations == 1
    assert periods.stats.lacking_periods > 8


def test_a_lack_is_told_though_blocks_come_late_in_its_first_period(open_periods: Callable[..., Periods]) -> None:
    """The program waits for memory as soon as sites lack it, and asks at other positions from there on. It does not wait in the
    periods that find the memory."""
    periods = open_periods(budget=PEAK + PAGE)
    acts = [(position, name, size + (1 if size else 0)) for position, name, size in LONG]
    late = [(position + (name[0] == "b" and size > 0), name, size) for position, name, size in acts]
    for period in range(22):
        periods.run(late if period % 4 >= 2 else acts)
    assert periods.stats.computations == 1
    assert periods.stats.lacking_periods > 8


def test_a_peer_may_use_the_frames_that_are_mapped(open_periods: Callable[..., Periods], driver: FakeDriver) -> None:
    """The driver refuses a range with a piece that is not mapped, and some sites have lost frames."""
    periods = open_periods(budget=PEAK)
    for period in range(7):
        late = [act for act in LONG if act[0] > 12]
        periods.run(
            [act for act in LONG if act[0] <= 12] + [(12, "new", 3 * PAGE + 512 * period), *late, (30, "new", 0)]
        )
    before = driver.call_count(b"cuMemSetAccess")
    assert periods.core.mm_device_allow(periods.device.handle, 1) == 0
    assert driver.call_count(b"cuMemSetAccess") - before > 2


def test_a_period_with_places_asks_nobody_to_leave_for_contiguity(open_periods: Callable[..., Periods]) -> None:
    periods = open_periods(budget=PEAK)
    periods.core.mm_arena_set_layout(periods.device.arena, core_abi.REMAP_LAST)
    asked: list[int] = []
    periods.device.on_reclaim(lambda need, *_: asked.append(need) or 0)
    for period in range(4):
        asked.clear()
        periods.run(LONG, followed=period >= 2)
        assert bool(asked) == (period < 2)


def test_a_period_that_does_something_else_keeps_the_budget(
    open_periods: Callable[..., Periods], driver: FakeDriver
) -> None:
    periods = open_periods(budget=PEAK)
    for _ in range(5):
        periods.run(LONG)
    other = [act for act in LONG if act[1] != "long"] + [(30, "new", 24 * MIB), (31, "new", 0)]
    for followed in (True, False):
        periods.run(other, followed)
        assert driver.outstanding(b"bytes") <= PEAK
    for _ in range(4):
        periods.run(LONG)
        assert driver.outstanding(b"bytes") <= PEAK
    assert periods.stats.displaced_bytes == 0
    before = maps(driver)
    periods.run(LONG)
    assert maps(driver) == before


def test_a_sequence_that_goes_on_changing_is_given_up(open_periods: Callable[..., Periods]) -> None:
    periods = open_periods(budget=256 * MIB)
    for period in range(40):
        sizes = [(1 + (k + period) % 7) * MIB for k in range(8)]
        acts = [(k, f"x{k}", size) for k, size in enumerate(sizes)]
        periods.run([*acts, *((9, f"x{k}", 0) for k in range(8))])
    assert periods.stats.computations == 8


def test_a_budget_without_memory_for_all_sites_is_told(
    open_periods: Callable[..., Periods], driver: FakeDriver
) -> None:
    """Each block has one byte in its last page: a budget for all bytes has too few pages."""
    periods = open_periods(budget=PEAK + PAGE)
    acts = [(position, name, size + (1 if size else 0)) for position, name, size in LONG]
    for _ in range(9):
        periods.run(acts)
        assert driver.outstanding(b"bytes") <= PEAK + len(LONG) // 2 * PAGE  # the ends of runs
    found = periods.stats
    assert (found.computations, found.lacking_periods > 1, found.displaced_bytes > 0) == (1, True, True)
    periods.core.mm_arena_set_budget(periods.device.arena, PEAK + 32 * PAGE)
    for _ in range(3):
        periods.run(acts)
    assert (periods.stats.lacking_periods, periods.stats.displaced_bytes) == (0, 0)


def test_blocks_outlive_their_places(open_periods: Callable[..., Periods], driver: FakeDriver) -> None:
    periods = open_periods(budget=PEAK)
    for _ in range(5):
        periods.run(LONG)
    assert driver.outstanding(b"bytes") == PEAK
    periods.core.mm_places_end(periods.device.arena, periods.places)
    periods.places = periods.core.mm_places_make()
    periods.device.trim()
    assert driver.outstanding(b"bytes") == 3 * MIB  # kept
    for _ in range(5):
        periods.run(LONG)
    assert periods.stats.displaced_bytes == 0


def test_a_driver_that_maps_no_memory_twice_costs_only_the_places(
    open_periods: Callable[..., Periods], driver: FakeDriver
) -> None:
    periods = open_periods(budget=PEAK)
    for _ in range(2):
        periods.run(LONG)
    driver.fail_times(b"cuMemMap", 1, 3)
    for _ in range(4):
        periods.run(LONG)
        assert driver.outstanding(b"bytes") <= PEAK
    assert periods.stats.displaced_bytes == 0


class Program:
    """Random periods that repeat with changes, and check the bytes that they read, on three streams."""

    def __init__(self, core: c.CDLL, driver: FakeDriver, seed: int, mode: int) -> None:
        self.dice = random.Random(seed)
        driver.reset(seed, mode)
        os.environ["MEMMGR_CUDA_PAGE"] = str(PAGE)
        driver.set_granularity(PAGE >> self.dice.choice([0, 2]))  # four frames in a page
        driver.use_device(0)
        self.driver, self.core = driver, core
        self.device = Device(core, driver, budget=4 * MIB)
        self.streams = [driver.stream() for _ in range(3)]
        self.event = driver.event()
        self.places = core.mm_places_make()
        self.wrong = c.c_uint64()
        self.live: dict[int, tuple[int, int, int]] = {}  # address, bytes, value
        self.sited = 0

    def run(self) -> int:
        dice, device = self.dice, self.device
        # (position, block, bytes, stream): asked for, then used and freed some positions later, maybe in the next period.
        acts: list[tuple[int, int, int, int]] = []
        for block in range(dice.randrange(4, 16)):
            born, size = dice.randrange(30), dice.choice([20 * KIB, PAGE, 200 * KIB, 500 * KIB])
            acts += [(born, block, size, dice.randrange(3)), ((born + dice.randrange(1, 25)) % 30, block, 0, 0)]
        acts.sort(key=lambda act: (act[0], act[2] > 0))
        for period in range(9):
            self.core.mm_arena_follow(device.arena, self.places if period != 6 or dice.random() < 0.7 else None)
            for act in acts:
                if period < 3 or dice.random() < 0.95:
                    self._act(*act)
            if dice.random() < 0.15:
                device.trim(dice.randrange(4 * MIB))
            if dice.random() < 0.15:
                device.synchronize()
        for block in list(self.live):
            self._free(block)
        found = PlacesStats()
        self.core.mm_places_stats_get(self.places, found)
        self.sited = found.rows
        self.core.mm_places_end(device.arena, self.places)
        assert device.close() == 0
        self.driver.drain()
        return self.wrong.value

    def _act(self, position: int, block: int, size: int, stream: int) -> None:
        self.core.mm_arena_at(self.device.arena, position)
        if not size:
            if block in self.live:
                self._free(block)
            return
        if block in self.live:
            self._free(block)
        home, value = self.streams[stream], self.dice.randrange(256)
        address = self.device.alloc(size, home)
        if address is None:
            return
        self.driver.fill(home, address, size, value)
        self.live[block] = address, size, value

    def _free(self, block: int) -> None:
        address, size, value = self.live.pop(block)
        stream = self.dice.choice(self.streams)
        home = self.device.home(address)
        self.driver("cuEventRecord", self.event, home)
        self.driver("cuStreamWaitEvent", stream, self.event, 0)
        self.device.used(address, stream)
        self.driver.check(stream, address, size, value, self.wrong)
        if self.dice.random() < 0.3:
            self.core.mm_device_mark(self.device.handle, stream)
        self.device.free(address)


# A missing wait shows in late mode before it does in the other orders.
@pytest.mark.parametrize(
    "mode", [*(pytest.param(mode, marks=pytest.mark.slow) for mode in (PROMPT, RANDOM)), LATE, THREADED]
)
def test_memory_that_sites_share_is_handed_on_in_stream_order(
    device_core: c.CDLL, loaded_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    monkeypatch.setenv("MEMMGR_CUDA_PAGE", str(PAGE))  # put back at the end
    sited = 0
    for seed in range(40):
        program = Program(device_core, loaded_driver, seed, mode)
        assert program.run() == 0, seed
        sited += program.sited
    assert sited > 200
    loaded_driver.reset(0, PROMPT)


@pytest.mark.parametrize("left_out", ["frame.touched", "site.touched", ""])
def test_without_the_streams_of_a_frame_or_a_site_bytes_are_wrong(fake_driver_path: Path, left_out: str) -> None:
    """A check fails, or the double ends the process because memory is unmapped that is in use."""
    words = [str(build.core_with_mutations()), str(fake_driver_path), left_out]
    command = [sys.executable, "-m", "tests.driver.test_places", *words]
    done = subprocess.run(command, cwd=build.ROOT, capture_output=True, text=True)
    assert done.returncode in ((1, -6, -11) if left_out else (0,)), done.stderr


def main() -> int:
    core, driver = load(Path(sys.argv[1])), FakeDriver(Path(sys.argv[2]))
    assert core.mm_test_leave_out(sys.argv[3].encode()) == 0
    wrong = any(Program(core, driver, seed, LATE).run() > 0 for seed in range(60))
    driver.reset(0, PROMPT)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
