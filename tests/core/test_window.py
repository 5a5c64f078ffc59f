"""Victims for a request: the sliding window against all windows, the cheapest bytes, and the limit."""

import ctypes
import random
import threading
from dataclasses import dataclass

import core_abi
import pytest
from core_abi import KIB, LIVE, MIB, REMAP_FIRST, REMAP_LAST, REMAP_NEVER
from hypothesis import given, settings
from hypothesis import strategies as st
from threads import in_threads

UNIT = 512
LEAST_LARGE = 8704  # the smallest block of the large area


@dataclass
class Piece:
    """A block or a run, as the searches see it; price None: pinned, 0: free."""

    offset: int
    bytes: int
    price: float | None


def pieces_of(arena: core_abi.Arena, base: int, limit: int, prices: dict[int, float]) -> list[Piece]:
    """The large area below the limit, free pieces merged; `prices` by address, of blocks that may leave."""
    found: list[Piece] = []
    for offset, size, state in arena.walk():
        if state == LIVE:
            if offset < limit:
                found.append(Piece(offset, size, prices.get(base + offset)))
            continue
        size = min(size, max(0, limit - offset))
        if size and found and found[-1].price == 0 and found[-1].offset + found[-1].bytes == offset:
            found[-1].bytes += size
        elif size:
            found.append(Piece(offset, size, 0.0))
    return found


def brute_force(pieces: list[Piece], request: int) -> list[Piece] | None:
    """The cheapest of all windows; among equals the one that ends, then the one that begins, at the lowest address ...

    ... which for equal ends is the shortest: it has no more than it needs.
    """
    best, best_key = None, None
    for right in range(len(pieces)):
        total, cost = 0, 0.0
        for left in range(right, -1, -1):
            price = pieces[left].price
            if price is None:
                break
            total, cost = total + pieces[left].bytes, cost + price
            if total >= request:
                key = (cost, right, right - left)
                if best_key is None or key < best_key:
                    best, best_key = pieces[left : right + 1], key
    return best


def layout(core, seed: int, integer_prices: bool) -> tuple[core_abi.Arena, int, int, dict[int, float], list[int]]:
    """A random arena without remap: full of holes, some blocks pinned, some priced."""
    dice = random.Random(seed)
    budget = dice.randrange(20, 200) * LEAST_LARGE
    arena = core_abi.Arena(core, budget, reserve=dice.choice([0, budget, 4 * budget]))
    arena.set_layout(REMAP_NEVER)
    live: list[int] = []
    largest = dice.choice([2, 4, 16])
    for _ in range(dice.randrange(10, 80)):
        address = arena.alloc(int(LEAST_LARGE * dice.uniform(1, largest)))
        if address is not None:
            live.append(address)
    base = min(live) - min(offset for offset, _, state in arena.walk() if state == LIVE)
    for address in dice.sample(live, int(len(live) * dice.uniform(0, 0.7))):
        live.remove(address)
        arena.free(address)
    prices: dict[int, float] = {}
    share = dice.choice([0.3, 0.6, 0.95])
    for address in live:
        if dice.random() < share:
            prices[address] = float(dice.randrange(1, 9)) if integer_prices else 10 ** dice.uniform(-6, 3)
            arena.price(address, prices[address])
    return arena, base, budget // UNIT * UNIT, prices, live


def requests_for(pieces: list[Piece], limit: int, seed: int) -> list[int]:
    """Three of any size; five as long as a window with a victim, exactly or nearly. Requests that can be met come last."""
    dice = random.Random(seed)
    found = [dice.randrange(LEAST_LARGE // UNIT, limit // UNIT) * UNIT for _ in range(3)]
    longest = max((piece.bytes for piece in pieces if piece.price == 0), default=0)
    windows = []
    for left in range(len(pieces)):
        length = 0
        for piece in pieces[left:]:
            if piece.price is None:
                break
            length += piece.bytes
            windows.append(length)
    windows = [length for length in windows if length > longest + UNIT]
    for length in dice.sample(windows, min(5, len(windows))):
        found.append(max(LEAST_LARGE, length + dice.choice([-UNIT, 0, 0, UNIT])))
    return sorted(found, key=lambda request: brute_force(pieces, request) is not None)


@settings(max_examples=600, deadline=None)
@given(seed=st.integers(0, 2**48))
def test_the_window_is_the_cheapest_of_all_windows(core, seed):
    """Whole prices are added exactly, so run and ties are the same as with all windows tried: eight requests a layout,
    and the blocks chosen for the last of them are released."""
    arena, base, limit, prices, live = layout(core, seed, integer_prices=True)
    pieces = pieces_of(arena, base, limit, prices)
    resident = arena.stats.live_bytes
    for request in requests_for(pieces, limit, seed + 1):
        expected = brute_force(pieces, request)
        chosen = arena.choose(max(0, resident + request - limit), request)
        if expected is None:
            assert chosen is None
        else:
            assert chosen == [base + piece.offset for piece in expected if piece.price != 0]
    if expected is not None:
        for address in chosen:
            arena.free(address)
            live.remove(address)
        address = arena.alloc(request)  # no reclaim: it fits, and where it was meant to
        assert address is not None
        # The run may be longer than the window: free neighbours have joined.
        gone = [piece for piece in pieces if piece.price == 0 or piece in expected]
        start, end = expected[0].offset, expected[-1].offset + expected[-1].bytes
        for piece in gone:
            end = max(end, piece.offset + piece.bytes) if piece.offset <= end else end
        for piece in reversed(gone):
            start = min(start, piece.offset) if piece.offset + piece.bytes >= start else start
        if chosen:  # else some run was long enough already, and best fit took whichever
            assert start <= address - base <= end - request
        arena.free(address)
    for address in live:
        arena.free(address)
    assert arena.destroy() == 0


@settings(max_examples=500, deadline=None)
@given(seed=st.integers(0, 2**48))
def test_prices_over_nine_decades_are_added_without_loss(core, seed):
    arena, base, limit, prices, live = layout(core, seed, integer_prices=False)
    # The arena keeps a float.
    kept = {address: ctypes.c_float(price).value for address, price in prices.items()}
    pieces = pieces_of(arena, base, limit, kept)
    request = random.Random(seed + 1).randrange(LEAST_LARGE // UNIT, limit // UNIT) * UNIT
    expected = brute_force(pieces, request)
    chosen = arena.choose(0, request)
    assert (expected is None) == (chosen is None)
    if expected is not None:
        least = sum(piece.price for piece in expected)
        # 49 bits are kept of the dearest price, so 56 pieces lose less than this.
        assert sum(kept[address] for address in chosen) <= least + 2**-40 * max(kept.values(), default=0)
    for address in live:
        arena.free(address)
    assert arena.destroy() == 0


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**48))
def test_where_no_run_is_wanted_the_cheapest_bytes_are_evicted(core, seed):
    arena, base, limit, prices, live = layout(core, seed, integer_prices=True)
    arena.set_layout(REMAP_FIRST)
    need = random.Random(seed + 1).randrange(limit // UNIT) * UNIT
    order, freed = [], 0
    for piece in sorted(pieces_of(arena, base, limit, prices), key=lambda p: ((p.price or 0) / p.bytes, p.offset)):
        if piece.price and freed < need:
            order.append(base + piece.offset)
            freed += piece.bytes
    assert arena.choose(need, LEAST_LARGE) == (order if freed >= need else None)
    for address in live:
        arena.free(address)
    assert arena.destroy() == 0


def full(make_arena, blocks: int, size: int = 64 * KIB, **options) -> tuple[core_abi.Arena, list[int]]:
    arena = make_arena(budget=blocks * size, **options)
    arena.set_layout(REMAP_NEVER)
    return arena, [arena.alloc(size) for _ in range(blocks)]


def test_staleness_is_looked_at_when_somebody_asks(make_arena, core):
    arena, blocks = full(make_arena, 8)
    core.mm_arena_set_staleness_exponent(arena.handle, 1.0)
    arena.price(blocks[1], cost=8.0, last_access=0.0)
    arena.price(blocks[5], cost=1.0, last_access=9.0)
    assert arena.choose(0, 64 * KIB, now=9.5) == [blocks[1]]  # 8 / 9.5 against 1 / 0.5
    assert arena.choose(0, 64 * KIB, now=20.0) == [blocks[5]]  # 8 / 20 against 1 / 11
    for exponent, first in ((0.0, 5), (0.25, 5), (0.5, 5), (0.9, 5)):
        core.mm_arena_set_staleness_exponent(arena.handle, exponent)
        assert arena.choose(0, 64 * KIB, now=20.0) == [blocks[first]]


def test_pinned_blocks_break_the_window(make_arena):
    arena, blocks = full(make_arena, 8)
    for index in (0, 1, 2, 4, 5, 6, 7):
        arena.price(blocks[index], 1.0 if index < 3 else 10.0)
    assert arena.choose(0, 192 * KIB) == blocks[0:3]
    assert arena.choose(0, 256 * KIB) == blocks[4:8]
    assert arena.choose(0, 257 * KIB) is None
    arena.price(blocks[5], -1.0)
    assert arena.choose(0, 256 * KIB) is None
    arena.price(blocks[3], float("inf"))
    arena.price(blocks[5], float("nan"))
    assert arena.choose(0, 256 * KIB) is None


def test_what_costs_nothing_has_to_leave_all_the_same(make_arena):
    """A price of 0 is no free run: the block is named, and of two such windows the lower one is taken."""
    arena, blocks = full(make_arena, 8)
    for index, cost in enumerate((1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0)):
        arena.price(blocks[index], cost)
    assert arena.choose(128 * KIB, 128 * KIB) == blocks[1:3]
    assert arena.choose(192 * KIB, 192 * KIB) == blocks[4:7]
    for address in blocks[4:7]:
        arena.free(address)
    assert arena.alloc(192 * KIB) == blocks[4]


def test_what_is_freed_or_disowned_has_no_price(make_arena, core):
    arena, blocks = full(make_arena, 4)
    arena.price(blocks[0], 1.0, owner=77)
    assert core.mm_arena_disown(arena.handle, blocks[0], 78) == 0
    assert core.mm_arena_disown(arena.handle, blocks[0], 77) == 1
    arena.price(blocks[1], 1.0)
    arena.free(blocks[1])
    assert arena.alloc(64 * KIB) == blocks[1]
    assert arena.choose(0, 64 * KIB) is None
    arena.price(blocks[2] + 512, 1.0)  # not the start of a block
    arena.price(12345, 1.0)  # nowhere
    assert arena.choose(0, 64 * KIB) is None


def test_where_remap_comes_first_only_bytes_count(make_arena):
    arena, blocks = full(make_arena, 8)
    for index, address in enumerate(blocks):
        arena.price(address, 1.0 + index % 2)
    assert arena.choose(128 * KIB, 128 * KIB) == blocks[0:2]
    arena.set_layout(REMAP_FIRST)
    assert arena.choose(128 * KIB, 128 * KIB) == [blocks[0], blocks[2]]


def test_a_window_that_is_free_already_still_meets_the_bytes(make_arena):
    """Blocks beyond the limit: the run is there, the bytes are not."""
    arena = make_arena(budget=MIB)
    blocks = [arena.alloc(128 * KIB) for _ in range(8)]
    arena.set_layout(REMAP_NEVER)
    arena.free(blocks[0])
    arena.set_budget(512 * KIB)
    for address in blocks[1:]:
        arena.price(address, 1.0)
    need = 7 * 128 * KIB + 128 * KIB - 512 * KIB
    chosen = arena.choose(need, 128 * KIB)
    assert len(chosen) == 4
    for address in chosen:
        arena.free(address)
    assert arena.alloc(128 * KIB) is not None


def reclaiming(arena: core_abi.Arena) -> list[list[int]]:
    """Makes the arena evict by the search; returns where the victims of each call are noted."""
    calls: list[list[int]] = []

    def reclaim(need: int, request: int, attempt: int) -> int:
        victims = arena.choose(need, request)
        if victims is None:
            return 0
        calls.append(victims)
        released = sum(arena.block_bytes(address) for address in victims)
        for address in victims:
            arena.library.mm_arena_free(arena.handle, address)
        return released

    arena.on_reclaim(reclaim)
    return calls


def checkerboard(arena: core_abi.Arena, blocks: list[int]) -> None:
    """Every second block is free, the others may leave."""
    for address in blocks[::2]:
        arena.free(address)
    for address in blocks[1::2]:
        arena.price(address, 1.0)


def test_the_window_evicts_neighbours_at_once(make_arena):
    """Eight holes of 64 KiB, and a request of 320: two neighbours are enough, if one looks."""
    arena, blocks = full(make_arena, 16)
    checkerboard(arena, blocks)
    for index, address in enumerate(blocks[1::2]):
        arena.price(address, 1.0 + 0.01 * (index * 3 % 8))  # neighbours are not neighbours in price
    calls = reclaiming(arena)
    assert arena.alloc(320 * KIB) is not None
    assert [len(victims) for victims in calls] == [2]
    stats = arena.stats
    assert (stats.episodes, stats.episodes_contiguity, stats.reclaims) == (1, 1, 1)
    assert stats.evicted_bytes == stats.evicted_beyond_bytes == 2 * 64 * KIB
    assert stats.searches == 1 and stats.search_nanoseconds == stats.search_max_nanoseconds > 0
    assert stats.free_share_sum == stats.free_share_max == 0.5
    assert stats.fragmentation_max == pytest.approx(1 - 1 / 8)
    assert stats.evicted_excess_bytes == 0


def test_only_what_goes_beyond_the_shortage_is_counted_as_beyond(make_arena):
    arena, blocks = full(make_arena, 8)
    for address in blocks:
        arena.price(address, 1.0)
    arena.free(blocks[0])
    reclaiming(arena)
    assert arena.alloc(100 * KIB) is not None  # short of 36 KiB
    stats = arena.stats
    assert (stats.evicted_bytes, stats.evicted_beyond_bytes, stats.evicted_excess_bytes) == (64 * KIB, 28 * KIB, 0)
    assert (stats.episodes, stats.episodes_contiguity) == (1, 0)


def test_remap_last_takes_other_addresses_only_when_nothing_may_leave(make_arena):
    arena, blocks = full(make_arena, 16)
    for address in blocks[::2]:
        arena.free(address)
    reclaiming(arena)
    assert arena.alloc(128 * KIB) is None  # pinned blocks everywhere
    arena.set_layout(REMAP_LAST)
    for address in blocks[1::2]:
        ctypes.memset(address, 1, 64 * KIB)
    high = arena.alloc(128 * KIB)
    assert high is not None and high >= blocks[0] + 16 * 64 * KIB
    assert arena.stats.remapped_bytes > 0
    assert arena.stats.committed_bytes <= MIB


def test_the_limit_leaves_room_for_what_is_outside_and_small(make_arena):
    arena = make_arena(budget=MIB)
    arena.set_layout(REMAP_NEVER)
    arena.set_outside(256 * KIB)
    small = [arena.alloc(4096) for _ in range(16)]
    assert arena.stats.placeable_bytes == arena.stats.longest_run_bytes == MIB - 256 * KIB - 64 * KIB
    assert arena.alloc(MIB - 256 * KIB - 64 * KIB + 512) is None
    assert arena.alloc(MIB - 256 * KIB - 64 * KIB) is not None
    assert arena.stats.placeable_bytes == 0
    for address in small:
        arena.free(address)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**48))
def test_any_sequence_of_requests_is_met_while_everything_may_leave(core, seed):
    """With nothing pinned no request up to the limit fails, and no byte passes the budget."""
    dice = random.Random(seed)
    budget = dice.randrange(1, 4) * MIB
    arena = core_abi.Arena(core, budget)
    arena.set_layout(dice.choice([REMAP_NEVER, REMAP_LAST, REMAP_FIRST]))
    calls = reclaiming(arena)
    live: dict[int, int] = {}
    for number in range(60):
        size = int(2 ** dice.uniform(13.2, 19.5))
        address = arena.alloc(size)
        for victims in calls:
            for victim in victims:
                live.pop(victim)
        calls.clear()
        assert address is not None
        assert arena.stats.live_bytes <= budget
        live[address] = size
        arena.price(address, dice.random(), last_access=-float(dice.randrange(100)))
        if number % 5 == 0:
            gone = dice.choice(sorted(live))
            live.pop(gone)
            arena.free(gone)
    for address in live:
        arena.free(address)
    assert arena.destroy() == 0


def test_threads_choose_and_release_side_by_side(make_arena):
    """Several threads reclaim at once; a thread whose chosen block is gone chooses again."""
    budget = 4 * MIB
    arena = make_arena(budget=budget)
    arena.set_layout(REMAP_NEVER)
    library, guard, owned = arena.library, threading.Lock(), set()

    def reclaim(need: int, request: int, attempt: int) -> int:
        with guard:  # as the vault's lock: choosing and unlisting is one step
            victims = arena.choose(need, request)
            if victims is None:
                return 0
            owned.difference_update(victims)
            for address in victims:
                library.mm_arena_disown(arena.handle, address, address)
        released = sum(arena.block_bytes(address) for address in victims)
        for address in victims:
            library.mm_arena_free(arena.handle, address)
        return released

    arena.on_reclaim(reclaim)
    wrong: list[str] = []

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(300):
            address = library.mm_arena_alloc(arena.handle, int(2 ** dice.uniform(13.2, 18)))
            if library.mm_arena_resident(arena.handle) > budget:
                wrong.append("over the budget")
            if address is None:
                continue
            ctypes.memset(address, seed, 64)
            if ctypes.string_at(address, 64) != bytes([seed]) * 64:
                wrong.append("two owners")
            with guard:
                owned.add(address)
                entry = core_abi.Price(address, address, dice.random(), 0.0)
                library.mm_arena_price(arena.handle, ctypes.byref(entry), 1)

    in_threads(work, range(1, 5))
    assert not wrong
    assert arena.check() == ""
    assert arena.stats.live_blocks == len(owned)
    assert arena.stats.searches > 0
