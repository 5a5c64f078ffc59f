"""Several threads on one tier: the daemon prefetches and writes early while training threads reload and drop."""

from __future__ import annotations

import functools
import random
import sys
import threading
from typing import Any

import pytest

from memmgr.tiers.host import HostTier

from .double import FakeStreams


class LockedStreams(FakeStreams):
    """The double with a lock around each call, as a CUDA context has one; not around sequences of calls."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        lock = threading.RLock()
        for name in (
            "record", "wait", "query", "synchronize", "allocate", "free", "copy_async", "launch", "drain", "_give_back",
        ):  # fmt: skip
            setattr(self, name, self._locked(lock, getattr(self, name)))

    @staticmethod
    def _locked(lock: Any, method: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with lock:
                return method(*args, **kwargs)

        return call


@pytest.mark.parametrize("seed", range(4))
def test_threads(seed: int) -> None:
    device = LockedStreams(seed)
    tier = HostTier(device, 6144)
    wrong: list[str] = []
    errors: list[BaseException] = []

    def train(number: int) -> None:
        rng = random.Random(seed * 100 + number)
        try:
            for round_ in range(150):
                content = rng.randbytes(rng.choice([100, 600, 1500]))
                block = device.allocate(len(content), device.compute)
                data = block.region.data

                def fill(data: bytearray = data, content: bytes = content) -> None:
                    data[: len(content)] = content

                device.launch(device.compute, fill)
                slot = tier.write(block, len(content), device.record(device.compute), home=device.compute)
                tier.drop(block)
                del block
                if slot is None:
                    continue
                reload = tier.read(slot)
                tier.free(slot)
                tier.use(reload, device.compute)
                data = reload.block.region.data

                def check(data: bytearray = data, content: bytes = content, round_: int = round_) -> None:
                    if data[: len(content)] != content:
                        wrong.append(f"thread {number}, round {round_}")

                device.launch(device.compute, check)
                del reload
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads)
    assert not errors, errors[0]
    assert tier.stats().used_bytes == 0
    tier._slab.check_invariants()
    tier.close()
    device.drain()
    assert not wrong, wrong[:3]
    assert device.live_regions == 0
