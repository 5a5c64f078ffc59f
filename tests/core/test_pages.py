"""The arena's pages: remap, moves and the chunks they are made in, the parts of the range, trim."""

import ctypes
import mmap
import random
import resource
from pathlib import Path
from typing import Any

import core_abi
import pytest
from core_abi import KIB, MIB, PAGE, run_child
from hypothesis import given, settings
from hypothesis import strategies as st


def resident_bytes(start: int, length: int) -> int:
    """Bytes of [start, start + length) that are in memory, from /proc/self/pagemap."""
    pages = -(-length // PAGE)
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(start // PAGE * 8)
        entries = memoryview(file.read(pages * 8)).cast("Q")
    return sum(entry >> 63 for entry in entries) * PAGE


def touch(address: int, size: int) -> None:
    ctypes.memset(address, 0xA5, size)


def touch_pages(address: int, size: int) -> None:
    """Writes a byte of each page: the system counts pages, and writing all bytes of gigabytes takes seconds."""
    block = memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
    block[::PAGE] = bytes(-(-size // PAGE))
    block[-1] = 0  # a block may begin within a page


def fragment(arena: core_abi.Arena, budget: int, size: int = 64 * KIB) -> list[int]:
    """Fills the budget and frees every second block: half of it is free, in runs of `size`."""
    blocks = [arena.alloc(size) for _ in range(budget // size)]
    assert None not in blocks
    for address in blocks:
        touch(address, size)
    for address in blocks[::2]:
        arena.free(address)
    return blocks[1::2]


def test_fragmented_space_is_remapped_without_reclaim(make_arena):
    budget = 16 * MIB
    arena = make_arena(budget=budget)
    arena.on_reclaim(lambda *_: pytest.fail("the addresses do not end here"))
    live = fragment(arena, budget)
    start = live[0] - 64 * KIB
    large = arena.alloc(8 * MIB)
    assert large is not None and large >= start + budget
    touch(large, 8 * MIB)
    assert arena.stats.committed_bytes <= budget
    assert resident_bytes(start, 4 * budget) <= budget
    assert all(ctypes.string_at(address, 64 * KIB) == b"\xa5" * (64 * KIB) for address in live)
    # And back again: the low holes are used once the high block is free.
    arena.free(large)
    again = [arena.alloc(64 * KIB) for _ in range(8 * MIB // (64 * KIB))]
    for address in again:
        touch(address, 64 * KIB)
    assert arena.stats.committed_bytes <= budget
    assert resident_bytes(start, 4 * budget) <= budget


def can_move() -> bool:
    """Linux 5.7 and later, where nothing refuses the call."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mremap.restype = ctypes.c_void_p
    libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    memory = mmap.mmap(-1, 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    may_move, fixed, keep = 1, 2, 4
    return bool(libc.mremap(first, PAGE, PAGE, may_move | fixed | keep, first + PAGE) == first + PAGE)


@pytest.mark.skipif(not can_move(), reason="this kernel does not move pages")
def test_a_remap_moves_the_memory_instead_of_clearing_new(make_arena):
    """The new block has the contents of the freed ones: no memory was given to the system and taken from it again."""
    budget = 16 * MIB
    arena = make_arena(budget=budget)
    fragment(arena, budget)
    large = arena.alloc(8 * MIB)
    assert arena.stats.remapped_bytes >= 7 * MIB
    found = ctypes.string_at(large, 8 * MIB).count(0xA5)
    assert found >= 7 * MIB  # edges of the range were never used before


@pytest.mark.skipif(not can_move(), reason="this kernel does not move pages")
def test_what_the_system_refuses_in_part_leaves_nothing_in_memory(core):
    """Some pages had been moved there when the rest was refused: no counter has those, so they must be unmapped."""
    done = run_child("""
        import ctypes, resource
        from test_pages import KIB, MIB, fragment, resident_bytes
        budget = 16 * MIB
        arena = core_abi.Arena(core, budget)
        start = arena.alloc(64 * KIB)
        arena.free(start)
        live = fragment(arena, 12 * MIB)  # 6 of them free, in pieces
        data = 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (data + 5 * MIB, resource.RLIM_INFINITY))
        assert arena.alloc(8 * MIB) is None  # 4 are moved, 4 more would have to be had from the system
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(resident_bytes(start, 64 * MIB), arena.stats.committed_bytes, arena.stats.remapped_bytes)
    """)
    assert done.returncode == 0, done.stderr
    resident, committed, remapped = map(int, done.stdout.split())
    assert remapped >= 4 * MIB and resident <= committed


def mappings(start: int, end: int) -> int:
    """In how many parts the kernel keeps the range."""
    spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return sum(int(low, 16) < end and int(high, 16) > start for low, high in spans)


def test_many_moves_leave_every_block_alone_and_the_range_in_few_parts(core):
    """A process may have 65,530 mappings. A move makes two ends, and ends those that it covers."""
    budget = 64 * MIB
    arena = core_abi.Arena(core, budget, 1024 * MIB)
    dice = random.Random(0)
    live: dict[int, tuple[int, int]] = {}
    start = arena.alloc(64 * KIB)
    arena.free(start)

    held = most = 0

    def drop() -> None:
        nonlocal held
        address = dice.choice(list(live))
        size, value = live.pop(address)
        assert ctypes.string_at(address, size) == bytes([value]) * size
        arena.free(address)
        held -= size

    for i in range(12_000):
        size = dice.choice([40 * KIB, 64 * KIB, 200_000, 700_000, 1_500_000])
        while held + size > budget - 4 * MIB or (live and dice.random() < 0.3):
            drop()
        address = arena.alloc(size)
        assert address is not None
        live[address] = size, i % 251
        held += size
        ctypes.memset(address, i % 251, size)
        if i % 500 == 0:
            most = max(most, mappings(start, start + 1024 * MIB))
            assert resident_bytes(start, 1024 * MIB) <= budget
    assert arena.stats.remapped_bytes > 10 * budget
    assert most < 3000
    while live:
        drop()
    arena.destroy()


def churn(arena: core_abi.Arena, most: int, sizes: list[int], live: list[tuple[int, int]], dice: random.Random) -> None:
    """400 blocks of these lengths, each touched; others go by chance while they do not fit."""
    held = sum(size for _, size in live)
    for _ in range(400):
        size = dice.choice(sizes)
        while held + size > most:
            address, freed = live.pop(dice.randrange(len(live)))
            arena.free(address)
            held -= freed
        address = arena.alloc(size)
        assert address is not None
        touch_pages(address, size)
        live.append((address, size))
        held += size


def test_moves_do_not_cut_memory_ever_finer(core):
    """Blocks of uneven lengths, the same round over and over. Where their ends were cut from moved memory, a later move
    had to stop, and a round took ever more moves (the demo's GPT: 240 a step at first, 5,800 on average over 180)."""
    budget = 64 * MIB
    arena = core_abi.Arena(core, budget, 1024 * MIB)
    start = arena.alloc(64 * KIB)
    arena.free(start)

    def one_round() -> None:
        live: list[tuple[int, int]] = []
        churn(arena, budget - MIB, [600_000, 1_100_000, 2_359_296, 6_291_456, 18_874_368], live, random.Random(0))
        for address, _ in live:
            arena.free(address)

    parts = []
    for _ in range(24):
        one_round()
        parts.append(mappings(start, start + 1024 * MIB))
    assert arena.stats.remapped_bytes > 20 * budget
    assert parts[-1] <= 1.05 * parts[11]  # once every chunk has been moved
    arena.destroy()


def test_memory_that_is_moved_is_hardly_ever_fetched_again(core):
    """The ends of blocks that no whole chunk fills come fresh from the system, page by page. With long chunks that was
    most of the time of a step of the demo's GPT at 100 % of its need (4,811 faults, 19.7 MB; 13 since). Chunks that a
    third of the blocks are no multiples of pay if the others are moved in half the calls."""
    budget = 96 * MIB
    arena = core_abi.Arena(core, budget, 1024 * MIB)
    dice = random.Random(0)
    live: list[tuple[int, int]] = []
    sizes = [196_608, 294_912, 589_824, 786_432, 1_572_864]
    for _ in range(6):
        churn(arena, budget - MIB, sizes, live, dice)
    moved, faults = arena.stats.remapped_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(6):
        churn(arena, budget - MIB, sizes, live, dice)
    moved = arena.stats.remapped_bytes - moved
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    assert moved > budget
    assert faults * 4096 < 0.15 * moved, (faults, moved)
    for address, _ in live:
        arena.free(address)
    arena.destroy()


GPT_SIZES = [147_456] + 4 * [589_824] + [1_572_864, 2_359_296]  # nine tenths of its bytes are 3, 8 or 12 x 192 KiB
RESNET_SIZES = [524_288, 1_048_576, 2_097_152]


def test_chunks_are_as_long_as_the_blocks_have_it(core):
    """A move up to a MiB has a fixed cost. With chunks of 64 KiB a step of a BERT made 900, and makes 300 now."""
    budget = 64 * MIB
    arena = core_abi.Arena(core, budget, 1024 * MIB)
    start = arena.alloc(64 * KIB)
    arena.free(start)
    dice = random.Random(0)
    live: list[tuple[int, int]] = []
    for _ in range(30):
        churn(arena, budget - MIB, GPT_SIZES, live, dice)
    assert arena.stats.remapped_bytes > 20 * budget
    assert mappings(start, start + 1024 * MIB) < 600  # each chunk that was moved is one: a budget has 1,024 of 64 KiB
    arena.destroy()


def changing(core: Any, phases: list[tuple[list[int], int]]) -> tuple[int, int]:
    """Rounds of blocks of these lengths in a budget of 64 MiB, one phase after the other: bytes that the last one
    moved, and bytes that it fetched."""
    arena = core_abi.Arena(core, 64 * MIB, 1024 * MIB)
    dice = random.Random(0)
    live: list[tuple[int, int]] = []
    for sizes, rounds in phases:
        moved, faults = arena.stats.remapped_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(rounds):
            churn(arena, 63 * MIB, sizes, live, dice)
    moved = arena.stats.remapped_bytes - moved
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    arena.destroy()
    return moved, 4096 * faults


def test_chunks_change_with_the_blocks(core):
    """Pieces of another length are fetched anew once, and later moves are whole. With the old length a fifth of the
    moved bytes came from the system, time and again."""
    moved, fetched = changing(core, [(RESNET_SIZES, 30), (GPT_SIZES, 60), (GPT_SIZES, 10)])
    assert moved > 640 * MIB
    assert fetched < 0.05 * moved


def test_what_was_cut_for_short_chunks_is_moved_in_long_ones(core):
    """A move takes from one mapping only, and short chunks leave many: where blocks got longer afterwards, nothing was moved any
    more, and a step of a U-Net fetched 7,000 pages anew."""
    long = [2 * MIB, 3 * MIB]
    moved, fetched = changing(core, [([65_536, 131_072, 327_680], 30), (long, 20), (long, 5)])
    assert moved > 640 * MIB
    assert fetched < 0.05 * moved


def test_a_block_takes_the_place_of_one_of_its_length(core):
    """Aligned blocks leave runs with holes behind them. The shortest run may have no pages at all, and the next one may
    have all: 53 % of the allocated bytes had been moved to it here, and 38 % since."""
    arena = core_abi.Arena(core, 96 * MIB, 1024 * MIB)
    dice = random.Random(0)
    live: list[tuple[int, int]] = []
    sizes = [196_608, 294_912, 589_824, 786_432, 1_572_864]
    for _ in range(6):
        churn(arena, 95 * MIB, sizes, live, dice)
    moved = arena.stats.remapped_bytes
    for _ in range(6):
        churn(arena, 95 * MIB, sizes, live, dice)
    assert arena.stats.remapped_bytes - moved < 0.45 * 6 * 400 * sum(sizes) / len(sizes)
    for address, _ in live:
        arena.free(address)
    arena.destroy()


def test_alignment_does_not_split_the_range(core):
    """The gap between two aligned blocks belongs to the same mapping: a process may have 65,530."""
    arena = core_abi.Arena(core, 1 << 30)
    blocks = [arena.alloc(MIB + 512) for _ in range(300)]
    assert None not in blocks
    assert mappings(min(blocks), max(blocks) + MIB) <= 2
    for address in blocks:
        arena.free(address)
    arena.destroy()


@pytest.mark.parametrize("ranges", [1, 2, 4])
def test_alignment_takes_no_addresses_that_are_needed(make_arena, ranges):
    """All of the budget has a place, however short the range (`ulimit -v`)."""
    budget = 64 * MIB
    arena = make_arena(budget=budget, reserve=ranges * budget)
    blocks = []
    while (address := arena.alloc(256 * KIB + 512)) is not None:
        blocks.append(address)
    assert len(blocks) * (256 * KIB + 512) > 0.99 * budget
    for address in blocks:
        arena.free(address)


@pytest.mark.skipif(not can_move(), reason="this kernel does not move pages")
def test_a_refused_move_leaves_no_hole_in_the_range(core):
    """The kernel has unmapped the target by then: somebody else would get those addresses, and then our next move."""
    done = run_child("""
        import resource
        from pathlib import Path
        from test_pages import KIB, MIB, fragment
        arena = core_abi.Arena(core, 16 * MIB)
        start = fragment(arena, 12 * MIB)[0] - 64 * KIB
        data = 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (data, resource.RLIM_INFINITY))
        assert arena.alloc(8 * MIB) is None
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        at = start
        for low, high in sorted((int(low, 16), int(high, 16)) for low, high in spans):
            if low <= at < high:
                at = high
        assert at >= start + 64 * MIB, (hex(start), hex(at))
        assert arena.alloc(3 * MIB) is not None
    """)
    assert done.returncode == 0, done.stderr


def test_a_short_reserve_asks_reclaim_for_contiguity(make_arena):
    budget = 4 * MIB
    arena = make_arena(budget=budget, reserve=budget)
    live = fragment(arena, budget)
    calls = []

    def reclaim(need, request, attempt):
        calls.append((need, request))
        arena.free(live.pop(0))
        return 64 * KIB

    arena.on_reclaim(reclaim)
    assert arena.alloc(192 * KIB) is not None
    assert calls == [(0, 192 * KIB)]
    assert arena.stats.reclaims_contiguity == 1


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), budget_pages=st.integers(64, 1024))
def test_memory_in_use_obeys_the_budget(core, seed, budget_pages):
    """Random blocks, all touched: the kernel's count stays within the budget and the fragments' edges."""
    budget = budget_pages * PAGE
    arena = core_abi.Arena(core, budget, 256 * MIB)
    dice = random.Random(seed)
    live: dict[int, int] = {}
    base = None
    for _ in range(300):
        if live and dice.random() < 0.48:
            address = dice.choice(sorted(live))
            del live[address]
            arena.free(address)
        size = int(2 ** dice.uniform(13.1, 18))
        address = arena.alloc(size)
        if address is not None:
            base = address if base is None else min(base, address)
            touch(address, size)
            live[address] = size
        slack = 2 * PAGE * len(live)
        assert arena.stats.committed_bytes <= budget + slack
    assert base is None or resident_bytes(base, 64 * MIB) <= budget + 2 * PAGE * len(live)
    for address in live:
        arena.free(address)
    assert arena.destroy() == 0


def test_trim_gives_pages_back(make_arena):
    arena = make_arena()
    blocks = [arena.alloc(4 * MIB) for _ in range(8)]
    for address in blocks:
        touch(address, 4 * MIB)
    start = min(blocks)
    for address in blocks[1:]:
        arena.free(address)
    assert resident_bytes(start, 32 * MIB) == 32 * MIB  # kept for reuse
    assert arena.trim(12 * MIB) == 16 * MIB
    assert resident_bytes(start, 32 * MIB) == 16 * MIB
    assert arena.trim() == 12 * MIB
    assert resident_bytes(start, 32 * MIB) == 4 * MIB
    assert arena.trim() == 0
    again = arena.alloc(4 * MIB)
    assert ctypes.string_at(again, 4 * MIB) == bytes(4 * MIB)
