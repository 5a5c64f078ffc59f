"""The books of the accounting path: which storages are alive, what that sums to, and what an op is going to need.

Resident are the bytes of all storages that an op was seen to make, until they die, and those that were there before.
What an op takes for itself while it runs is not seen: that is why this path is the weaker one (design §4).
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Iterator
from itertools import chain, compress, repeat, starmap
from typing import Any

import torch

from . import _py_types as types
from ._ops import tensors_in
from ._py_device import HostMemory
from ._py_predict import Predictions, is_dense, is_plain
from ._py_streams import Streams
from ._py_tier import address
from ._py_types import Known
from ._py_watch import Watch
from ._sizes import UNLIMITED

_CELLS_PER_SCAN = 8  # cells that an op may look at on average to find out what the program holds
COUNTERS = (
    "evictions evicted_bytes binarized binarized_bytes expand_ns offloads offload_bytes reloads reload_bytes "
    "prefetch_hits prefetch_misses prefetch_cancels clean_drops stall_ns recorded_ops packs unpacks write_backs unranked "
    "tier_errors"
).split()


class ThreadState(threading.local):
    """What belongs to one thread."""

    stall_ns = 0
    no_reclaim = False
    trial = False
    recomputing = False
    refused_floor = 0
    promised = 0  # bytes that its op was told it may make, until they are in the books
    critical = 0  # more than 0 while state is half changed without the lock


class Ledger(Watch):
    """Live storages, the budget, and predictions of what ops need."""

    def __init__(self) -> None:
        super().__init__()
        # Guards all state but never a callback, an op or a transfer. What may run at any moment (finalizers, the ends of
        # objects) takes no lock: it leaves a note that the next holder reads.
        self._lock: Any = threading.RLock()
        self._tls = ThreadState()
        self._bell = threading.Event()
        self._table: dict[int, Known] = {}
        self._deaths: deque[Known | int] = deque()
        self._predictions = Predictions()
        self._call: dict[str, Any] = {}  # the manager's callbacks
        self._n = dict.fromkeys(COUNTERS, 0)
        self._active = False
        self._forked = False
        self._budget = UNLIMITED
        self._outside = 0
        self._live = 0
        self._promised = 0  # of all threads together
        self._virtual = 0  # gone, but live in a run without memmgr
        self._live_peak = self._resident_peak = self._unmanaged_peak = 0
        self._made = self._died = self._reclaims = self._failures = 0
        self._largest = 0
        self._floor = self._held_peak = self._held_estimate = self._scans = 0
        self._tier_error = ""
        self._watching = True
        self._memory = HostMemory()
        self._streams: Streams | None = None  # of a device; the CPU has none
        self._unseen = 0  # part of what is outside: allocated, but by nobody whom we saw
        self._no_capture = threading.Event()  # while a graph is captured nothing leaves and nothing comes back
        self._no_capture.set()

    # -- what other parts fill in --

    def _obtain(self, nbytes: int) -> Any:
        raise NotImplementedError

    def _run(self, call: Any, args: Any, kwargs: Any, want: int) -> Any:
        raise NotImplementedError

    def _use(self, memory: HostMemory, streams: Streams | None) -> None:
        raise NotImplementedError

    def _release_from_vault(self, want: int) -> int:
        raise NotImplementedError

    def _may_leave_bytes(self) -> int:
        raise NotImplementedError

    def _program_bytes(self) -> int:
        raise NotImplementedError

    def _cells_here(self) -> int:
        raise NotImplementedError

    def _can_offload(self) -> bool:
        raise NotImplementedError

    # -- storages --

    def _count_deaths(self) -> None:
        deaths, table = self._deaths, self._table
        while deaths:
            try:
                dead = deaths.popleft()
            except IndexError:
                return
            if isinstance(dead, int):
                self._outside += dead
                continue
            if table.get(dead.key) is dead:
                del table[dead.key]
            if dead.counted:
                self._live -= dead.taken
                self._died += 1
            dead.cell = None

    def _known(self, storage: Any) -> Known | None:
        found = self._table.get(storage._cdata)
        # Addresses are used again: the weak reference says whose entry it is.
        return found if found is not None and found() is storage else None

    def _register(self, storage: Any, counted: bool) -> Known:
        known = Known(storage, self._deaths.append, counted)
        known.taken = self._memory.taken(known.nbytes)
        self._table[known.key] = known
        if counted:
            self._count(known)
        return known

    def _count(self, known: Known) -> None:
        known.counted = True
        self._made += 1
        self._live += known.taken
        self._largest = max(self._largest, known.taken)
        self._raise_peaks()

    def _resized(self, known: Known, nbytes: int) -> None:
        taken = self._memory.taken(nbytes)
        if known.counted:
            self._live += taken - known.taken
            self._raise_peaks()
        known.nbytes, known.taken = nbytes, taken

    def _raise_peaks(self) -> None:
        if self._deaths:
            self._count_deaths()
        resident = self._live + self._outside
        self._live_peak = max(self._live_peak, self._live)
        self._resident_peak = max(self._resident_peak, resident)
        self._unmanaged_peak = max(self._unmanaged_peak, resident + self._virtual)

    def _resident(self) -> int:
        if self._deaths:
            with self._lock:
                self._count_deaths()
            for bury in types.bury:
                bury()
        return self._live + self._outside

    def _new_storage(self, nbytes: int, firm: bool = True) -> Any:
        """Fresh memory of ours, after making room for it."""
        self._reserve(self._memory.taken(nbytes), firm)
        storage = self._obtain(nbytes)
        with self._lock:
            self._register(storage, True)
        return storage

    def _note(self, out: Any, given: Any) -> int:
        """Enters the storages that an op made; returns their bytes."""
        made = 0
        theirs: set[int] | None = None
        for tensor in tensors_in(out):
            if not is_plain(tensor) or tensor.device != self._memory.device:
                continue
            storage = tensor.untyped_storage()
            known = self._known(storage)
            if known is not None:
                if known.nbytes != (nbytes := storage.nbytes()):
                    with self._lock:
                        before = known.taken
                        self._resized(known, nbytes)
                        made += max(0, known.taken - before)
                continue
            if theirs is None:
                theirs = {t.untyped_storage()._cdata for t in tensors_in(given) if is_plain(t)}
            with self._lock:
                known = self._register(storage, storage._cdata not in theirs)
                made += known.taken if known.counted else 0
        return made

    # -- ops --

    def _accounted(self, func: Any, call: Any, args: Any, kwargs: Any, again: bool = False) -> tuple[Any, int]:
        """Runs an op with the budget kept: room is made before, what it made is entered after, and its bytes returned.

        `again`: it writes nothing and draws nothing, so that it can run twice.
        """
        limited = self._budget != UNLIMITED
        if not limited:
            out = call(*args, **kwargs) if kwargs else call(*args)
            made = self._note(out, [args, kwargs or {}])
            self._after(made)
            return out, made
        key = self._predictions.key(func, args, kwargs)
        want, sure = self._predictions.ask(key, func, args, kwargs)
        self._promise(0)  # what an op around this one was promised, this one makes
        try:
            self._reserve(want, sure, retry=True, promise=True)
            if again and self._memory.asynchronous:
                out = self._run(call, args, kwargs, want)
            else:
                if want and self._memory.asynchronous:
                    self._obtain(want)  # and free again: an op that cannot be run a second time finds room there
                out = call(*args, **kwargs) if kwargs else call(*args)
            with self._lock:
                made = self._note(out, [args, kwargs or {}])
                self._promise(0)
        finally:
            self._promise(0)
        self._predictions.learn(key, made)
        self._after(made)
        return out, made

    def _promise(self, size: int) -> None:
        """Until it is in the books, other threads must not take the room that was made for this thread's op."""
        if size != self._tls.promised:
            with self._lock:
                self._promised += size - self._tls.promised
                self._tls.promised = size

    def _fits(self, want: int, promise: bool = False) -> bool:
        self._resident()  # what ended is out of the books
        with self._lock:
            fits = self._missing(want) <= 0
            if fits and promise:
                self._promise(want)
            return fits

    def _missing(self, want: int) -> int:
        """By how much `want` more bytes would pass the budget."""
        return self._live + self._outside + self._promised - self._tls.promised + want - self._budget

    def _after(self, made: int) -> None:
        if made and self._counts_for_floor():
            self._scan_floor(False)
        if made and self._resident() > self._budget:
            self._reserve(0, True)  # the guess was too small

    # -- room --

    def _reserve(self, want: int, firm: bool, retry: bool = False, promise: bool = False) -> None:
        """Makes room for `want` more bytes, and with `promise` keeps it for this thread until `_promise(0)`.

        Raises:
            torch.OutOfMemoryError: there is none, and `firm`.
        """
        if self._fits(want, promise):
            return
        if not self._tls.no_reclaim and want <= self._budget:
            begun = time.perf_counter_ns()
            try:
                for attempt in range(64):
                    need = self._missing(want)
                    self._reclaims += 1
                    released = self._release_from_vault(need)
                    empty = self._call.get("on_empty")
                    if not released and empty is not None and attempt < 4:
                        released = empty(need)
                    if self._fits(want, promise):
                        return
                    if not released:
                        break
            finally:
                spent = time.perf_counter_ns() - begun
                self._n["stall_ns"] += spent
                self._tls.stall_ns += spent
                self._note_stall(want, spent)
        if not firm:
            return
        again = self._call.get("on_retry")
        if retry and again is not None and again():
            return self._reserve(want, firm, promise=promise)
        self._failures += 1
        self._throw_out_of_memory(want)

    def _throw_out_of_memory(self, want: int) -> None:
        resident = self._resident()
        may_leave = min(self._may_leave_bytes(), resident)
        self._held_estimate = held = self._program_bytes()
        floor = max(self._floor, resident - may_leave + min(held, may_leave) + want)
        # A trial may fail, and a recomputation may find another way; one that does not ends the run.
        if self._counts_for_floor():
            self._floor = floor
        elif not self._tls.no_reclaim and not self._tls.trial:
            self._tls.refused_floor = floor
        text = (
            f"{self._memory.words} {'y' if self._memory.words.endswith(':') else 'Y'}ou tried to allocate {want} bytes. memmgr: "
            "the budget of "
            f"{_mib(self._budget)} is spent: {_mib(resident)} resident, of which nothing more can be let go. Smallest "
            f"budget that would have worked so far: {_mib(floor)} ({floor} bytes)."
        )
        if self._tier_error:
            text += f" The {self._memory.tier} tier failed: {self._tier_error}."
        error = torch.OutOfMemoryError(text)
        error.memmgr_said_it = True  # type: ignore[attr-defined]
        try:
            raise error
        finally:
            del error  # else it is held by the frame that it holds, and with it all that the frames below have

    def _counts_for_floor(self) -> bool:
        """Not a trial, nor a recomputation that offloading would have spared: neither says what the run needs."""
        trial = self._tls.no_reclaim or self._tls.trial
        return not trial and not (self._tls.recomputing and self._can_offload())

    def _scan_floor(self, at_op_boundary: bool) -> None:
        """floor: what is resident and may not leave, at its worst; held: the same seen between two ops."""
        if not self._watching:
            return
        resident = self._resident()
        free_to_go = min(self._may_leave_bytes(), resident)
        mark = self._held_peak if at_op_boundary else self._floor
        if resident <= mark:
            return
        # Asking every cell costs; what was held a few ops ago is a fair guess in between.
        self._scans += _CELLS_PER_SCAN
        if resident - free_to_go + self._held_estimate <= mark and self._scans < self._cells_here():
            return
        self._scans = 0
        self._held_estimate = held = self._program_bytes()
        seen = resident - free_to_go + min(held, free_to_go)
        if at_op_boundary:
            self._held_peak = max(self._held_peak, seen)
        else:
            self._floor = max(self._floor, seen)

    # -- the daemon's bell: nobody asks without the GIL here --

    def daemon_open(self) -> None:
        self._bell.clear()

    def daemon_wake(self) -> None:
        self._bell.set()

    def daemon_wait(self, seconds: float) -> int:
        self._bell.wait(None if seconds < 0 else seconds)
        self._bell.clear()
        return 0

    def daemon_answer(self, released: int) -> None:
        """Nobody waits for it."""

    def daemon_close(self) -> None:
        self._bell.set()

    # -- the part of the interface that is about bytes --

    def open_arena(self, budget: int, outside: int, reserve: int = 0) -> None:
        del reserve
        self._use(HostMemory(), None)
        self._begin(budget, outside)

    def _begin(self, budget: int, outside: int) -> None:
        if self._forked:
            raise RuntimeError("memmgr: cannot install in a forked child")
        self._budget, self._outside, self._unseen = budget, outside, 0
        self._floor = self._held_peak = self._held_estimate = self._largest = 0
        self._tier_error = ""
        self.reset_peak()

    def close_arena(self) -> None:
        with self._lock:
            self._count_deaths()
            self._budget, self._outside, self._unseen = UNLIMITED, 0, 0
        self._memory.limit(UNLIMITED)

    def peak(self) -> tuple[int, int]:
        """Highest resident, and highest unmanaged need, since the last `reset_peak`."""
        return self._resident_peak, self._unmanaged_peak

    def reset_peak(self) -> None:
        self._live_peak = self._resident_peak = self._unmanaged_peak = 0
        self._raise_peaks()

    def stalled(self) -> float:
        """Seconds that compute has waited for us."""
        return self._n["stall_ns"] * 1e-9

    def unpack_count(self) -> int:
        return self._n["unpacks"]

    def set_budget(self, budget: int) -> None:
        self._budget = budget
        self._memory.limit(budget)

    def add_outside(self, delta: int) -> None:
        self._deaths.append(delta)

    def resident(self) -> int:
        return self._resident()

    def set_watching(self, value: bool) -> None:
        """False while the recorder sleeps: what could leave is not known then."""
        self._watching = bool(value)

    def set_no_reclaim(self, value: bool) -> None:
        self._tls.no_reclaim = bool(value)

    def set_trial(self, value: bool) -> None:
        """This thread's allocations are a trial's: they say nothing about the floor."""
        self._tls.trial = bool(value)

    def refused(self) -> None:
        """This thread's recomputation was refused memory for good: the floor is higher."""
        self._floor = max(self._floor, self._tls.refused_floor)

    def set_recomputing(self, value: bool) -> bool:
        """Returns what it was: this thread's allocations are a replay's."""
        before = self._tls.recomputing
        self._tls.recomputing = bool(value)
        return before

    def storage_info(self, tensor: Any) -> tuple[int, int, bool, bool] | None:
        """(address of the storage, bytes, covers it all and is dense, is in the books)."""
        if not isinstance(tensor, torch.Tensor) or not is_plain(tensor):
            return None
        storage = tensor.untyped_storage()
        whole = tensor.numel() * tensor.element_size() == storage.nbytes()
        known = self._known(storage)
        return storage._cdata, storage.nbytes(), whole and is_dense(tensor), known is not None and known.counted

    def objects_of(self, kinds: tuple[type, ...]) -> list[Any]:
        """The objects of these types (or of subtypes) that the garbage collector knows.

        As the shim's: everything, which may be a tuple that another thread is still filling, is in the hands of C code
        only, and let go before the next bytecode. Known limitation: a collection that starts in between and runs a
        finalizer that lets another thread run (Python 3.11).
        """

        def chosen() -> Iterator[Any]:
            everything = chain.from_iterable(starmap(gc.get_objects, [()]))
            # Each object twice in a row: once to give, once to ask. (tee() would keep what it has found in itself.)
            twice = chain.from_iterable(map(repeat, everything, repeat(2)))
            return compress(twice, map(issubclass, map(type, twice), repeat(kinds)))

        return list(chosen())

    def arena_stats(self) -> dict[str, int]:
        resident = self._resident()
        return {
            "budget_bytes": self._budget,
            "outside_bytes": self._outside,
            "live_bytes": self._live,
            "live_peak_bytes": self._live_peak,
            "resident_peak_bytes": self._resident_peak,
            "requested_bytes": self._live,
            "committed_bytes": resident,
            "committed_peak_bytes": self._resident_peak,
            "live_blocks": self._made - self._died,
            "free_bytes": 0,
            "largest_free_bytes": 0,
            "allocations": self._made,
            "frees": self._died,
            "reclaims": self._reclaims,
            "reclaims_contiguity": 0,
            "reclaim_nanoseconds": self._n["stall_ns"],
            "failures": self._failures,
            "small_blocks": 0,
            "unmanaged_peak_bytes": self._unmanaged_peak,
        }

    def arena_blocks(self) -> list[tuple[int, int, int]]:
        alive = [(known(), known.nbytes) for known in list(self._table.values()) if known.counted]
        return sorted((address(storage), nbytes, 1) for storage, nbytes in alive if storage is not None)

    def arena_check(self) -> None:
        with self._lock:
            self._count_deaths()
            total = sum(known.taken for known in self._table.values() if known.counted)
            if total != self._live:
                raise AssertionError(f"the books say {self._live} bytes, the live storages have {total}")
            if min(self._live, self._virtual) < 0:
                raise AssertionError(f"negative: live {self._live}, virtual {self._virtual}")

    def counters(self) -> dict[str, int]:
        gone, offloaded = self._gone_bytes_now()
        return {
            **self._n,
            "gone_bytes": gone,
            "offloaded_bytes": offloaded,
            "bits_bytes": 0,  # the shim alone keeps any
            "floor_bytes": self._floor,
            "held_peak_bytes": self._held_peak,
        }

    def reset_counters(self) -> None:
        self._n = dict.fromkeys(COUNTERS, 0)
        self._reclaims = self._failures = 0


def _mib(size: int) -> str:
    return f"{size // 1048576}.{size % 1048576 * 10 // 1048576} MiB"
