"""Leaving out any one wait of the host tier gives wrong bytes; the list of them is complete; times of last uses."""

import ctypes as c
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import build
from .fake import LATE, PROMPT, RANDOM, FakeDriver
from .test_device import OF_COPIES
from .test_host_tier import Bench
from .workload import ENOSPC, WrongBytes, pattern, run_seed

SOURCE = (build.CORE / "host_tier.cpp").read_text()
NAMES = re.findall(r'\bOrder<"([^"]+)">', SOURCE)
SEEDS = range(100)

# Calls that order work, or wait for it.
ORDERING = r"StreamWaitEvent|StreamSynchronize|EventSynchronize|CtxSynchronize|WaitForTouched|WaitForTail|->Touch"


@pytest.mark.parametrize("name", [*NAMES, OF_COPIES])
def test_leaving_it_out_is_noticed(core, driver: FakeDriver, name: str, tmp_path: Path) -> None:
    """At least one seed fails without it, by its bytes, and the same seed passes with it."""
    # Only the code between the slab and a file calls these.
    ladder: dict[str, Any] = {"folder": tmp_path, "slab": 4096, "below": 12 << 10}
    tier = ladder if name.startswith(("reserve.", "fill.")) else {}
    for seed in SEEDS:
        for mode in (RANDOM, LATE):
            try:
                run_seed(core, driver, seed, mode, omit=name, **tier)
            except WrongBytes:
                run_seed(core, driver, seed, mode, **tier)
                return
    pytest.fail(f"no seed notices that {name} is missing")


def test_the_list_is_complete(core) -> None:
    """Each name stands at one place, the library knows it, and the header's table has it."""
    assert len(NAMES) == len(set(NAMES)) > 10
    assert set(NAMES) <= set(core.mm_test_wait_names().decode().split())
    table = (build.CORE / "host_tier.h").read_text().split("Words:")[1].split("#pragma once")[0]
    named = set(re.findall(r"\b[a-z]+\.[a-z_]+\b", table))
    assert {name for name in named if not name.endswith((".py", ".h"))} == set(NAMES)  # without the names of files


def test_no_wait_passes_by_the_names() -> None:
    """Calls that order work stand in an Order, or in the two helpers that are called in one; each has its reason."""
    direct = [line.strip() for line in SOURCE.splitlines() if re.search(ORDERING, line) and "Order<" not in line]
    assert direct == [
        # Queue: only after an error.
        "if (error != 0) driver().StreamSynchronize(link.stream);",
        # WaitFor and Synchronize.
        "return DriverErrno(driver().StreamWaitEvent(waiter, operation->end, 0));",
        "const CUresult result = driver().EventSynchronize(end);",
    ]
    for helper in ("WaitFor", "Synchronize"):
        calls = [line for line in SOURCE.splitlines() if re.search(rf"(?<![\w:.]){helper}\(", line)]
        assert calls and all("Order<" in line for line in calls), calls


def test_a_device_that_is_always_idle_needs_none(core, driver: FakeDriver) -> None:
    """The failures above are of order alone: with nothing late, leaving out any wait changes nothing."""
    for name in NAMES:
        for seed in range(3):
            run_seed(core, driver, seed, PROMPT, omit=name)


MIB = 1 << 20


class Scene(Bench):
    """A device on which work runs only for a wait, a stream of the program, and a tier."""

    def __init__(self, core: c.CDLL, driver: FakeDriver):
        super().__init__(core, driver, LATE, 32 * MIB)
        self.core = core

    def filled(self, value: int) -> int:
        return super().filled(4 * MIB, value)

    def clock(self) -> int:
        return c.c_uint64.from_address(self.core.mm_device_clock()).value

    def mark(self) -> None:
        self.core.mm_device_mark(self.device.handle, self.stream)

    def run(self) -> None:
        """Runs the stream's work and the work that it waits for."""
        self.driver("cuStreamSynchronize", self.stream)


@pytest.fixture
def scene(core, driver: FakeDriver) -> Iterator[Scene]:
    scene = Scene(core, driver)
    yield scene
    scene.close()


def test_the_next_owner_waits_for_the_copy_and_not_for_later_ones(scene: Scene) -> None:
    """A's memory is taken again; a copy of B was queued behind that of A and has not run when compute goes on."""
    first, second = scene.filled(1), scene.filled(2)
    of_first = scene.tier.write(first, 4 * MIB)
    scene.device.free(first)
    of_second = scene.tier.write(second, 4 * MIB)
    assert scene.device.alloc(4 * MIB, scene.stream) == first
    scene.run()
    assert (scene.tier.poll(of_first), scene.tier.poll(of_second)) == (1, 0)


@pytest.mark.parametrize("noted", [True, False])
def test_a_copy_waits_for_the_last_use_and_not_for_later_work(scene: Scene, noted: bool) -> None:
    """A was last used before a mark; work that the program queues behind it need not run for A's copy."""
    cold = scene.filled(1)
    used = scene.clock()
    scene.mark()
    later = scene.filled(7)
    if noted:
        scene.core.mm_device_note_use(scene.device.handle, cold, used)
    slot = scene.tier.write(cold, 4 * MIB)
    assert scene.tier.wait(slot) == 0
    ran = c.string_at(later, 64) == pattern(7, 64)
    assert ran == (not noted)


@pytest.mark.parametrize("deferred", [True, False])
def test_a_reload_waits_for_who_had_its_memory_and_not_for_later_work(scene: Scene, deferred: bool) -> None:
    block, beside = scene.filled(1), scene.filled(5)
    slot = scene.tier.write(block, 4 * MIB)
    assert scene.tier.wait(slot) == 0
    scene.device.free(block)
    scene.mark()
    busy = scene.device.alloc(8 * MIB, scene.stream)
    scene.driver.fill(scene.stream, busy, 8 * MIB, 9)
    scene.core.mm_device_defer_waits(deferred)
    target = scene.device.alloc(4 * MIB, scene.stream)
    scene.core.mm_device_defer_waits(0)
    assert (target, beside) == (block, block + 4 * MIB)
    assert scene.tier.read(slot, target) == 0
    assert scene.tier.wait(slot) == 0
    assert c.string_at(target, 64) == pattern(1, 64)
    assert (c.string_at(busy, 64) == pattern(9, 64)) == (not deferred)


def test_the_end_of_one_copy_says_nothing_of_another_in_the_same_memory(scene: Scene) -> None:
    """A and B leave, C takes the memory of both and waits for nobody. A's copy ends; that of B still reads half of C."""
    first, second = scene.filled(1), scene.filled(2)
    beyond = scene.device.alloc(8 * MIB, scene.stream)
    scene.driver.fill(scene.stream, beyond, 8 * MIB, 7)
    long = scene.tier.write(beyond, 8 * MIB)
    assert scene.tier.wait(long) == 0
    slots = [scene.tier.write(block, 4 * MIB) for block in (first, second)]
    scene.device.free(first)
    scene.device.free(second)
    scene.core.mm_device_defer_waits(1)
    target = scene.device.alloc(8 * MIB, scene.stream)
    scene.core.mm_device_defer_waits(0)
    assert target == first
    assert scene.tier.wait(slots[0]) == 0
    assert scene.tier.read(long, target) == 0
    assert scene.tier.wait(long) == 0
    assert c.string_at(scene.tier.bytes(slots[1]), 64) == pattern(2, 64)


def test_a_note_of_a_refused_write_is_forgotten(scene: Scene) -> None:
    """There is no room for A, which is then used again; the next write of it waits for that, too."""
    cold, large = scene.filled(1), scene.device.alloc(30 * MIB, scene.stream)
    full = scene.tier.write(large, 30 * MIB)
    assert scene.tier.wait(full) == 0
    scene.core.mm_device_note_use(scene.device.handle, cold, scene.clock())
    assert scene.tier.write(cold, 4 * MIB) == -ENOSPC
    scene.tier.free(full)
    scene.mark()
    scene.driver.fill(scene.stream, cold, 4 * MIB, 9)
    slot = scene.tier.write(cold, 4 * MIB)
    assert c.string_at(scene.tier.bytes(slot), 64) == pattern(9, 64)


def test_a_lent_block_that_was_not_written_ends_behind_its_last_use(scene: Scene) -> None:
    """Its write was refused; a second stream used it afterwards; its memory is its home's again."""
    other, wrong = scene.driver.stream(), c.c_uint64()
    block = scene.driver.alloc(4 * MIB)
    scene.core.mm_device_lend(scene.device.handle, block, 4 * MIB, scene.stream)
    scene.driver.fill(scene.stream, block, 4 * MIB, 1)
    scene.run()
    scene.core.mm_device_note_use(scene.device.handle, block, scene.clock())
    assert scene.tier.write(block, 64 * MIB) == -ENOSPC
    scene.device.used(block, other)
    scene.core.mm_device_mark(scene.device.handle, other)
    scene.driver.check(other, block, 4 * MIB, 1, wrong)
    scene.core.mm_device_lent_ends(scene.device.handle, block)
    scene.driver.fill(scene.stream, block, 4 * MIB, 2)
    scene.run()
    scene.driver.drain()
    assert wrong.value == 0
    scene.driver("cuMemFree_v2", block)


def test_other_names_are_refused(core) -> None:
    assert core.mm_test_leave_out(b"no.such") == -1
    assert core.mm_test_leave_out(None) == core.mm_test_leave_out(b"") == 0


PROGRAM = r"""
#include "base/latest.h"
#include <thread>
using memmgr::pager::raise_to;
std::atomic<uint64_t> now{1}, latest{0};
int main() {
  // One thread has read the clock and is late; the other's later work, behind a mark, was noted meanwhile.
  raise_to(latest, 6);
  raise_to(latest, 5);
  if (latest.load() != 6) return 1;
  const auto use = [] {
    for (int i = 0; i < 100000; ++i) raise_to(latest, now.fetch_add(1) + 1);
  };
  std::thread one(use), other(use);
  one.join();
  other.join();
  return latest.load() == now.load() ? 0 : 2;
}
"""


def test_an_older_time_never_replaces_a_later_one(tmp_path: Path) -> None:
    compiler = build.compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, program = tmp_path / "latest.cpp", tmp_path / "latest"
    source.write_text(PROGRAM)
    pager = build.CORE.parent / "pager"
    subprocess.run([compiler, "-std=c++20", "-O2", "-pthread", f"-I{pager}", source, "-o", program], check=True)
    assert subprocess.run([program]).returncode == 0
