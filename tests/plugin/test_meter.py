"""The figures of torch.cuda's memory functions, and the limits: on the double of the driver, against a model in Python."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driver import build
from driver.device_abi import MIB, PLAIN, UNLIMITED, Device

from . import meter as meters

SMALL_LIMIT = 8 << 10


@pytest.fixture
def make(core: Any, driver: Any) -> Iterator[Any]:
    made = []
    loaded = meters.library(Path(build.core_with_mutations()))

    def of(least_total: int = 0, **options: Any) -> meters.Meter:
        meter = meters.Meter(loaded, Device(core, driver, **options), least_total)
        made.append(meter)
        return meter

    yield of
    for meter in made:
        meter.delete()


class Model:
    """torch's four figures for one row."""

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def add(self, amount: int) -> None:
        self.current += amount
        self.allocated += amount
        self.peak = max(self.peak, self.current)

    def take(self, amount: int) -> None:
        self.current -= amount
        self.freed += amount

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in meters.COUNT}


@pytest.mark.parametrize("seed", range(4))
def test_counts_are_those_of_a_model(make: Any, seed: int) -> None:
    meter, dice = make(), random.Random(seed)
    meter.device.checks = False
    model = {name: {row: Model() for row in meters.ROWS} for name in ("blocks", "bytes", "requested_bytes")}
    live: dict[int, tuple[int, int]] = {}
    freed = {"small": 0, "large": 0}
    for _ in range(400):
        act = dice.random()
        if act < 0.02:
            meter.reset_peaks()
            for name in model:
                for row in model[name].values():
                    row.peak = row.current
        elif act < 0.04:
            meter.reset_sums()
            for name in model:
                for row in model[name].values():
                    row.allocated = row.freed = 0
        elif act < 0.55 or not live:
            size = dice.choice(
                [1, 100, SMALL_LIMIT, SMALL_LIMIT + 1, dice.randrange(1, MIB), dice.randrange(1, 4 * MIB)]
            )
            address = meter.alloc(size)
            assert address is not None
            block = meter.device.core.mm_arena_block_bytes(meter.device.arena, address)
            live[address] = (size, block)
            for row in ("all", "small" if size <= SMALL_LIMIT else "large"):
                for name, amount in zip(model, (1, block, size), strict=True):
                    model[name][row].add(amount)
        else:
            address = dice.choice(list(live))
            size, block = live.pop(address)
            meter.free(address)
            freed["small" if size <= SMALL_LIMIT else "large"] += 1
            for row in ("all", "small" if size <= SMALL_LIMIT else "large"):
                for name, amount in zip(model, (1, block, size), strict=True):
                    model[name][row].take(amount)
        seen = meter.stats()
        assert {name: seen[name] for name in model} == {
            name: {row: found.as_dict() for row, found in rows.items()} for name, rows in model.items()
        }
        arena = meter.device.arena_stats
        assert seen["reserved_bytes"]["current"] == arena.committed_bytes >= arena.live_bytes
        assert meter.live() == arena.live_bytes
        for count in (seen["reserved_bytes"], seen["pages"]):
            assert count["peak"] >= count["current"] >= 0
    assert min(freed.values()) > 10


def test_what_the_driver_gave_is_counted(make: Any) -> None:
    meter = make()
    address = meter.alloc(8 * MIB)
    assert address is not None
    first = meter.stats()
    assert first["pages"]["current"] == first["reserved_bytes"]["current"] // (2 * MIB) == 4
    meter.free(address)
    kept = meter.stats()
    assert kept["reserved_bytes"]["current"] == 8 * MIB  # for the next one
    assert meter.device.trim() == 8 * MIB
    after = meter.stats()
    assert after["reserved_bytes"] == {"current": 0, "peak": 8 * MIB, "allocated": 8 * MIB, "freed": 8 * MIB}
    assert after["pages"] == {"current": 0, "peak": 4, "allocated": 4, "freed": 4}
    meter.reset_peaks()
    meter.reset_sums()
    assert set(meter.stats()["reserved_bytes"].values()) == set(meter.stats()["pages"].values()) == {0}


def test_a_peak_that_the_budgets_own_resets_hide_is_still_seen(make: Any) -> None:
    """The arena's peaks are reset at every pass of a budget; the script's own are not."""
    meter = make()
    address = meter.alloc(8 * MIB)
    meter.free(address)
    meter.device.trim()
    meter.device.core.mm_arena_reset_peak(meter.device.arena)
    assert meter.stats()["reserved_bytes"]["peak"] == 8 * MIB
    meter.reset_peaks()
    assert meter.stats()["reserved_bytes"]["peak"] == 0
    # Committed and given back without a look in between: only the arena's own peak has it.
    address = meter.device.alloc(4 * MIB)
    meter.device.free(address)
    meter.device.trim()
    assert meter.stats()["reserved_bytes"]["peak"] == 4 * MIB


def test_failures_are_counted_until_the_sums_are_reset(make: Any) -> None:
    meter = make()
    meter.failed()
    meter.failed()
    meter.retried()
    assert (meter.stats()["out_of_memory"], meter.stats()["retries"]) == (2, 1)
    meter.reset_peaks()
    assert meter.stats()["out_of_memory"] == 2
    meter.reset_sums()
    assert (meter.stats()["out_of_memory"], meter.stats()["retries"]) == (0, 0)


@pytest.mark.parametrize("memory", [0, PLAIN])
def test_segments_are_covered_by_their_pieces(make: Any, memory: int) -> None:
    meter, dice = make(memory=memory, budget=UNLIMITED if memory == 0 else 64 * MIB), random.Random(1)
    sizes = [dice.choice([100, 5000, 70_000, 700_000]) for _ in range(120)]
    live = {meter.alloc(size): size for size in sizes}
    for address in dice.sample(list(live), 60):
        meter.free(address)
        del live[address]
    segments = meter.segments()
    assert segments
    seen: dict[int, int] = {}
    last = 0
    for (start, size, requested, held), pieces in segments.items():
        assert start >= last
        at = start
        for address, length, asked, is_live in pieces:
            assert address == at
            at += length
            if is_live:
                seen[address] = asked
        assert at == start + size
        last = at
        assert requested == sum(piece[2] for piece in pieces)
        assert held == sum(piece[1] for piece in pieces if piece[3])
    assert seen == live
    assert sum(key[1] for key in segments) == meter.device.arena_stats.committed_bytes


def test_the_lower_limit_wins(make: Any) -> None:
    """The script's own limit, and the budget: in both orders, and each may end."""
    meter = make()
    total = meter.total()
    assert total == 1 << 30
    budget = meter.device.core.mm_arena_budget

    def limit() -> int:
        return int(budget(meter.device.arena))

    assert limit() == UNLIMITED
    assert meter.fraction() == 1
    meter.set_fraction(0.25)
    assert limit() == total // 4
    meter.set_budget(64 * MIB)
    assert limit() == 64 * MIB
    meter.set_budget(512 * MIB)
    assert limit() == total // 4
    meter.set_budget(UNLIMITED)
    assert limit() == total // 4
    meter.set_fraction(1 / 64)
    assert meter.alloc(17 * MIB) is None
    fits = meter.alloc(15 * MIB)
    assert fits is not None
    meter.set_fraction(1)
    assert limit() == UNLIMITED
    assert meter.alloc(17 * MIB) is not None


@pytest.mark.parametrize(("runtimes", "total"), [(1 << 31, 1 << 31), (1 << 29, 1 << 30)])
def test_a_fraction_is_of_the_larger_total(make: Any, runtimes: int, total: int) -> None:
    meter = make(least_total=runtimes)
    meter.set_fraction(0.25)
    assert meter.total() == total
    assert meter.device.core.mm_arena_budget(meter.device.arena) == total // 4


def test_a_block_knows_what_was_asked_for(make: Any) -> None:
    device = make().device
    address = device.alloc(100_001)
    import ctypes

    requested = ctypes.c_size_t(7)
    block = device.core.mm_arena_block
    block.restype, block.argtypes = ctypes.c_size_t, [ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)]
    assert block(device.arena, address, requested) == 100_352
    assert requested.value == 100_001
    assert block(device.arena, address + 512, requested) == 0


def test_another_device_may_be_let_in(make: Any, driver: Any) -> None:
    """Pages that are there, and those that come later; a device is asked for once."""
    device = make().device
    allow = device.core.mm_device_allow
    first = device.alloc(4 * MIB)
    calls = driver.call_count(b"cuMemSetAccess")
    driver.fail_next(b"cuMemSetAccess", 0, 101)
    assert allow(device.handle, 1) == 101  # and it is not let in
    assert allow(device.handle, 1) == 0
    assert driver.call_count(b"cuMemSetAccess") > calls + 1
    calls = driver.call_count(b"cuMemSetAccess")
    assert allow(device.handle, 1) == allow(device.handle, 0) == 0
    assert driver.call_count(b"cuMemSetAccess") == calls
    second = device.alloc(4 * MIB)
    assert driver.call_count(b"cuMemSetAccess") == calls + 1  # for both devices at once
    device.free(first)
    device.free(second)
    plain = make(memory=PLAIN, budget=64 * MIB).device
    assert allow(plain.handle, 1) == -1
