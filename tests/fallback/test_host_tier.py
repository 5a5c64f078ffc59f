"""Where copies lie in the host tier of the accounting path (what it copies is tested on the test device)."""

from __future__ import annotations

import random

import pytest

from memmgr import _py_host


def test_room_is_first_fit_and_merges() -> None:
    room = _py_host.Room(100)
    a, b, c = (room.take(n) for n in (30, 30, 40))
    assert (a, b, c) == (0, 30, 60) and room.take(1) is None
    room.give_back(0, 30)
    room.give_back(60, 40)
    assert room.take(41) is None and room.take(40) == 60
    room.give_back(30, 30)
    assert room.take(60) == 0


@pytest.mark.parametrize("seed", range(5))
def test_nothing_overlaps(seed: int) -> None:
    pick = random.Random(seed)
    room, taken = _py_host.Room(1000), {}
    for _ in range(500):
        if taken and pick.random() < 0.5:
            offset = pick.choice(list(taken))
            room.give_back(offset, taken.pop(offset))
        else:
            size = pick.randint(1, 200)
            offset = room.take(size)
            if offset is not None:
                taken[offset] = size
        spans = sorted(taken.items())
        assert all(o + n <= following for (o, n), (following, _) in zip(spans, spans[1:], strict=False))
        assert all(o >= 0 and o + n <= 1000 for o, n in spans)
    for offset, size in taken.items():
        room.give_back(offset, size)
    assert room.take(1000) == 0


class _Streams:
    def new(self) -> None:
        return None


@pytest.mark.parametrize("capacity", [1, 512, 1000, 4096 + 512, 1 << 20, (1 << 20) + 700_000])
@pytest.mark.parametrize("size", [700, 300])
def test_never_more_than_the_capacity(capacity: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are powers of two, as torch rounds what is page-locked."""
    monkeypatch.setattr(_py_host, "CHUNK_BYTES", 1 << 16)
    tier = _py_host.HostTier(None, capacity, _Streams())  # type: ignore[arg-type]
    tier._locks_pages = False  # no GPU here
    got = 0
    while not isinstance(slot := tier._take(size), int):
        got += slot.room
        assert got == tier.stats()["used_bytes"] <= tier.stats()["file_bytes"] <= capacity
    assert got > capacity // 4 or capacity < 1024
    assert all(host.numel().bit_count() == 1 for host, _ in tier._chunks)
