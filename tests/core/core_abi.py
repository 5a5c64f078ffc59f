"""The C ABI of ``libmemmgr_core.so`` for the tests, by ctypes. Functions are typed by the headers; structures mirror them."""

import ctypes as c
import importlib.resources
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

UNLIMITED = 2**64 - 1
KIB = 1024
MIB = 1024 * 1024
PAGE = os.sysconf("SC_PAGE_SIZE")

RECLAIM_FN = c.CFUNCTYPE(c.c_uint64, c.c_void_p, c.c_uint64, c.c_uint64, c.c_int)
BLOCK_FN = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_uint64, c.c_uint64, c.c_int)

FREE, LIVE, HOLE = 0, 1, 2  # the states of a walk

SMALL_LIMIT = 8 * KIB


def aligned(size: int) -> int:
    unit = 64 if size <= SMALL_LIMIT else 512
    return -(-size // unit) * unit


def run_child(body: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs `body` with an `arena` of 1 MiB in a fresh interpreter."""
    prelude = f"""
        import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
        import core_abi; core = core_abi.load(); arena = core_abi.Arena(core, 2**20)
    """
    source = textwrap.dedent(prelude) + textwrap.dedent(body)
    variables = os.environ | {"MEMMGR_CORE_LIB": str(library_path())} | environment
    return subprocess.run([sys.executable, "-c", source], env=variables, capture_output=True, text=True, timeout=60)


class ArenaStats(c.Structure):
    _fields_ = [
        (name, c.c_uint64)
        for name in (
            "budget_bytes outside_bytes live_bytes live_peak_bytes resident_peak_bytes requested_bytes committed_bytes"
            " committed_peak_bytes live_blocks free_bytes largest_free_bytes allocations frees reclaims"
            " reclaims_contiguity reclaim_nanoseconds failures small_blocks unmanaged_peak_bytes remapped_bytes searches"
            " search_nanoseconds search_max_nanoseconds episodes episodes_contiguity evicted_bytes evicted_beyond_bytes"
            " evicted_excess_bytes"
            " longest_run_bytes placeable_bytes"
        ).split()
    ] + [(name, c.c_double) for name in "free_share_sum free_share_max fragmentation_sum fragmentation_max".split()]


class Price(c.Structure):
    _fields_ = [("p", c.c_void_p), ("owner", c.c_void_p), ("cost", c.c_double), ("last_access", c.c_double)]


class Victim(c.Structure):
    _fields_ = [("p", c.c_void_p), ("owner", c.c_void_p), ("bytes", c.c_uint64)]


REMAP_FIRST, REMAP_LAST, REMAP_NEVER = 0, 1, 2


class TierStats(c.Structure):
    _fields_ = [
        (name, c.c_uint64)
        for name in (
            "capacity_bytes used_bytes used_peak_bytes file_bytes written_bytes read_bytes write_nanoseconds"
            " read_nanoseconds cpu_nanoseconds queued_write_bytes queued_read_bytes writes reads errors"
            " lock_nanoseconds lock_wait_nanoseconds"
        ).split()
    ] + [("direct", c.c_int32)]


class Bits(c.Structure):
    _fields_ = [("bits", c.c_void_p), ("item", c.c_uint32), ("values", c.c_uint64 * 2)]


class DeviceStats(c.Structure):
    _fields_ = [
        (name, c.c_uint64)
        for name in (
            "waits cross_reuses synchronizations maps unmaps map_nanoseconds unmap_nanoseconds streams pools driver_errors"
        ).split()
    ]


class PlacesStats(c.Structure):
    _fields_ = [
        (name, c.c_uint64)
        for name in "rows frames computations asked_bytes displaced_bytes lacking_periods lacking_bytes".split()
    ]


HEADERS = Path(__file__).parents[2] / "allocator" / "include" / "memmgr"
NOT_IN_A_HEADER = "int mm_test_lock_pieces(uint64_t first, uint64_t piece, int touch);"
TYPES = {"void": None, "int": c.c_int, "unsigned": c.c_uint, "double": c.c_double, "size_t": c.c_size_t}
TYPES |= {
    "mm_stream": c.c_void_p,
    "int64_t": c.c_int64,
    "uint32_t": c.c_uint32,
    "uint64_t": c.c_uint64,
    "mm_slot": c.c_int64,
}
TYPES |= {"mm_reclaim_fn": RECLAIM_FN, "mm_block_fn": BLOCK_FN, "mm_price": Price, "mm_victim": Victim, "mm_bits": Bits}
TYPES |= {"mm_arena_stats": ArenaStats, "mm_tier_stats": TierStats}
TYPES |= {"mm_device_stats": DeviceStats, "mm_places_stats": PlacesStats}


def _type(words: str, types: dict, result: bool = False):
    """The ctypes type of a parameter or of a result. A pointer to any other type is an address, as is each of a result."""
    base, *rest = words.replace("*", " * ").replace("const", "").split()
    stars = rest.count("*")
    if not stars:
        return types[base]
    if base == "char":
        return c.c_char_p if stars == 1 else c.POINTER(c.c_char_p)
    if stars == 2:
        return c.POINTER(c.c_void_p)
    return c.POINTER(types[base]) if types.get(base) and not result else c.c_void_p


def prototypes(text: str, types: dict = TYPES) -> dict[str, tuple]:
    """Name -> type of the result, types of the arguments: of the functions that begin a line of C, and take no function."""
    found = re.findall(
        r"(?m)^((?:const )?\w+ ?\**) ?\b((?:mm|meter|cu|fake)\w+)\(([^()]*)\)(?: \{|;)", re.sub(r"//.*", "", text)
    )
    return {
        name: (
            _type(result, types, True),
            [_type(one, types) for one in arguments.split(",") if one.strip() not in ("", "void")],
        )
        for result, name, arguments in found
    }


def typed(library: c.CDLL, text: str, types: dict = TYPES) -> c.CDLL:
    """The library, whose functions have the types of these prototypes."""
    for name, (result, arguments) in prototypes(text, types).items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def library_path() -> Path | None:
    """``MEMMGR_CORE_LIB``, else the installed library, else None."""
    if "MEMMGR_CORE_LIB" in os.environ:
        return Path(os.environ["MEMMGR_CORE_LIB"])
    try:
        found = importlib.resources.files("memmgr") / "libmemmgr_core.so"
    except ModuleNotFoundError:
        return None
    return Path(str(found)) if found.is_file() else None


def load(path: Path | None = None) -> c.CDLL:
    """The core at `path`, or the installed one."""
    path = path or library_path()
    if path is None:
        raise FileNotFoundError("libmemmgr_core.so is not installed and MEMMGR_CORE_LIB is not set")
    headers = [(HEADERS / name).read_text() for name in ("core.h", "device.h")]
    return typed(c.CDLL(os.fspath(path)), "\n".join([*headers, NOT_IN_A_HEADER]))


class Arena:
    """An arena that is checked after every call that changes it."""

    def __init__(self, library: c.CDLL, budget: int = UNLIMITED, reserve: int = 0):
        self.library = library
        error = c.create_string_buffer(200)
        self.handle = library.mm_arena_create(budget, reserve, error, len(error))
        if not self.handle:
            raise MemoryError(error.value.decode())
        self._reclaim = RECLAIM_FN()

    def alloc(self, size: int) -> int | None:
        return self._checked(self.library.mm_arena_alloc(self.handle, size))

    def set_layout(self, remap: int) -> None:
        self._checked(self.library.mm_arena_set_layout(self.handle, remap))

    def price(self, address: int, cost: float, last_access: float = 0.0, owner: int | None = None) -> None:
        """The owner is the address itself unless given."""
        entry = Price(address, address if owner is None else owner, cost, last_access)
        self._checked(self.library.mm_arena_price(self.handle, c.byref(entry), 1))

    def choose(self, need: int, request: int, now: float = 1.0) -> list[int] | None:
        """The victims' addresses, or None when no choice is enough."""
        victims = (Victim * 4096)()
        count = self.library.mm_arena_choose(self.handle, need, request, now, victims, len(victims))
        assert count <= len(victims)
        return None if count < 0 else [victim.p for victim in victims[:count]]

    def try_alloc(self, size: int, keep_free: int = 0) -> int | None:
        return self._checked(self.library.mm_arena_try_alloc(self.handle, size, keep_free))

    def free(self, address: int) -> None:
        self._checked(self.library.mm_arena_free(self.handle, address))

    def trim(self, keep: int = 0) -> int:
        return self._checked(self.library.mm_arena_trim(self.handle, keep))

    def set_budget(self, size: int) -> None:
        self._checked(self.library.mm_arena_set_budget(self.handle, size))

    def set_outside(self, size: int) -> None:
        self._checked(self.library.mm_arena_add_outside(self.handle, size - self.stats.outside_bytes))

    def on_reclaim(self, function) -> None:
        """``function(need, request, attempt) -> released``."""
        self._reclaim = RECLAIM_FN(lambda _user, need, request, attempt: function(need, request, attempt))
        self.library.mm_arena_set_reclaim(self.handle, self._reclaim, None)

    def block_bytes(self, address: int) -> int:
        return self.library.mm_arena_block_bytes(self.handle, address)

    @property
    def stats(self) -> ArenaStats:
        out = ArenaStats()
        self.library.mm_arena_stats_get(self.handle, out)
        return out

    def walk(self) -> list[tuple[int, int, int]]:
        """(offset, bytes, state) in address order."""
        pieces: list[tuple[int, int, int]] = []
        visit = BLOCK_FN(lambda _user, offset, size, state: pieces.append((offset, size, state)) or 0)
        self.library.mm_arena_walk(self.handle, visit, None)
        return pieces

    def check(self) -> str:
        error = c.create_string_buffer(300)
        result = self.library.mm_arena_check(self.handle, error, len(error))
        return error.value.decode() if result else ""

    def destroy(self) -> int:
        return self.library.mm_arena_destroy(self.handle)

    def _checked(self, result):
        wrong = self.check()
        assert not wrong, wrong
        return result


class Tier:
    def __init__(
        self,
        library: c.CDLL,
        folder: Path | None,
        capacity: int = 0,
        bytes_per_second: int = 0,
        workers: int = 0,
        cached: int = 0,
    ):
        self.library = library
        error = c.create_string_buffer(200)
        self.handle = library.mm_tier_open_cached(
            None if folder is None else os.fsencode(folder),
            capacity,
            bytes_per_second,
            workers,
            cached,
            error,
            len(error),
        )
        if not self.handle:
            raise OSError(error.value.decode())

    def close(self) -> None:
        self.library.mm_tier_close(self.handle)

    def __getattr__(self, name: str):
        function = getattr(self.library, f"mm_tier_{name}")
        return lambda *arguments: function(self.handle, *arguments)

    @property
    def stats(self) -> TierStats:
        out = TierStats()
        self.library.mm_tier_stats_get(self.handle, out)
        return out
