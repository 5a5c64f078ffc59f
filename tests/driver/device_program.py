"""Random programs that use a device's memory like a training script, with kernels that check the bytes that they read.

Every block is filled by a kernel on its home, and checked by kernels there and on other streams (which wait for the
home by an event of their own, and are declared with ``mm_device_used``). It is freed with that work still queued. If
memory is handed on too early, a check finds another owner's bytes.

``python -m tests.driver.device_program <core> <driver> <mode> <memory> <left out> <seeds>`` ends with 1 when a check
failed; a wait that is left out may also end the process.
"""

import ctypes as c
import random
import sys
from dataclasses import dataclass
from pathlib import Path

from .device_abi import MIB, Device, load
from .fake import PROMPT, FakeDriver

KIB = 1024
BUDGET = 24 * MIB
STREAMS = 4


@dataclass
class Block:
    address: int
    size: int
    value: int


@dataclass
class Graph:
    pool: int
    stream: int  # where it was captured


class Program:
    def __init__(self, core: c.CDLL, driver: FakeDriver, seed: int, mode: int, memory: int):
        self.dice = random.Random(seed)
        driver.reset(seed, mode)
        driver.set_granularity(64 * KIB)
        driver.use_device(0)
        self.driver = driver
        self.device = Device(core, driver, budget=BUDGET, memory=memory)
        self.streams = [driver.stream() for _ in range(STREAMS)]
        self.event = driver.event()
        self.page_locked = driver.host_alloc(1000)  # a copy into other memory is over when the call returns
        self.blocks: list[Block] = []
        self.graphs: list[Graph] = []
        self.pools = 0
        self.wrong = c.c_uint64()

    def run(self, steps: int = 120) -> int:
        """The number of bytes that a check found wrong."""
        device = self.device
        for _ in range(steps):
            if self.dice.random() < 0.3:
                self._mark()
            chance = self.dice.random()
            if chance < 0.45 or not self.blocks:
                self._alloc(self.dice.choice(self.streams))
            elif chance < 0.60:
                self._use_elsewhere(self.dice.choice(self.blocks))
            elif chance < 0.90:
                self._free()
            elif chance < 0.92:
                device.trim(self.dice.randrange(BUDGET))
            elif chance < 0.94:
                device.synchronize()
            elif chance < 0.96:
                self._fetch(self.dice.choice(self.blocks))
            else:
                self._graph()
        while self.blocks:
            self._free()
        while self.graphs:
            device.release_pool(self.graphs.pop().pool)
        assert device.close() == 0
        self.driver.drain()
        return self.wrong.value

    def _alloc(self, stream: int) -> Block | None:
        size = self.dice.choice([100, 5000, 20 * KIB, 64 * KIB, 200 * KIB, MIB, 3 * MIB])
        if self.dice.random() < 0.1:
            address = self.device.try_alloc(size, stream)
        else:
            address = self.device.alloc(size, stream)
        while address is None and self.blocks:
            self._free()
            address = self.device.alloc(size, stream)
        if address is None:
            return None
        assert self.device.home(address) == stream
        block = Block(address, size, self.dice.randrange(256))
        self.driver.fill(stream, block.address, block.size, block.value)
        self.blocks.append(block)
        return block

    def _check(self, stream: int, block: Block) -> None:
        self.driver.check(stream, block.address, block.size, block.value, self.wrong)

    def _mark(self) -> None:
        stream = self.dice.choice(self.streams)
        self.device.core.mm_device_mark(self.device.handle, stream)

    def _use_elsewhere(self, block: Block) -> None:
        home, other = self.device.home(block.address), self.dice.choice(self.streams)
        self.driver("cuEventRecord", self.event, home)
        self.driver("cuStreamWaitEvent", other, self.event, 0)
        self.device.used(block.address, other)
        self._check(other, block)

    def _free(self) -> None:
        block = self.blocks.pop(self.dice.randrange(len(self.blocks)))
        self._check(self.device.home(block.address), block)
        self.device.free(block.address)

    def _fetch(self, block: Block) -> None:
        size = min(block.size, 1000)
        core, home = self.device.core, self.device.home(block.address)
        assert core.mm_device_fetch(self.device.handle, self.page_locked, block.address, size, home) == 0
        got = c.string_at(self.page_locked, size)
        self.wrong.value += sum(got[i] != (block.value + 7 * i) % 256 for i in range(size))

    def _graph(self) -> None:
        if self.graphs and self.dice.random() < 0.6:
            graph = self.graphs.pop()
            stream = self.dice.choice(self.streams)  # one: a graph does not run beside itself
            for _ in range(self.dice.randrange(3)):
                self.driver.replay(graph.stream, stream)
            self.device.release_pool(graph.pool)
            return
        self.pools += 1
        stream = self.driver.stream()
        self.device.begin_pool(self.pools)
        self.driver.set_capturing(stream, 1)
        for _ in range(4):
            size = self.dice.choice([100, 20 * KIB, 200 * KIB])
            address = self.device.alloc(size, stream)
            if address is not None:
                block = Block(address, size, self.dice.randrange(256))
                self.driver.fill(stream, address, size, block.value)
                self._check(stream, block)
                self.device.free(address)
        self.driver.set_capturing(stream, 0)
        self.device.end_pool(self.pools)
        self.graphs.append(Graph(self.pools, stream))


def main() -> int:
    core_path, driver_path, mode, memory, left_out, seeds = sys.argv[1:]
    core, driver = load(Path(core_path)), FakeDriver(Path(driver_path))
    if core.mm_test_leave_out(left_out.encode()) != 0:
        return 2
    for seed in range(int(seeds)):
        if Program(core, driver, seed, int(mode), int(memory)).run() > 0:
            return 1
    driver.reset(0, PROMPT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
