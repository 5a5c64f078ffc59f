"""A random program on the host tier, and what its bytes must be.

The program makes cells with ops on two streams, writes them early or when dropped, drops them, prefetches, reloads,
reads them on either stream, overwrites them in place, lets blocks and slots die in every state, spills, and closes with
work under way. Beside each op its result is computed at once on plain bytes; every read is compared with it.

The program synchronises its own two streams correctly, as a PyTorch program must; all else is up to the tier.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from memmgr.tiers.host import Slot
from memmgr.tiers.streams import Reload

from .double import FakeBlock, FakeEvent, FakeStream, FakeStreams
from .mutations import MutantTier

SIZES = (40, 300, 512, 513, 1100, 2048)  # around the slab's unit of 512


class WrongBytes(AssertionError):
    """A read, on the device or on the host, did not give the bytes of the reference."""


@dataclass(eq=False)
class Cell:
    """One version of some bytes; device side, host side and what they must be."""

    nbytes: int
    expected: bytes
    block: FakeBlock | None = None
    last_write: FakeEvent | None = None  # known to the tier's caller
    used: dict[FakeStream, FakeEvent] = field(default_factory=dict)  # other streams than home, newest use of each
    slot: Slot | None = None
    reload: Reload | None = None  # filled by a reload: to be used through it
    waited: set[FakeStream] = field(default_factory=set)  # streams that did


def combine(parts: list[bytes], nbytes: int, salt: int) -> bytes:
    """The op of this program: mixes its inputs into `nbytes` bytes, so that any wrong byte comes through."""
    out = bytearray(random.Random(salt).randbytes(nbytes))
    for part in parts:
        step = max(1, len(part) // nbytes)
        for i in range(0, len(part), step):
            out[i % nbytes] = (out[i % nbytes] * 3 + part[i]) & 0xFF
    return bytes(out)


def mix_in_place(data: bytearray, nbytes: int, salt: int) -> Callable[[], None]:
    """An op that overwrites its input."""

    def op() -> None:
        data[:nbytes] = combine([bytes(data[:nbytes])], nbytes, salt)

    return op


class Workload:
    """Runs `steps` random actions.

    Args:
        rng: decides what the program does (hypothesis may give one that shrinks).
        seed: of the device's scheduler.
        slab_bytes: small, so that slots are reused and room runs out.
        omit: sites of the tier that are left out, see mutations.py.
    """

    def __init__(
        self,
        rng: random.Random,
        seed: int,
        slab_bytes: int = 8192,
        omit: frozenset[str] = frozenset(),
        prompt: bool = False,
    ) -> None:
        self.rng = rng
        self.device = FakeStreams(seed, extra_streams=["second"], prompt=prompt)
        self.second = self.device.extra[0]
        self.tier = MutantTier(self.device, slab_bytes, omit)
        self.cells: list[Cell] = []
        self.salt = 0
        self.wrong: list[str] = []
        self.checks = 0
        self.no_room = 0

    def run(self, steps: int) -> None:
        """The whole program; raises at the end if anything was wrong."""
        actions: list[tuple[Callable[[], None], int]] = [
            (self.make, 6), (self.consume, 6), (self.check_on_second, 3), (self.overwrite, 4), (self.hidden_write, 2),
            (self.write_early, 4), (self.offload, 6), (self.drop_clean, 3), (self.prefetch, 4), (self.drop_unused, 2),
            (self.free_slot, 3), (self.die, 2), (self.spill, 1), (self.wait, 1), (self.poll, 1), (self.overtake, 1),
        ]  # fmt: skip
        names = [action for action, _ in actions]
        weights = [weight for _, weight in actions]
        for _ in range(steps):
            self.rng.choices(names, weights)[0]()
            self.tier._slab.check_invariants()
            self.raise_if_wrong()
        self.close()
        self.device.drain()
        self.raise_if_wrong()
        self.cells.clear()
        assert self.device.live_regions == 0, "the tier holds blocks after it was closed"

    def raise_if_wrong(self) -> None:
        if self.wrong:
            raise WrongBytes("; ".join(self.wrong[:3]))

    # ---- ops -----------------------------------------------------------------------------------------------------

    def make(self, stream: FakeStream | None = None) -> None:
        """A new cell from up to two others, at times on the second stream."""
        if len(self.cells) > 12:
            return
        stream = stream or self.rng.choice([self.device.compute, self.device.compute, self.second])
        inputs = [cell for cell in self.pick(self.rng.randrange(3)) if self.bring(cell, stream)]
        self.salt += 1
        nbytes, salt = self.rng.choice(SIZES), self.salt
        block = self.device.allocate(nbytes, stream)
        cell = Cell(nbytes, combine([c.expected for c in inputs], nbytes, salt), block)
        sources = [(c.block.region.data, c.nbytes) for c in inputs if c.block]
        target = block.region.data

        def op() -> None:
            target[:nbytes] = combine([bytes(data[:n]) for data, n in sources], nbytes, salt)

        self.device.launch(stream, op)
        cell.last_write = self.device.record(stream)
        for source in inputs:
            self.note_use(source, stream)
        self.cells.append(cell)

    def check(self, cell: Cell, stream: FakeStream) -> None:
        """An op that reads the cell and compares, at the time when the device runs it."""
        if not self.bring(cell, stream):
            return
        assert cell.block is not None
        data, nbytes, expected, number = cell.block.region.data, cell.nbytes, cell.expected, self.checks
        self.checks += 1

        def op() -> None:
            if bytes(data[:nbytes]) != expected:
                self.wrong.append(f"check {number} on {stream.name}: {nbytes} bytes differ")

        self.device.launch(stream, op)
        self.note_use(cell, stream)

    def consume(self) -> None:
        for cell in self.pick(1):
            self.check(cell, self.device.compute)

    def check_on_second(self) -> None:
        for cell in self.pick(1):
            self.check(cell, self.second)

    def overwrite(self) -> None:
        """In place, on the home stream: a new version in the same block. The old one lives on in its slot, if any."""
        for cell in self.pick(1, lambda c: c.block is not None and (c.slot is not None or self.rng.random() < 0.3)):
            block = cell.block
            assert block is not None
            stream = block.region.home
            self.bring(cell, stream)
            for event in cell.used.values():
                self.device.wait(stream, event)  # the program's own write-after-read, its own duty
            new = Cell(cell.nbytes, b"", block)
            if cell.slot is not None:
                self.tier.before_overwrite(cell.slot, stream)
            cell.block, cell.reload, cell.used, cell.waited = None, None, {}, set()
            if cell.slot is None:
                self.cells.remove(cell)
            self.salt += 1
            salt, nbytes, data = self.salt, cell.nbytes, block.region.data
            new.expected = combine([cell.expected], nbytes, salt)
            self.device.launch(stream, mix_in_place(data, nbytes, salt))
            new.last_write = self.device.record(stream)
            self.cells.append(new)

    def hidden_write(self) -> None:
        """A raw kernel on the second stream writes to a block: all that is known is that this stream had it in hand."""
        for cell in self.pick(1, lambda c: c.block is not None and c.slot is None):
            block = cell.block
            assert block is not None
            if block.region.home is self.second:
                return
            self.bring(cell, self.second)
            self.device.wait(self.second, self.device.record(block.region.home))  # reads by earlier ops: its own duty
            self.salt += 1
            salt, nbytes, data = self.salt, cell.nbytes, block.region.data
            cell.expected = combine([cell.expected], nbytes, salt)
            self.device.launch(self.second, mix_in_place(data, nbytes, salt))
            self.note_use(cell, self.second)
            # The program orders its own later reads on the home stream.
            self.device.wait(block.region.home, cell.used[self.second])

    # ---- the manager's moves -------------------------------------------------------------------------------------

    def write_early(self) -> None:
        for cell in self.pick(1, lambda c: c.block is not None and c.slot is None):
            self.write(cell)

    def write(self, cell: Cell) -> bool:
        assert cell.block is not None and cell.last_write is not None
        home = cell.block.region.home if self.rng.random() < 0.5 else None
        cell.slot = self.tier.write(cell.block, cell.nbytes, cell.last_write, list(cell.used.values()), home)
        self.no_room += cell.slot is None
        return cell.slot is not None

    def offload(self) -> None:
        for cell in self.pick(1, lambda c: c.block is not None):
            if cell.slot is not None or self.write(cell):
                self.drop(cell)
                if self.rng.random() < 0.5:  # at once someone else takes the memory
                    self.make(self.device.compute)

    def drop_clean(self) -> None:
        for cell in self.pick(1, lambda c: c.block is not None and c.slot is not None):
            self.drop(cell)

    def drop(self, cell: Cell) -> None:
        block, cell.block = cell.block, None
        assert block is not None
        if cell.used or self.rng.random() < 0.5:
            self.tier.drop(block, list(cell.used.values()), block.region.home)
        # else: it simply dies, as when the last tensor on a storage is deleted
        cell.last_write, cell.reload, cell.used, cell.waited = None, None, {}, set()
        del block

    def reload(self, cell: Cell, stream: FakeStream) -> None:
        assert cell.slot is not None and cell.block is None
        cell.reload = self.tier.read(cell.slot, None if stream is self.device.compute else stream)
        cell.block, cell.last_write = cell.reload.block, cell.reload.ready
        if self.rng.random() < 0.3:  # not kept as a clean copy
            self.tier.free(cell.slot)
            cell.slot = None

    def prefetch(self) -> None:
        """Several at a time."""
        for cell in self.pick(self.rng.randrange(1, 4), lambda c: c.block is None):
            self.reload(cell, self.rng.choice([self.device.compute, self.second]))

    def drop_unused(self) -> None:
        """The prefetch was for nothing."""
        for cell in self.pick(1, lambda c: c.reload is not None and not c.waited and c.slot is not None):
            self.drop(cell)
            self.make(self.device.compute)

    def free_slot(self) -> None:
        for cell in self.pick(1, lambda c: c.block is not None and c.slot is not None):
            assert cell.slot is not None
            self.tier.free(cell.slot)
            cell.slot = None

    def die(self) -> None:
        for cell in self.pick(1):
            if cell.block is not None:
                self.drop(cell)
            if cell.slot is not None:
                self.tier.free(cell.slot)
            self.cells.remove(cell)

    def spill(self) -> None:
        """The tier below takes the bytes from the slab."""
        for cell in self.pick(1, lambda c: c.slot is not None):
            assert cell.slot is not None
            self.compare_host(cell, self.tier.host_address(cell.slot), "spill")

    def wait(self) -> None:
        """After wait() nothing is under way: the host bytes are there and may even be scribbled on."""
        for cell in self.pick(1, lambda c: c.slot is not None):
            assert cell.slot is not None
            self.tier.wait(cell.slot)
            self.compare_host(cell, self.slab_address(cell.slot), "wait")
            if cell.block is not None:
                slot, cell.slot = cell.slot, None
                ctypes.memset(self.slab_address(slot), 0x5A, slot.nbytes)
                self.tier.free(slot)

    def poll(self) -> None:
        for cell in self.pick(1, lambda c: c.slot is not None):
            if cell.slot is not None and self.tier.poll(cell.slot):
                self.compare_host(cell, self.slab_address(cell.slot), "poll")

    def overtake(self) -> None:
        """A burst at the slab's limit: what was just reloaded gives its room to what is offloaded next."""
        for cell in self.pick(2, lambda c: c.block is None):
            self.reload(cell, self.device.compute)
            if cell.slot is not None:
                self.tier.free(cell.slot)
                cell.slot = None
        for cell in self.pick(3, lambda c: c.block is not None and c.slot is None):
            self.write(cell)

    def close(self) -> None:
        """With work under way. What has come back to the device is good beyond the end of the tier."""
        for cell in list(self.cells):
            if cell.block is None:
                self.reload(cell, self.device.compute)
            elif cell.slot is None and self.rng.random() < 0.5:
                self.write(cell)
        self.tier.close()
        for cell in self.cells:
            self.check(cell, self.device.compute)

    # ---- helpers -------------------------------------------------------------------------------------------------

    def pick(self, count: int, where: Callable[[Cell], bool] = lambda c: True) -> list[Cell]:
        candidates = [cell for cell in self.cells if where(cell)]
        return self.rng.sample(candidates, min(count, len(candidates)))

    def bring(self, cell: Cell, stream: FakeStream) -> bool:
        """Makes the cell's bytes visible to the next op on `stream`."""
        if cell.block is None:
            if cell.slot is None:
                return False
            self.reload(cell, stream)
        if cell.reload is not None:
            if stream not in cell.waited:
                self.tier.use(cell.reload, stream)
                cell.waited.add(stream)
        else:
            assert cell.block is not None and cell.last_write is not None
            if cell.block.region.home is not stream:
                self.device.wait(stream, cell.last_write)  # the program's own duty
        return True

    def note_use(self, cell: Cell, stream: FakeStream) -> None:
        assert cell.block is not None
        if cell.block.region.home is not stream:
            cell.used[stream] = self.device.record(stream)

    def slab_address(self, slot: Slot) -> int:
        """The slot's place without waiting for anything, unlike `host_address`."""
        return self.device.host_address(self.tier._memory) + slot.offset_bytes

    def compare_host(self, cell: Cell, address: int, what: str) -> None:
        self.checks += 1
        if ctypes.string_at(address, cell.nbytes) != cell.expected:
            self.wrong.append(f"{what}: {cell.nbytes} host bytes differ")


def run_seed(seed: int, omit: frozenset[str] = frozenset(), steps: int = 150, prompt: bool = False) -> Workload:
    """The workload of one seed, which fixes both the program and the device's order."""
    workload = Workload(random.Random(seed), seed + 1_000_003, omit=omit, prompt=prompt)
    workload.run(steps)
    return workload
