"""A double of an accelerator: streams that run late and in random order, and memory that does not forgive.

Device work (copies, ops) is queued and executed by a scheduler that picks a random runnable stream at each step: order
within a stream is kept, order between streams is kept only by an explicit wait. Copies run in two halves, so that other
work can fall between them. How fast each stream is changes at random, down to "not before someone waits for it".

Memory that is given back is reused eagerly: the next allocation gets the block that was freed last. It is poisoned
twice: some time after the free, and again in stream order when it is handed out. Only work that was ordered, by the
home stream or by the events given to `free`, is safe from that. Everything is a function of the seed and of the calls
made.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from memmgr.tiers.streams import HostRange, StreamApi

POISON = 0xA5


class Deadlock(AssertionError):
    """Work is queued and none can run."""


class HostUseAfterFree(AssertionError):
    """A copy ran on page-locked memory that had been given back."""


class CopyRefused(RuntimeError):
    """An injected fault."""


class FakeEvent:
    """Passes when the scheduler reaches its mark."""

    def __init__(self) -> None:
        self.passed = False


Task = FakeEvent | Callable[[], None]  # an event to wait for, or something to do


class FakeStream:
    """A queue of tasks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tasks: deque[Task] = deque()
        self.weight = 1.0  # relative speed

    def runnable(self) -> bool:
        while self.tasks and isinstance(self.tasks[0], FakeEvent) and self.tasks[0].passed:
            self.tasks.popleft()
        return bool(self.tasks) and not isinstance(self.tasks[0], FakeEvent)


class Region:
    """Device memory: what a block occupies for a while."""

    def __init__(self, nbytes: int, home: FakeStream) -> None:
        self.data = bytearray([POISON]) * nbytes
        self.home = home
        self.after: list[FakeEvent] = []  # must pass before the next owner, beside the order of `home`
        self.freed_at = FakeEvent()  # recorded on `home` when the block died
        self.grave = FakeStream("grave")  # where the late poison is queued


class FakeBlock:
    """A reference-counted handle on a region, like a storage: its death gives the memory back, in home stream order."""

    def __init__(self, streams: FakeStreams, region: Region) -> None:
        self._streams = streams
        self.region = region

    def __del__(self) -> None:
        self._streams._give_back(self.region)


class FakeHost:
    """Page-locked memory of the double."""

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray([POISON]) * nbytes
        self.freed = False


class FakeStreams:
    """Implements `StreamApi`.

    Args:
        seed: of the scheduler.
        extra_streams: names of the program's streams beside `compute`.
        prompt: True runs all runnable work at every call: a device that is always idle.
    """

    def __init__(self, seed: int, extra_streams: Sequence[str] = (), prompt: bool = False) -> None:
        self._random = random.Random(seed)
        self._prompt = prompt
        self._write = FakeStream("write")
        self._read = FakeStream("read")
        self.compute = FakeStream("compute")
        self.extra = [FakeStream(name) for name in extra_streams]
        self._streams = [self._write, self._read, self.compute, *self.extra]
        self._free: list[Region] = []  # last in, first out
        self._graves: list[FakeStream] = []
        self._pace = 1.0
        self.live_regions = 0
        self.refuse_copies = 0
        self._change_pace()

    # ---- StreamApi -----------------------------------------------------------------------------------------------

    @property
    def write_stream(self) -> FakeStream:
        return self._write

    @property
    def read_stream(self) -> FakeStream:
        return self._read

    def current_stream(self) -> FakeStream:
        return self.compute

    def record(self, stream: FakeStream) -> FakeEvent:
        event = FakeEvent()
        self._record(stream, event)
        self._time_passes()
        return event

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        stream.tasks.append(event)
        self._time_passes()

    def query(self, event: FakeEvent) -> bool:
        self._time_passes()
        return event.passed

    def synchronize(self, event: FakeEvent) -> None:
        self.run_until(event)

    def allocate(self, nbytes: int, stream: FakeStream) -> FakeBlock:
        region = None
        for index in range(len(self._free) - 1, -1, -1):
            if len(self._free[index].data) >= nbytes:
                region = self._free.pop(index)
                break
        if region is None:
            region = Region(nbytes, stream)
        else:
            # The contract of free(): the next owner's stream is behind the old home stream and behind `after`.
            # The late poison is dropped, else it could come after the new owner's first write.
            self._graves.remove(region.grave)
            if region.home is not stream:
                stream.tasks.append(region.freed_at)
            stream.tasks.extend(region.after)
            region.home, region.after = stream, []
        self._poison(region, stream)
        self.live_regions += 1
        self._time_passes()
        return FakeBlock(self, region)

    def free(self, block: FakeBlock, after: Sequence[FakeEvent], home: FakeStream | None = None) -> None:
        assert home is None or home is block.region.home, "the caller is wrong about the block's home stream"
        block.region.after.extend(after)
        self._time_passes()

    def settle(self, stream: FakeStream) -> None:
        """Nothing: this allocator defers in stream order by itself."""

    def copy_async(
        self, dst: FakeBlock | HostRange, src: FakeBlock | HostRange, nbytes: int, stream: FakeStream
    ) -> None:
        if self.refuse_copies:
            self.refuse_copies -= 1
            raise CopyRefused("injected")
        to, to_start = self._place(dst, nbytes)
        source, source_start = self._place(src, nbytes)
        hosts = [place.memory for place in (dst, src) if isinstance(place, HostRange)]
        assert len(hosts) == 1, "exactly one side is host memory"

        def half(start: int, end: int) -> Callable[[], None]:
            def run() -> None:
                if hosts[0].freed:
                    raise HostUseAfterFree("a copy ran after host_free")
                to[to_start + start : to_start + end] = source[source_start + start : source_start + end]

            return run

        middle = nbytes // 2
        stream.tasks.extend([half(0, middle), half(middle, nbytes)])
        self._time_passes()

    def host_allocate(self, nbytes: int) -> FakeHost:
        return FakeHost(nbytes)

    def host_free(self, memory: FakeHost) -> None:
        assert not memory.freed
        memory.freed = True
        memory.data[:] = bytes([POISON]) * len(memory.data)

    def host_address(self, memory: FakeHost) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(memory.data))

    # ---- the program's side --------------------------------------------------------------------------------------

    def launch(self, stream: FakeStream, op: Callable[[], None]) -> None:
        """Queues an op. It must name memory by `region.data`, not by block: a kernel does not keep memory alive."""
        stream.tasks.append(op)
        self._time_passes()

    def run_until(self, event: FakeEvent) -> None:
        """Steps until `event` has passed."""
        while not event.passed:
            if not self._step():
                raise Deadlock("an event cannot pass")

    def drain(self) -> None:
        """Steps until nothing is queued."""
        while self._step():
            pass
        stuck = [s.name for s in [*self._streams, *self._graves] if s.tasks]
        if stuck:
            raise Deadlock(f"cannot run: {stuck}")

    # ---- inside --------------------------------------------------------------------------------------------------

    @staticmethod
    def _place(place: FakeBlock | HostRange, nbytes: int) -> tuple[bytearray, int]:
        data, start = (
            (place.memory.data, place.offset_bytes) if isinstance(place, HostRange) else (place.region.data, 0)
        )
        if start + nbytes > len(data):
            raise ValueError(f"{nbytes} bytes at {start} do not fit into {len(data)}")
        return data, start

    def _record(self, stream: FakeStream, event: FakeEvent) -> None:
        def run() -> None:
            event.passed = True

        stream.tasks.append(run)

    def _poison(self, region: Region, stream: FakeStream) -> None:
        def run() -> None:
            region.data[:] = bytes([POISON]) * len(region.data)

        stream.tasks.append(run)

    def _give_back(self, region: Region) -> None:
        region.freed_at = FakeEvent()
        self._record(region.home, region.freed_at)
        region.grave = FakeStream("grave")
        region.grave.tasks.extend([region.freed_at, *region.after])
        self._poison(region, region.grave)
        self._graves.append(region.grave)
        self._free.append(region)
        self.live_regions -= 1

    def _change_pace(self) -> None:
        for stream in self._streams:
            stream.weight = self._random.choice([0.01, 0.1, 1.0, 1.0, 10.0])
        self._pace = self._random.choice([0.0, 0.3, 1.0, 4.0])  # steps for each call, on average

    def _time_passes(self) -> None:
        """The device goes on while the CPU makes calls: between nothing at all and everything."""
        if self._prompt:
            while self._step():
                pass
            return
        if self._random.random() < 0.05:
            self._change_pace()
        for _ in range(int(self._random.random() * 2 * self._pace + 0.5)):
            self._step()

    def _step(self) -> bool:
        ready = [s for s in [*self._streams, *self._graves] if s.runnable()]
        if not ready:
            return False
        stream = self._random.choices(ready, weights=[s.weight for s in ready])[0]
        task = stream.tasks.popleft()
        assert not isinstance(task, FakeEvent)
        task()
        return True


if TYPE_CHECKING:
    _implements: type[StreamApi] = FakeStreams
