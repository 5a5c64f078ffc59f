"""The file tier: round trips, queues, errors that lose nothing, and nothing left behind."""

import ctypes
import errno
import os
import random
import stat
import textwrap
import threading
import time

import core_abi
import pytest
from core_abi import KIB, MIB, run_child


class Bytes:
    """Memory with a chosen alignment, filled from a seed."""

    def __init__(self, size: int, seed: int | None = None, shift: int = 0):
        self.size = size
        self._memory = ctypes.create_string_buffer(size + 8192)
        self.address = -(-ctypes.addressof(self._memory) // 4096) * 4096 + shift
        if seed is not None:
            ctypes.memmove(self.address, random.Random(seed).randbytes(size), size)

    def __bytes__(self) -> bytes:
        return ctypes.string_at(self.address, self.size)


def scratch_files() -> list[str]:
    """Open files of this process that have no name any more."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if target.endswith("(deleted)"):
            found.append(name)
    return found


@pytest.fixture(params=["direct", "buffered", "in part"])
def any_tier(request, make_tier, monkeypatch):
    monkeypatch.setenv("MEMMGR_TIER_DIRECT", "0" if request.param == "buffered" else "1")
    tier = make_tier(cached=5 * MIB + 4096 if request.param == "in part" else 0)
    if request.param == "buffered":
        assert tier.stats.direct == 0
    elif tier.stats.direct == 0:
        pytest.skip("this file system does not take O_DIRECT")
    return tier


SIZES = [1, 63, 64, 4095, 4096, 4097, 100_000, MIB, 4 * MIB, 4 * MIB + 1, 13 * MIB + 777]


@pytest.mark.parametrize("shift", [0, 512, 64, 3])
def test_round_trips(any_tier, shift):
    tier = any_tier
    sources = [Bytes(size, seed, shift) for seed, size in enumerate(SIZES)]
    slots = [tier.write(source.address, source.size) for source in sources]
    assert min(slots) >= 0 and len(set(slots)) == len(slots)
    assert [tier.wait(slot) for slot in slots] == [0] * len(slots)
    targets = [Bytes(source.size, shift=shift) for source in sources]
    for target in targets:
        ctypes.memset(target.address + target.size, 0x77, 16)
    half = len(slots) // 2
    for slot, target in zip(slots[:half], targets[:half], strict=True):
        assert tier.read(slot, target.address) == 0
    for slot, target in zip(slots[half:], targets[half:], strict=True):
        assert tier.read_now(slot, target.address) == 0
    assert [tier.wait(slot) for slot in slots] == [0] * len(slots)
    for source, target in zip(sources, targets, strict=True):
        assert bytes(source) == bytes(target)
        assert ctypes.string_at(target.address + target.size, 16) == b"\x77" * 16  # not a byte too many
    stats = tier.stats
    assert stats.written_bytes == stats.read_bytes == sum(SIZES)
    assert (stats.writes, stats.reads, stats.errors) == (len(SIZES), len(SIZES), 0)
    assert (stats.queued_write_bytes, stats.queued_read_bytes) == (0, 0)
    for slot in slots:
        tier.free(slot)
    assert tier.stats.used_bytes == 0


def pages_in_memory(fd: str, size: int) -> list[bool]:
    """For each page of an open file, whether the page cache has it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    file = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    address = libc.mmap(None, size, 1, 1, file, 0)
    found = (ctypes.c_ubyte * (size // 4096))()
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found) == 0
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    os.close(file)
    return [bool(page & 1) for page in found]


def test_the_page_cache_has_what_it_may_have(make_tier):
    before = set(scratch_files())
    tier = make_tier(cached=8 * MIB)
    if tier.stats.direct == 0:
        pytest.skip("this file system does not take O_DIRECT")
    source = Bytes(MIB, 1)
    slots = [tier.write_now(source.address, source.size) for _ in range(32)]
    target = Bytes(MIB)
    for slot in slots:
        assert tier.read_now(slot, target.address) == 0 and bytes(source) == bytes(target)
    cached = pages_in_memory((set(scratch_files()) - before).pop(), 32 * MIB)
    assert all(cached[: 8 * MIB // 4096]), "the machine has so much to spare"
    assert not any(cached[8 * MIB // 4096 :]), "past what it was given"


def test_a_read_behind_its_own_write_gets_what_was_written(make_tier):
    tier = make_tier(bytes_per_second=200 * MIB, workers=1)
    source, target = Bytes(8 * MIB, 1), Bytes(8 * MIB)
    slot = tier.write(source.address, source.size)
    assert tier.poll(slot) == 0
    assert tier.read(slot, target.address) == 0
    assert tier.read(slot, target.address) == -errno.EBUSY
    assert tier.wait(slot) == 0
    assert tier.poll(slot) == 1
    assert bytes(source) == bytes(target)


def test_slots_are_reused(make_tier):
    tier = make_tier()
    source = Bytes(MIB, 1)
    for _ in range(600):
        slot = tier.write_now(source.address, source.size)
        assert slot >= 0
        tier.free(slot)
    stats = tier.stats
    assert stats.file_bytes < 600 * MIB and stats.used_peak_bytes == MIB


def test_random_slots_keep_their_contents(make_tier):
    tier = make_tier(capacity=24 * MIB)
    dice = random.Random(5)
    held: dict[int, Bytes] = {}
    refused = 0
    for number in range(400):
        if held and dice.random() < 0.5:
            slot, source = held.popitem() if dice.random() < 0.5 else (next(iter(held)), None)
            source = source or held.pop(slot)
            target = Bytes(source.size)
            assert tier.read_now(slot, target.address) == 0
            assert bytes(target) == bytes(source)
            tier.free(slot)
        source = Bytes(dice.randrange(1, 3 * MIB), number)
        slot = tier.write(source.address, source.size)
        if slot == -errno.ENOSPC:
            refused += 1
        else:
            assert slot not in held
            held[slot] = source
        used = sum(-(-source.size // 4096) * 4096 for source in held.values())
        assert tier.stats.used_bytes == used <= tier.stats.file_bytes <= 24 * MIB
    assert refused > 0


def test_reads_go_before_writes(make_tier):
    tier = make_tier(bytes_per_second=64 * MIB, workers=1)
    small = Bytes(64 * KIB, 1)
    ready = tier.write_now(small.address, small.size)
    source = Bytes(32 * MIB, 2)
    backlog = [tier.write(source.address, source.size) for _ in range(2)]  # a second of work
    target = Bytes(64 * KIB)
    assert tier.read(ready, target.address) == 0
    while tier.poll(ready) == 0:
        time.sleep(0.002)
    assert bytes(target) == bytes(small)
    assert tier.poll(backlog[1]) == 0 and tier.stats.queued_write_bytes > 32 * MIB


def test_what_is_waited_for_goes_first(make_tier):
    tier = make_tier(bytes_per_second=64 * MIB, workers=1)
    source = Bytes(16 * MIB, 2)
    slots = [tier.write(source.address, source.size) for _ in range(4)]
    assert tier.wait(slots[3]) == 0
    assert tier.poll(slots[3]) == 1 and tier.poll(slots[1]) == 0 and tier.poll(slots[2]) == 0
    last = tier.write_now(source.address, 64 * KIB)
    assert last >= 0 and tier.poll(slots[2]) == 0


def test_a_queued_write_is_cancelled_by_free(make_tier):
    tier = make_tier(bytes_per_second=8 * MIB, workers=1)
    source = Bytes(4 * MIB, 1)
    slots = [tier.write(source.address, source.size) for _ in range(6)]  # three seconds of work
    start = time.monotonic()
    for slot in reversed(slots):
        tier.free(slot)
    assert time.monotonic() - start < 1.5
    stats = tier.stats
    assert stats.used_bytes == 0 and stats.queued_write_bytes == 0 and stats.written_bytes < 12 * MIB
    assert tier.poll(slots[0]) == tier.wait(slots[0]) == tier.read_now(slots[0], source.address) == -errno.EBADF


def test_a_stale_id_does_not_reach_the_next_holder(make_tier):
    tier = make_tier()
    source = Bytes(KIB, 1)
    old = tier.write_now(source.address, source.size)
    tier.free(old)
    new = tier.write_now(source.address, source.size)
    assert new != old and tier.poll(old) == -errno.EBADF
    tier.free(old)
    assert tier.poll(new) == 1


def test_free_wakes_a_waiter(make_tier):
    tier = make_tier(bytes_per_second=4 * MIB, workers=1)
    source = Bytes(8 * MIB, 1)
    slot = tier.write(source.address, source.size)
    results = []
    waiter = threading.Thread(target=lambda: results.append(tier.wait(slot)))
    waiter.start()
    time.sleep(0.1)
    tier.free(slot)
    waiter.join(timeout=10)
    assert results == [-errno.ECANCELED]


def test_many_threads_at_once(make_tier):
    tier = make_tier(workers=3)
    wrong = []

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for number in range(25):
            source = Bytes(dice.randrange(1, 6 * MIB), 1000 * seed + number, dice.choice([0, 512, 8]))
            write = dice.choice([tier.write, tier.write_now])
            slot = write(source.address, source.size)
            target = Bytes(source.size)
            if tier.read(slot, target.address) != 0 or tier.wait(slot) != 0 or bytes(target) != bytes(source):
                wrong.append((seed, number))
            tier.free(slot)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and tier.stats.used_bytes == 0


def test_the_throttle_paces_each_direction(make_tier):
    rate = 40 * MIB
    tier = make_tier(bytes_per_second=rate)
    source, target = Bytes(20 * MIB, 1), Bytes(20 * MIB)
    start = time.monotonic()
    slot = tier.write_now(source.address, source.size)
    written = time.monotonic()
    assert tier.read_now(slot, target.address) == 0
    read = time.monotonic()
    assert 0.4 < written - start < 5
    assert 0.4 < read - written < 5


def test_the_time_of_copies_is_counted_once(make_tier):
    """Pieces that run at once, and both directions, share it: bytes by time is the speed of the disk."""
    tier = make_tier(bytes_per_second=40 * MIB, workers=4)
    source, target = Bytes(4 * MIB, 1), Bytes(4 * MIB)
    start = time.monotonic()
    slot = tier.write_now(source.address, source.size)
    for _ in range(2):
        other = tier.write(source.address, source.size)
        assert tier.read_now(slot, target.address) == 0
        tier.wait(other)
    passed = time.monotonic() - start
    counted = (tier.stats.write_nanoseconds + tier.stats.read_nanoseconds) * 1e-9
    assert 0.2 < counted <= passed  # 12 MB at 40 MB/s one after the other; 5 x 4 MB in workers' time


def test_what_copies_take_of_a_cpu_is_counted(make_tier):
    """Processor time of the threads that copy counts, the caller's included; sleeping for the throttle does not."""
    tier = make_tier(bytes_per_second=40 * MIB, workers=2)
    source, target = Bytes(4 * MIB, 1), Bytes(4 * MIB)
    slot = tier.write(source.address, source.size)
    tier.wait(slot)
    written = tier.stats.cpu_nanoseconds
    assert tier.read_now(slot, target.address) == 0
    read = tier.stats.cpu_nanoseconds - written
    assert 0 < written < 0.5 * tier.stats.write_nanoseconds and 0 < read < 0.5 * tier.stats.read_nanoseconds


def test_a_full_tier_takes_nothing(make_tier):
    tier = make_tier(capacity=MIB)
    source = Bytes(2 * MIB, 1)
    assert tier.write(source.address, 2 * MIB) == -errno.ENOSPC
    slot = tier.write(source.address, MIB - 4096)
    assert slot >= 0
    before = tier.stats
    assert tier.write(source.address, 4097) == -errno.ENOSPC
    assert tier.write_now(source.address, 4097) == -errno.ENOSPC
    assert tier.stats.used_bytes == before.used_bytes == MIB - 4096
    assert tier.write_now(source.address, 4096) >= 0
    tier.free(slot)
    assert tier.write_now(source.address, MIB - 4096) >= 0


def test_a_full_disk_is_reported_before_anything_is_taken(make_tier):
    tier = make_tier()
    source = Bytes(KIB, 1)
    enormous = 1 << 52  # no disk has that; src is never read
    result = tier.write(source.address, enormous)
    assert result in (-errno.ENOSPC, -errno.EFBIG)
    assert (tier.stats.used_bytes, tier.stats.file_bytes) == (0, 0)
    assert tier.write_now(source.address, source.size) >= 0


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_failed_write_is_reported_and_loses_nothing(make_tier, error):
    tier = make_tier()
    source, target = Bytes(9 * MIB, 1), Bytes(9 * MIB)
    tier.inject(error, 2, 0, 0)
    good = tier.write(source.address, source.size)
    assert tier.wait(good) == 0
    bad = tier.write(source.address, source.size)
    assert tier.wait(bad) == tier.poll(bad) == -error
    assert tier.stats.used_bytes == 2 * 9 * MIB  # held until freed
    assert tier.read_now(bad, target.address) == -error  # never stale bytes from the disk
    assert tier.stats.errors == 1 and tier.stats.queued_write_bytes == 0
    assert tier.read_now(good, target.address) == 0 and bytes(target) == bytes(source)
    tier.free(bad)
    again = tier.write_now(source.address, source.size)
    assert again >= 0


def test_a_failed_write_now_gives_its_room_back(make_tier):
    tier = make_tier()
    source = Bytes(MIB, 1)
    tier.inject(errno.EIO, 1, 0, 0)
    assert tier.write_now(source.address, source.size) == -errno.EIO
    assert tier.stats.used_bytes == 0


def test_a_failed_write_ends_the_read_behind_it(make_tier):
    tier = make_tier(bytes_per_second=80 * MIB, workers=1)
    source, target, long = Bytes(4 * MIB, 1), Bytes(4 * MIB), Bytes(32 * MIB, 2)
    tier.write(long.address, long.size)  # keeps the worker busy
    while tier.stats.written_bytes == 0:  # a piece of it is done: a write that has begun cannot be the one that fails
        time.sleep(0.001)
    tier.inject(errno.EIO, 1, 0, 0)
    bad = tier.write(source.address, source.size)
    if tier.read(bad, target.address) == 0:
        assert tier.wait(bad) == -errno.EIO
    assert bytes(target) == bytes(4 * MIB)


def test_a_failed_read_can_be_repeated(make_tier):
    tier = make_tier()
    source, target = Bytes(MIB, 1), Bytes(MIB)
    slot = tier.write_now(source.address, source.size)
    tier.inject(0, 0, errno.EIO, 1)
    assert tier.read(slot, target.address) == 0
    assert tier.wait(slot) == tier.poll(slot) == -errno.EIO
    assert tier.read_now(slot, target.address) == 0
    assert bytes(target) == bytes(source) and tier.poll(slot) == 1


def test_open_says_why_it_cannot(core, tmp_path):
    with pytest.raises(OSError, match="No such file or directory"):
        core_abi.Tier(core, tmp_path / "missing")


def test_calls_without_sense(make_tier):
    tier = make_tier()
    source = Bytes(KIB, 1)
    assert tier.write(None, KIB) == tier.write(source.address, 0) == -errno.EINVAL
    for slot in (-1, 0, 5, 2**40, 2**62):
        assert tier.poll(slot) == tier.wait(slot) == tier.read(slot, source.address) == -errno.EBADF
        tier.free(slot)


def test_the_file_has_no_name_and_is_private(make_tier, tmp_path):
    before = set(scratch_files())
    make_tier()
    assert os.listdir(tmp_path) == []
    (opened,) = set(scratch_files()) - before
    mode = os.stat(f"/proc/self/fd/{opened}").st_mode
    assert stat.S_ISREG(mode) and stat.S_IMODE(mode) == 0o600
    assert not os.get_inheritable(int(opened))


def test_close_leaves_no_thread_and_no_file(make_tier):
    threads, files = len(os.listdir("/proc/self/task")), set(os.listdir("/proc/self/fd"))
    tier = make_tier(workers=3, bytes_per_second=20 * MIB)
    assert len(os.listdir("/proc/self/task")) == threads + 3
    source = Bytes(4 * MIB, 1)
    for _ in range(20):  # four seconds of work, which close does not wait for
        tier.write(source.address, source.size)
    start = time.monotonic()
    tier.close()
    tier.handle = None
    assert time.monotonic() - start < 2
    assert len(os.listdir("/proc/self/task")) == threads
    assert set(os.listdir("/proc/self/fd")) <= files


def test_a_forked_child_reads_and_does_nothing_else(core, tmp_path):
    ended = run_child(
        f"""
        import ctypes, errno, os
        from test_file_tier import scratch_files
        before = len(scratch_files())
        tier = core_abi.Tier(core, {str(tmp_path)!r}, bytes_per_second=30 * 2**20)
        assert len(scratch_files()) == before + 1
        memory = ctypes.create_string_buffer(4 * 2**20)
        page = memory[:4096] = os.urandom(4096)
        ready = tier.write_now(memory, 4096)
        slots = [tier.write(memory, len(memory)) for _ in range(3)]
        for _ in range(5):
            child = os.fork()
            if child == 0:
                away = -errno.ECANCELED
                good = tier.write_now(memory, 4096) == tier.poll(ready) == tier.wait(slots[2]) == away
                good &= tier.read(ready, memory) == away and tier.stats.used_bytes == 0
                memory[:4096] = bytes(4096)
                good &= tier.read_now(ready, memory) == 0 and memory[:4096] == page
                good &= tier.read_now(1 << 40, memory) == -errno.EBADF
                tier.free(ready)
                good &= tier.read_now(ready, memory) == 0
                tier.close()
                os._exit(0 if good else 1)
            assert os.waitpid(child, 0)[1] == 0
        assert [tier.wait(slot) for slot in slots] == [0, 0, 0]
        tier.close()
        print("fine")
        """
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, "fine"), ended.stderr


INHERITED = """
    import contextlib, ctypes, errno, os
    size = 64 * 4096
    tier = core_abi.Tier(core, {folder!r}, capacity={capacity})
    memory = ctypes.create_string_buffer(size)

    def write(value):
        ctypes.memset(memory, value, size)
        return tier.write_now(memory, size)

    def child(slot, spoil=lambda: None):
        go, ready = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ready)
            spoil()
            os.read(go, 1)
            ctypes.memset(memory, 0, size)
            code = -tier.read_now(slot, memory)
            os._exit(code if code else 0 if memory.raw == b"1" * size else 255)
        os.close(go)
        return pid, ready

    def answer(pid, ready):
        with contextlib.suppress(BrokenPipeError):
            os.write(ready, b"!")
        os.close(ready)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

"""


@pytest.mark.parametrize(
    ("capacity", "spoil", "expected"),
    [
        pytest.param(0, "lambda: None", "0", id="there is other room"),
        pytest.param(3 * 64 * 4096, "lambda: None", "errno.ESTALE", id="there is none"),
        pytest.param(
            0,
            "lambda: (os.closerange(3, 64), [os.open('/dev/zero', 0) for _ in range(30)])",
            "errno.ESTALE",
            id="it closed what it did not know",
        ),
    ],
)
def test_room_that_a_child_may_read_is_written_anew_only_in_need(
    core, tmp_path, capacity: int, spoil: str, expected: str
) -> None:
    """And then the child is told: it never reads other bytes than there were at the fork."""
    ended = run_child(
        textwrap.dedent(INHERITED.format(folder=str(tmp_path), capacity=capacity))
        + textwrap.dedent(f"""
        first = write(ord("1"))
        pid, ready = child(first, {spoil})
        tier.free(first)
        late = [write(ord("2")) for _ in range(3)]
        assert all(slot >= 0 for slot in late), late
        got = answer(pid, ready)
        assert got == {expected}, got
        again = child(late[0])  # what is written after a revocation is its children's as ever
        tier.free(late[0])
        assert write(ord("3")) >= 0
        assert answer(*again) in (255, errno.ESTALE)
        print("fine")
        """)
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, "fine"), ended.stderr


def test_room_comes_back_when_the_children_have_ended(core, tmp_path) -> None:
    ended = run_child(
        textwrap.dedent(INHERITED.format(folder=str(tmp_path), capacity=4 * 64 * 4096))
        + textwrap.dedent("""
        for _ in range(20):
            slot = write(ord("1"))
            children = [child(slot) for _ in range(3)]
            tier.free(slot)
            other = write(ord("2"))
            assert other >= 0
            assert [answer(*c) for c in children] == [0, 0, 0]
            tier.free(other)
        slots = [write(ord("3")) for _ in range(4)]
        assert min(slots) >= 0, slots  # all the room that there is
        print("fine", len(os.listdir("/proc/self/fd")) < 20)
        """)
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, "fine True"), ended.stderr


def lend(tier, path, offset: int, size: int) -> tuple[int, int]:
    fd = os.open(path, os.O_RDONLY)
    return fd, tier.lend(fd, offset, size)


@pytest.fixture(params=["beside a file", "alone"])
def lending_tier(request, make_tier):
    return make_tier(folder=None) if request.param == "alone" else make_tier()


def test_a_lent_slot_reads_the_range_of_its_file(lending_tier, tmp_path):
    data = random.Random(1).randbytes(9 * MIB + 5)
    (tmp_path / "f").write_bytes(data)
    fd, slot = lend(lending_tier, tmp_path / "f", 777, 8 * MIB + 3)
    out = Bytes(8 * MIB + 3, shift=24)
    for _ in range(2):
        assert lending_tier.read_now(slot, out.address) == 0
        assert bytes(out) == data[777 : 777 + out.size]
    assert lending_tier.read(slot, out.address) == 0
    assert lending_tier.wait(slot) == 0
    assert lending_tier.stats.used_bytes == lending_tier.stats.file_bytes == 0
    lending_tier.free(slot)
    assert lending_tier.read_now(slot, out.address) == -errno.EBADF
    os.close(fd)


def test_a_tier_without_a_file_refuses_writes(make_tier):
    tier = make_tier(folder=None)
    source = Bytes(KIB, seed=1)
    assert tier.write(source.address, KIB) == -errno.ENOSPC
    assert tier.write_now(source.address, KIB) == -errno.ENOSPC


@pytest.mark.parametrize("change", ["time", "longer", "shorter"])
def test_a_lent_file_that_has_changed_is_stale(lending_tier, tmp_path, change):
    path = tmp_path / "f"
    path.write_bytes(bytes(2 * MIB))
    fd, slot = lend(lending_tier, path, 0, MIB)
    assert lending_tier.check_lent(slot) == 0
    if change == "time":
        os.utime(path, ns=(1, 1))
    else:
        os.truncate(path, 3 * MIB if change == "longer" else MIB // 2)
    out = Bytes(MIB)
    assert lending_tier.check_lent(slot) == -errno.ESTALE
    assert lending_tier.read_now(slot, out.address) == -errno.ESTALE
    lending_tier.free(slot)
    os.close(fd)


def test_a_range_beyond_the_end_of_a_file_is_not_lent(lending_tier, tmp_path):
    (tmp_path / "f").write_bytes(bytes(MIB))
    fd, slot = lend(lending_tier, tmp_path / "f", 1, MIB)
    assert slot == -errno.EINVAL
    os.close(fd)
