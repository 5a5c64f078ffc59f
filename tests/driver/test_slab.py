"""Room in the host tier's slab: nothing overlaps, nothing is lost, best fit by address; seen through the C ABI."""

import errno

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .fake import PROMPT, FakeDriver
from .test_host_tier import Bench

UNIT = 512


def units(size: int) -> int:
    return -(-size // UNIT)


class Slab(Bench):
    """A tier whose slots are known by their offset in the slab."""

    def __init__(self, library, driver: FakeDriver, capacity: int):
        super().__init__(library, driver, PROMPT, capacity)
        self.block = self.device.alloc(1 << 16, None)
        first = self.tier.write(self.block, 1)
        self.start = self.tier.bytes(first)
        self.tier.free(first)

    def take(self, size: int) -> tuple[int, int] | None:
        """(offset, slot), or None."""
        slot = self.tier.write(self.block, size)
        if slot < 0:
            assert slot == -errno.ENOSPC
            return None
        return self.tier.bytes(slot) - self.start, slot


@pytest.mark.parametrize("capacity", [512, 5000, 1 << 15])
@settings(max_examples=50, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(st.tuples(st.booleans(), st.integers(1, 6000)), max_size=80))
def test_random_events(core, loaded_driver: FakeDriver, capacity: int, events: list[tuple[bool, int]]) -> None:
    slab = Slab(core, loaded_driver, capacity)
    room = bytearray(capacity // UNIT)  # 1: taken
    live: dict[int, tuple[int, int]] = {}
    for take, number in events:
        if take:
            holes = [len(hole) for hole in bytes(room).split(b"\1")]
            found = slab.take(number)
            assert (found is None) == (units(number) > max(holes))
            if found is not None:
                offset, slot = found
                place = slice(offset // UNIT, offset // UNIT + units(number))
                assert offset % UNIT == 0 and offset + number <= capacity and not any(room[place])
                room[place] = b"\1" * units(number)
                live[offset] = (number, slot)
        elif live:
            offset = sorted(live)[number % len(live)]
            size, slot = live.pop(offset)
            slab.tier.free(slot)
            room[offset // UNIT : offset // UNIT + units(size)] = bytes(units(size))
        assert slab.tier.stats.used_bytes == sum(room) * UNIT
    for _, slot in live.values():
        slab.tier.free(slot)
    assert slab.take(capacity // UNIT * UNIT) is not None
    slab.close()


def test_best_fit_then_lowest_address(core, driver: FakeDriver) -> None:
    slab = Slab(core, driver, UNIT * 16)
    slots = dict(slab.take(count * UNIT) for count in (3, 1, 2, 1, 2, 1, 4, 1))
    assert list(slots) == [0, 1536, 2048, 3072, 3584, 4608, 5120, 7168]
    for offset in (0, 3584, 2048, 5120):
        slab.tier.free(slots[offset])
    # the lower one of the two holes of 2 units, not the 3 units at 0; then the 4 units shared with the next object
    assert [slab.take(600)[0] for _ in range(3)] == [2048, 3584, 0]
    slab.close()
