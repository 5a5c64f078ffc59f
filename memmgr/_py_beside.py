"""Beside an allocator that is not ours: what the accounting path does on a device, whose memory torch hands out itself.

The books say what is there; the device's allocator has the last word, and a limit.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from ._py_device import DeviceMemory, HostMemory, checksum_of
from ._py_ledger import Ledger
from ._py_predict import is_plain
from ._py_streams import RULES, Streams
from ._py_types import Known

_NATIVE_TRIES = 8  # to find room in an allocator that is not ours


class Beside(Ledger):
    """Room in the device's allocator, the order of its streams, and what nobody saw."""

    # -- room --

    def _obtain(self, nbytes: int) -> Any:
        for attempt in range(_NATIVE_TRIES):
            try:
                return self._memory.new(nbytes)
            except torch.OutOfMemoryError as error:
                if not self._made_native_room(error, nbytes, attempt):
                    raise
        raise AssertionError  # the last attempt says no

    def _made_native_room(self, error: BaseException, want: int, attempt: int) -> bool:
        """The allocator, which is not ours, has no room although our books say so: what it takes was not all seen, or lies
        in pieces. Lets go of more each time. False: there is nothing more to let go of, or the error is our own."""
        if not self._memory.asynchronous or getattr(error, "memmgr_said_it", False) or self._tls.no_reclaim:
            return False
        if attempt >= _NATIVE_TRIES - 1 or not self._no_capture.is_set():
            return False
        begun = time.perf_counter_ns()
        released = self._release_from_vault(max(want, self._budget >> 6) << attempt)
        again = self._call.get("on_retry")
        freed = again is not None and again()
        self._memory.empty_cache()
        self._n["stall_ns"] += (spent := time.perf_counter_ns() - begun)
        self._tls.stall_ns += spent
        self._reclaims += 1
        if not released and not freed:
            # Another thread may be about to free what is out of the books already: autograd's, after a backward.
            time.sleep(0.001 * 2**attempt)
        return bool(released or freed or attempt < 3)

    def _run(self, call: Any, args: Any, kwargs: Any, want: int) -> Any:
        """Runs an op that writes nothing; again, after making room, when the allocator had none."""
        for attempt in range(_NATIVE_TRIES):
            try:
                return call(*args, **kwargs) if kwargs else call(*args)
            except torch.OutOfMemoryError as error:
                if not self._made_native_room(error, want, attempt):
                    raise
        raise AssertionError  # the last attempt says no

    # -- which memory --

    def open_device(self, kind: str, index: int, driver: Any, memory: int, budget: int, outside: int) -> None:
        """Keeps the budget of a device whose allocator is not ours."""
        del driver, memory  # the shim's affair
        used = DeviceMemory(torch.device(kind, index))
        self._use(used, used.streams)
        self._begin(budget, outside)
        self._memory.limit(budget)
        self._see_unseen()

    def _use(self, memory: HostMemory, streams: Streams | None) -> None:
        self._memory, self._streams = memory, streams
        self._predictions.is_about(memory.device, memory.taken)
        if streams is not None:
            streams.joined = self._stream_joined

    def _see_unseen(self) -> None:
        """What the allocator has handed out beyond what is in the books (workspaces, a graph from before) counts as well."""
        allocated = self._memory.allocated()
        if allocated is None:
            return
        with self._lock:
            self._count_deaths()
            unseen = max(0, allocated - self._live - (self._outside - self._unseen) - self._promised)
            self._outside += unseen - self._unseen
            self._unseen = unseen
            self._raise_peaks()

    def set_capturing(self, value: bool) -> None:
        """A graph is captured: copies would be part of it, and so would what waits for its stream."""
        if self._streams is None:
            return  # of the host's memory a graph knows nothing
        self._streams.quiet = value
        if value:
            self._no_capture.clear()
            return
        self._no_capture.set()
        self._see_unseen()  # what the graph keeps was not seen being made

    def place(self) -> str:
        """The device that the last budget was about."""
        return str(self._memory.device)

    # -- streams --

    def _stream_joined(self) -> None:
        streams = self._streams
        if streams is None:
            return
        for known in list(self._table.values()):
            storage = known() if known.remade else None
            if storage is not None:
                streams.mark_all(storage, "remade")

    def _remade(self, known: Known | None, storage: Any) -> None:
        """The program takes this block for the one that it was given, whatever streams it has used that one on."""
        if self._streams is not None and known is not None:
            known.remade = True
            self._streams.mark_all(storage, "remade")

    def several_streams(self) -> bool:
        return self._streams is not None and self._streams.several

    def synchronize(self) -> None:
        self._memory.synchronize()

    def leave_out(self, rule: str) -> None:
        """That rule of the streams is not kept from now on: for tests. Empty: all are."""
        if rule and rule not in RULES:
            raise ValueError(f"no rule {rule!r}")
        if self._streams is not None:
            self._streams.left_out = rule

    def stream_rules(self) -> list[str]:
        return list(RULES)

    def checksum(self, tensor: Any) -> int | None:
        """Of the whole storage."""
        if not isinstance(tensor, torch.Tensor) or not is_plain(tensor):
            return None
        return checksum_of(tensor.untyped_storage(), self._streams)
