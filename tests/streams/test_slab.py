"""The sub-allocator: invariants after every event, best fit by address, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memmgr.tiers.slab import Slab


@settings(max_examples=200, deadline=None, database=None)
@given(
    capacity=st.integers(512, 1 << 16),
    events=st.lists(st.tuples(st.booleans(), st.integers(1, 6000)), max_size=80),
)
def test_random_events(capacity: int, events: list[tuple[bool, int]]) -> None:
    slab = Slab(capacity)
    live: dict[int, int] = {}
    for allocate, number in events:
        if allocate:
            room = slab.largest_free_bytes
            offset = slab.allocate(number)
            assert (offset is None) == (-(-number // 512) * 512 > room)
            if offset is not None:
                assert all(offset + number <= o or o + size <= offset for o, size in live.items())
                live[offset] = number
        elif live:
            offset = sorted(live)[number % len(live)]
            del live[offset]
            slab.free(offset)
        slab.check_invariants()
        assert slab.used_bytes == sum(-(-size // 512) * 512 for size in live.values())
    for offset in live:
        slab.free(offset)
    slab.check_invariants()
    assert slab.largest_free_bytes == slab.free_bytes == slab.capacity_bytes


def test_best_fit_then_lowest_address() -> None:
    slab = Slab(512 * 16)
    offsets = [slab.allocate(units * 512) for units in (3, 1, 2, 1, 2, 1, 4, 1)]
    assert offsets == [0, 1536, 2048, 3072, 3584, 4608, 5120, 7168]
    for offset in (0, 3584, 2048, 5120):
        slab.free(offset)
    assert slab.allocate(600) == 2048  # of the two holes of 2 units the lower one, not the 3 units at 0
    assert slab.allocate(600) == 3584
    assert slab.allocate(600) == 0


def test_coalescing_on_both_sides() -> None:
    slab = Slab(2048)
    a, b, c = slab.allocate(512), slab.allocate(512), slab.allocate(1024)
    assert (a, b, c) == (0, 512, 1024) and slab.allocate(1) is None
    slab.free(0)
    slab.free(1024)
    assert slab.largest_free_bytes == 1024
    slab.free(512)
    assert slab.largest_free_bytes == 2048
    assert slab.used_peak_bytes == 2048


def test_errors() -> None:
    with pytest.raises(ValueError, match="power of two"):
        Slab(4096, 500)
    with pytest.raises(ValueError, match="cannot hold"):
        Slab(100)
    slab = Slab(5000)
    assert slab.capacity_bytes == 4608
    with pytest.raises(ValueError, match="cannot allocate 0"):
        slab.allocate(0)
    offset = slab.allocate(1)
    assert offset is not None and slab.size_of(offset) == 512
    slab.free(offset)
    with pytest.raises(ValueError, match="no live piece"):
        slab.free(offset)
