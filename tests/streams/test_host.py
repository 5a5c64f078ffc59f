"""The host tier's interface: stats, errors, close, threads; and the double's own promises."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

from memmgr.tiers.host import HostTier

from .double import POISON, CopyRefused, Deadlock, FakeBlock, FakeEvent, FakeStreams


@pytest.fixture
def device() -> FakeStreams:
    return FakeStreams(seed=11)


@pytest.fixture
def tier(device: FakeStreams) -> Iterator[HostTier]:
    tier = HostTier(device, 4096)
    yield tier
    tier.close()


def filled(device: FakeStreams, content: bytes) -> tuple[FakeBlock, FakeEvent]:
    """A block on the compute stream with this content, and the event of its write."""
    block = device.allocate(len(content), device.compute)
    data = block.region.data

    def op() -> None:
        data[: len(content)] = content

    device.launch(device.compute, op)
    return block, device.record(device.compute)


def content_of(device: FakeStreams, block: FakeBlock, nbytes: int) -> bytes:
    device.drain()
    return bytes(block.region.data[:nbytes])


def test_there_and_back(device: FakeStreams, tier: HostTier) -> None:
    content = random.Random(0).randbytes(700)
    block, written = filled(device, content)
    slot = tier.write(block, 700, written)
    assert slot is not None
    tier.drop(block)
    del block
    reload = tier.read(slot)
    tier.use(reload, device.compute)
    again, ready = reload
    assert content_of(device, again, 700) == content
    assert device.query(ready) and tier.poll(slot)


def test_stats(device: FakeStreams, tier: HostTier) -> None:
    block, written = filled(device, b"x" * 700)
    slot = tier.write(block, 700, written)
    assert slot is not None
    tier.read(slot)
    tier.read(slot)
    device.drain()
    stats = tier.stats()
    assert (stats.capacity_bytes, stats.used_bytes, stats.used_peak_bytes) == (4096, 1024, 1024)
    assert (stats.written_bytes, stats.writes, stats.read_bytes, stats.reads) == (700, 1, 1400, 2)
    assert stats.queued_write_bytes == stats.queued_read_bytes == 0
    tier.free(slot)
    assert tier.stats().used_bytes == 0 and tier.stats().used_peak_bytes == 1024


def test_the_queue_on_the_link_is_counted(device: FakeStreams, tier: HostTier) -> None:
    block, written = filled(device, b"x" * 700)
    never = FakeEvent()
    slot = tier.write(block, 700, written, touched=[never])
    assert slot is not None and not tier.poll(slot)
    assert tier.stats().queued_write_bytes == 700
    never.passed = True
    device.drain()
    assert tier.poll(slot) and tier.stats().queued_write_bytes == 0


def test_no_room_takes_nothing(device: FakeStreams, tier: HostTier) -> None:
    block, written = filled(device, b"x" * 4097)
    assert tier.write(block, 4097, written) is None
    assert tier.stats().used_bytes == 0 and tier.stats().writes == 0
    slot = tier.write(block, 4096, written)
    assert slot is not None and tier.write(block, 1, written) is None


def test_a_refused_copy_loses_nothing(device: FakeStreams, tier: HostTier) -> None:
    content = random.Random(1).randbytes(900)
    block, written = filled(device, content)
    device.refuse_copies = 1
    with pytest.raises(CopyRefused):
        tier.write(block, 900, written)
    assert tier.stats().used_bytes == 0 and tier.stats().writes == 0
    slot = tier.write(block, 900, written)
    assert slot is not None
    device.refuse_copies = 1
    with pytest.raises(CopyRefused):
        tier.read(slot)
    assert content_of(device, tier.read(slot).block, 900) == content_of(device, block, 900) == content


def test_a_freed_slot_is_refused(device: FakeStreams, tier: HostTier) -> None:
    block, written = filled(device, b"x" * 10)
    slot = tier.write(block, 10, written)
    assert slot is not None
    tier.free(slot)
    for use in (tier.free, tier.read, tier.host_address):
        with pytest.raises(ValueError, match="freed"):
            use(slot)


def test_closed(device: FakeStreams) -> None:
    tier = HostTier(device, 4096)
    block, written = filled(device, b"x" * 10)
    slot = tier.write(block, 10, written)
    assert slot is not None
    tier.close()
    tier.close()
    for use in (lambda: tier.write(block, 10, written), lambda: tier.read(slot)):
        with pytest.raises(ValueError, match="closed"):
            use()
    tier.free(slot)  # finalizers may come late
    device.drain()


def test_free_inside_a_locked_call(device: FakeStreams, tier: HostTier) -> None:
    """The garbage collector may run a finalizer that frees a slot while this tier is in the middle of a call."""
    block, written = filled(device, b"x" * 10)
    slot = tier.write(block, 10, written)
    assert slot is not None
    with tier._lock:
        tier.free(slot)
        assert tier._slab.used_bytes == 512
    assert tier.stats().used_bytes == 0


def test_allocating_holds_no_lock(device: FakeStreams, tier: HostTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reload's allocation may reclaim, and reclaim may offload through this very tier."""
    first, written = filled(device, b"x" * 600)
    slot = tier.write(first, 600, written)
    assert slot is not None
    plain, inner = device.allocate, []

    def reclaiming(nbytes: int, stream: object) -> FakeBlock:
        thread = threading.Thread(target=lambda: inner.append(tier.write(first, 600, written)))
        thread.start()
        thread.join(5)
        assert not thread.is_alive(), "the tier is locked while it allocates"
        return plain(nbytes, device.compute)

    monkeypatch.setattr(device, "allocate", reclaiming)
    reload = tier.read(slot)
    assert inner[0] is not None
    assert content_of(device, reload.block, 600) == b"x" * 600


def test_what_is_under_way_does_not_grow(device: FakeStreams, tier: HostTier) -> None:
    """A thousand rounds: the tier keeps no event or fence of what is done, and no block."""
    for _ in range(1000):
        block, written = filled(device, b"x" * 600)
        slot = tier.write(block, 600, written)
        assert slot is not None
        tier.drop(block)
        del block
        reload = tier.read(slot)
        tier.use(reload, device.compute)
        tier.free(slot)
        del reload
        device.drain()
    tier.stats()
    assert not tier._writes._queue and not tier._reads._queue and not tier._graves
    assert len(tier._fences) <= 1
    assert device.live_regions == 0


def test_double_reuses_eagerly_and_poisons(device: FakeStreams) -> None:
    block, _ = filled(device, b"x" * 64)
    data = block.region.data
    del block
    device.drain()
    assert set(data) == {POISON}
    again = device.allocate(64, device.compute)
    assert again.region.data is data


def test_double_keeps_order_only_by_waits() -> None:
    """Two copies' worth of work on two streams comes out in both orders over the seeds; with a wait only in one."""
    for ordered in (False, True):
        outcomes = set()
        for seed in range(50):
            device = FakeStreams(seed, extra_streams=["second"])
            log: list[str] = []
            device.launch(device.compute, lambda log=log: log.append("a"))  # type: ignore[misc]
            if ordered:
                device.wait(device.extra[0], device.record(device.compute))
            device.launch(device.extra[0], lambda log=log: log.append("b"))  # type: ignore[misc]
            device.drain()
            outcomes.add("".join(log))
        assert outcomes == ({"ab"} if ordered else {"ab", "ba"})


def test_double_reports_a_deadlock(device: FakeStreams) -> None:
    device.wait(device.compute, FakeEvent())
    with pytest.raises(Deadlock):
        device.drain()
