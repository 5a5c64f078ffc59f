"""Random programs on three streams over the host tier, checked against a reference.

A cell's bytes are a pattern that one number stands for (byte i is value + 7 i), so the reference is that number, and the
kernels are the double's: fill, add, check. Some blocks are another allocator's, which hands them on in order of their
home. The program orders its own work as any program must; all else is up to the tier and the device.
"""

import ctypes as c
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from threads import in_threads

from .fake import FakeDriver
from .tier_abi import Device, HostTier

PAGE = 4096
SIZES = (40, 300, 512, 513, 1100, 2048)  # around the slab's unit of 512
ENOSPC, EAGAIN = 28, 11


class WrongBytes(AssertionError):
    """A read, on the device or on the host, did not give the bytes of the reference; or memory was used that was gone."""


@dataclass(eq=False)
class Cell:
    """One version of some bytes: device side, host side and the expected value."""

    size: int
    value: int
    block: int | None = None
    home: int | None = None
    ready: int | None = None  # an event behind the program's last write to the block; None: the tier filled it
    behind: set[int] = field(default_factory=set)  # streams that have waited for the block's bytes
    slot: int | None = None
    used: int = 0  # the clock after the last op on the block


class Workload:
    """Runs `steps` random actions.

    Args:
        library: the core; built with mutations, because a test must look at host bytes without waiting for them.
        omit: the wait that is left out, "" for none.
        folder: for a file of `below` bytes, to which the slab's contents go on.
        beside: another one, whose device and tier this one uses from a thread of its own.
    """

    def __init__(
        self,
        library: c.CDLL,
        driver: FakeDriver,
        seed: int,
        mode: int,
        omit: str = "",
        slab: int = 8192,
        folder: Path | None = None,
        below: int = 0,
        beside: "Workload | None" = None,
    ):
        if beside is None:
            driver.reset(seed, mode)
            driver.set_granularity(PAGE)
            driver.set_lenient(1)
            driver.cuInit(0)
            driver.use_device(0)
        self.library, self.driver, self.omit = library, driver, omit
        self.rng = random.Random(seed)
        self.streams = [driver.stream(), driver.stream(), driver.stream()]
        self.lent: set[int] = set()  # of another allocator, in use
        self.lent_as: dict[int, tuple[int, int]] = {}
        self.lender: dict[tuple[int, int], list[int]] = {}  # free blocks of another allocator by size and home
        self.sums: list[tuple[Cell, int, int]] = []  # begun: the cell, its value, the pending checksum
        self.device = beside.device if beside else Device(library, driver.path)
        self.tier = beside.tier if beside else HostTier(self.device, slab, folder, below)
        self.ladder = folder is not None
        self.looks = not self.ladder  # at host bytes without waiting
        self.cells: list[Cell] = []
        self.wrong = c.c_uint64(0)
        self.host_wrong: list[str] = []
        self.checks = self.no_room = self.reads = 0
        assert library.mm_test_leave_out(omit.encode()) == 0

    def run(self, steps: int) -> None:
        """The whole program; raises at the end if anything was wrong."""
        try:
            self.act(steps)
            self.close()
        finally:
            self.library.mm_test_leave_out(b"")
            self.driver.drain()
        self.raise_if_wrong()

    def act(self, steps: int) -> None:
        actions: list[tuple[Callable[[], None], int]] = [
            (self.make, 6), (self.check, 8), (self.overwrite, 4), (self.hidden_write, 2), (self.write_early, 4),
            (self.offload, 6), (self.drop_clean, 3), (self.prefetch, 4), (self.drop_unused, 2), (self.free_slot, 3),
            (self.die, 2), (self.spill, 1), (self.wait, 1), (self.poll, 1), (self.overtake, 1), (self.mark, 8),
            (self.sum, 2), (self.ends, 2), (self.trim, 1),
        ]  # fmt: skip
        names = [action for action, _ in actions]
        weights = [weight for _, weight in actions]
        for _ in range(steps):
            self.rng.choices(names, weights)[0]()
            self.raise_if_wrong()

    def raise_if_wrong(self) -> None:
        if self.wrong.value or self.host_wrong or self.driver.illegal_uses():
            raise WrongBytes(f"{self.wrong.value} bytes on the device, {self.host_wrong[:2]}")

    def make(self) -> None:
        """A new cell, from nothing or from another one."""
        if len(self.cells) > 12:
            return
        stream = self.rng.choice([self.streams[0], *self.streams])
        source = self.pick(self.rng.randrange(2))
        size = source[0].size if source else self.rng.choice(SIZES)
        delta = self.rng.randrange(1, 255)
        if source and not self.bring(source[0], stream):
            return
        cell = Cell(size, delta, self.take(size, stream), stream, behind={stream})
        assert cell.block is not None
        if source:
            assert source[0].block is not None
            cell.value = (source[0].value + delta) % 256
            self.driver.add(stream, cell.block, source[0].block, size, delta)
        else:
            self.driver.fill(stream, cell.block, size, delta)
        self.note(cell, *source)
        cell.ready = self.record(stream)
        self.cells.append(cell)

    def mark(self) -> None:
        """Now and then, as the pager does between ops."""
        self.library.mm_device_mark(self.device.handle, self.rng.choice(self.streams))

    def note(self, *cells: Cell) -> None:
        """An op has used them, and is queued."""
        for cell in cells:
            cell.used = c.c_uint64.from_address(self.library.mm_device_clock()).value

    def check(self) -> None:
        """An op that reads the cell and compares, at the time when the device runs it."""
        for cell in self.pick(1):
            self.check_on(cell, self.rng.choice(self.streams))

    def check_on(self, cell: Cell, stream: int) -> None:
        if self.bring(cell, stream):
            assert cell.block is not None
            self.checks += 1
            self.driver.check(stream, cell.block, cell.size, cell.value, self.wrong)
            self.note(cell)

    def overwrite(self) -> None:
        """In place, on the home stream: a new version in the same block. The old one lives on in its slot, if any."""
        for cell in self.pick(1, lambda x: x.block is not None and (x.slot is not None or self.rng.random() < 0.3)):
            block, home = cell.block, cell.home
            assert block is not None and home is not None
            self.bring(cell, home)
            for other in cell.behind - {home}:
                self.order(home, other)  # the program's own write-after-read
            delta = self.rng.randrange(1, 255)
            new = Cell(cell.size, (cell.value + delta) % 256, block, home, behind={home})
            if cell.slot is not None:
                assert self.tier.use(cell.slot, home) == 0
                cell.block, cell.behind = None, set()
            else:
                self.cells.remove(cell)
            self.driver.add(home, block, block, cell.size, delta)
            self.note(new)
            new.ready = self.record(home)
            self.cells.append(new)

    def hidden_write(self) -> None:
        """A raw kernel on the other stream writes to a block: all that is known is that this stream had it in hand."""
        for cell in self.pick(1, lambda x: x.block is not None and x.slot is None):
            home = cell.home
            assert home is not None and cell.block is not None
            other = self.rng.choice([stream for stream in self.streams if stream != home])
            self.bring(cell, other)
            for stream in {home} | cell.behind:
                self.order(other, stream)  # reads by earlier ops: its own duty
            delta = self.rng.randrange(1, 255)
            self.driver.add(other, cell.block, cell.block, cell.size, delta)
            cell.value = (cell.value + delta) % 256
            self.note(cell)
            cell.ready, cell.behind = self.record(other), {other}

    def write_early(self) -> None:
        for cell in self.pick(1, lambda x: x.block is not None and x.slot is None):
            self.write(cell)

    def write(self, cell: Cell) -> bool:
        call = self.rng.choice([self.tier.write, self.tier.write_now])
        if self.rng.random() < 0.7:
            self.library.mm_device_note_use(self.device.handle, cell.block, cell.used)
        slot = call(cell.block, cell.size)
        if slot < 0:
            assert slot == -ENOSPC
            self.no_room += 1
            return False
        cell.slot = slot
        return True

    def offload(self) -> None:
        for cell in self.pick(1, lambda x: x.block is not None):
            if cell.slot is not None or self.write(cell):
                self.drop(cell)
                if self.rng.random() < 0.5:  # at once someone else takes the memory
                    self.make()

    def drop_clean(self) -> None:
        for cell in self.pick(1, lambda x: x.block is not None and x.slot is not None):
            self.drop(cell)

    def drop(self, cell: Cell) -> None:
        assert cell.block is not None
        if cell.slot is not None and self.ladder:  # a read from the file may still be under way
            assert self.tier.wait(cell.slot) == 0
        self.give(cell.block)
        cell.block, cell.behind = None, set()

    def take(self, size: int, stream: int) -> int:
        """A block of the device, or one that is lent."""
        if self.rng.random() < 0.8:
            return self.device.alloc(size, stream)
        free = self.lender.setdefault((size, stream), [])
        block = free.pop() if free else self.driver.alloc(size)
        self.library.mm_device_lend(self.device.handle, block, size, stream)
        self.lent.add(block)
        self.lent_as[block] = (size, stream)
        return block

    def give(self, block: int) -> None:
        if block not in self.lent:
            self.device.free(block)
            return
        self.lent.remove(block)
        self.library.mm_device_lent_ends(self.device.handle, block)
        self.lender[self.lent_as[block]].append(block)

    def sum(self) -> None:
        """Begins a checksum as before an eviction: the device takes it after all uses of the block, which may end at once."""
        for cell in self.pick(1, lambda x: x.block is not None and x.ready is not None):
            stream, pending = self.rng.choice(self.streams), c.c_void_p()
            assert self.library.mm_device_wait_block(self.device.handle, stream, cell.block) == 0
            arguments = (self.device.handle, cell.block, cell.size, stream, c.byref(pending))
            assert self.library.mm_device_sum_begin(*arguments) == 0
            assert pending.value
            self.sums.append((cell, cell.value, pending.value))
            if cell.slot is not None or self.write(cell):
                self.drop(cell)
            else:
                self.cells.remove(cell)
                self.drop(cell)

    def check_sums(self) -> None:
        """By the sums of the same bytes, one after the other."""
        for cell, value, pending in self.sums:
            begun, now, stream = c.c_uint64(), c.c_uint64(), self.streams[0]
            block = self.device.alloc(cell.size, stream)
            self.driver.fill(stream, block, cell.size, value)
            assert self.library.mm_device_sum(self.device.handle, block, cell.size, stream, c.byref(now)) == 0
            assert self.library.mm_device_sum_end(self.device.handle, pending, c.byref(begun)) == 0
            self.device.free(block)
            if begun.value != now.value:
                self.host_wrong.append(f"the sum of {cell.size} bytes is another one")

    def trim(self) -> None:
        """Pages without an owner are unmapped, and mapped again where they are needed."""
        self.library.mm_device_trim(self.device.handle, self.rng.randrange(4) * PAGE)

    def ends(self) -> None:
        """One copy has ended; the tier looks."""
        for cell in self.pick(1, lambda x: x.slot is not None):
            self.tier.wait(cell.slot)

    def reload(self, cell: Cell, stream: int) -> None:
        assert cell.slot is not None and cell.block is None
        deferred = self.rng.random() < 0.6
        self.library.mm_device_defer_waits(deferred)
        cell.block, cell.home, cell.ready = self.take(cell.size, stream), stream, None
        self.library.mm_device_defer_waits(0)
        self.note(cell)
        self.reads += 1
        now = self.rng.random() < 0.3
        if not now:
            result = self.tier.read(cell.slot, cell.block)
            assert result == 0 or (
                self.ladder and result in (-ENOSPC, -EAGAIN)
            )  # no room on the way: not ahead of need
            now = result != 0
        if now:
            assert self.tier.read_now(cell.slot, cell.block) == 0
            cell.behind = {stream}
            self.note(cell)
        if self.rng.random() < 0.3:  # not kept as a clean copy
            self.give_slot(cell)

    def give_slot(self, cell: Cell) -> None:
        """A slot may be freed while its copies run, but no thread can wait for it then."""
        if cell.block is not None and cell.ready is None:
            assert cell.home is not None
            self.bring(cell, cell.home)
            cell.ready = self.record(cell.home)
        self.tier.free(cell.slot)
        cell.slot = None

    def prefetch(self) -> None:
        """Several at a time."""
        for cell in self.pick(self.rng.randrange(1, 4), lambda x: x.block is None):
            self.reload(cell, self.rng.choice(self.streams))

    def drop_unused(self) -> None:
        """The prefetch was for nothing."""
        for cell in self.pick(1, lambda x: x.block is not None and not x.behind and x.slot is not None):
            self.drop(cell)
            self.make()

    def free_slot(self) -> None:
        for cell in self.pick(1, lambda x: x.block is not None and x.slot is not None):
            self.give_slot(cell)

    def die(self) -> None:
        for cell in self.pick(1):
            if cell.block is not None:
                self.drop(cell)
            if cell.slot is not None:
                self.tier.free(cell.slot)
            self.cells.remove(cell)

    def spill(self) -> None:
        """The tier below takes the bytes from the slab."""
        for cell in self.pick(1, lambda x: x.slot is not None and self.looks):
            self.compare_host(cell, self.tier.bytes(cell.slot), "spill")

    def wait(self) -> None:
        """After wait() nothing is under way: the host bytes are there and may even be scribbled on."""
        for cell in self.pick(1, lambda x: x.slot is not None):
            assert self.tier.wait(cell.slot) == 0
            if not self.looks:
                return
            address = self.host_address(cell)
            self.compare_host(cell, address, "wait")
            if cell.block is not None:
                self.give_slot(cell)
                c.memset(address, 0x5A, cell.size)

    def poll(self) -> None:
        for cell in self.pick(1, lambda x: x.slot is not None):
            state = self.tier.poll(cell.slot)
            assert state in (0, 1)
            if state == 1 and self.looks:
                self.compare_host(cell, self.host_address(cell), "poll")

    def overtake(self) -> None:
        """A burst at the slab's limit: slots that were just reloaded give their room to the next offloads."""
        for cell in self.pick(2, lambda x: x.block is None):
            self.reload(cell, self.streams[0])
            if cell.slot is not None:
                self.give_slot(cell)
        for cell in self.pick(3, lambda x: x.block is not None and x.slot is None):
            self.write(cell)

    def bring_all(self) -> None:
        for cell in self.cells:
            if cell.block is None:
                self.reload(cell, self.streams[0])
            elif cell.slot is None and self.rng.random() < 0.5:
                self.write(cell)
            if cell.slot is not None:
                self.give_slot(cell)

    def check_all(self) -> None:
        for cell in self.cells:
            self.check_on(cell, self.streams[0])
            self.drop(cell)
        self.check_sums()

    def close(self) -> None:
        """Closes with work under way. A block that was reloaded to the device is good beyond the end of the tier."""
        self.bring_all()
        stats = self.tier.stats
        self.traffic = (stats.written_bytes, stats.read_bytes, stats.queued_write_bytes, stats.queued_read_bytes)
        self.tier.close()
        self.check_all()
        assert self.device.close() == 0
        self.free_lent()

    def free_lent(self) -> None:
        for blocks in self.lender.values():
            for block in blocks:
                self.driver("cuMemFree_v2", block)

    def pick(self, count: int, where: Callable[[Cell], bool] = lambda x: True) -> list[Cell]:
        candidates = [cell for cell in self.cells if where(cell)]
        return self.rng.sample(candidates, min(count, len(candidates)))

    def bring(self, cell: Cell, stream: int) -> bool:
        """Makes the cell's bytes visible to the next op on `stream`, and says that it uses them."""
        if cell.block is None:
            if cell.slot is None:
                return False
            self.reload(cell, stream)
        if stream not in cell.behind:
            if cell.ready is None:
                assert self.tier.use(cell.slot, stream) == 0
                self.note(cell)
            else:
                self.driver("cuStreamWaitEvent", stream, cell.ready, 0)
            cell.behind.add(stream)
        if stream != cell.home:
            assert cell.block is not None
            self.device.used(cell.block, stream)
        return True

    def record(self, stream: int) -> int:
        event = self.driver.event()
        self.driver("cuEventRecord", event, stream)
        return event

    def order(self, later: int, earlier: int) -> None:
        self.driver("cuStreamWaitEvent", later, self.record(earlier), 0)

    def host_address(self, cell: Cell) -> int:
        """The slot's place without waiting for anything."""
        self.library.mm_test_leave_out(b"bytes.write")
        address = self.tier.bytes(cell.slot)
        self.library.mm_test_leave_out(self.omit.encode())
        return address

    def compare_host(self, cell: Cell, address: int, what: str) -> None:
        self.checks += 1
        if c.string_at(address, cell.size) != pattern(cell.value, cell.size):
            self.host_wrong.append(f"{what}: {cell.size} host bytes differ")


def pattern(value: int, size: int) -> bytes:
    """The bytes that the double's fill writes."""
    return bytes((value + 7 * i) % 256 for i in range(size))


def run_seed(
    library: c.CDLL, driver: FakeDriver, seed: int, mode: int, omit: str = "", steps: int = 150, **tier: Any
) -> Workload:
    """The workload of one seed, which fixes both the program and the device's order."""
    workload = Workload(library, driver, seed, mode, omit, **tier)
    workload.run(steps)
    return workload


def run_pair(library: c.CDLL, driver: FakeDriver, seed: int, mode: int, steps: int = 150) -> int:
    """Two programs on streams of their own, in two threads, over one device and one tier. How much was checked."""
    first = Workload(library, driver, seed, mode)
    second = Workload(library, driver, seed + 1, mode, beside=first)
    first.looks = second.looks = False  # the switch for that is both threads'

    def act(workload: Workload) -> None:
        driver.use_device(0)
        workload.act(steps)

    try:
        in_threads(act, (first, second))
    except BaseException:
        driver.drain()
        raise
    second.bring_all()
    second.check_all()
    first.close()
    second.free_lent()
    driver.drain()
    for workload in (first, second):
        workload.raise_if_wrong()
    return first.checks + second.checks
