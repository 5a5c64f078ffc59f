"""`StreamApi` on CUDA: torch's streams and events, storages as blocks, a registered page-locked slab.

**Not run so far**: this file was written on a machine without a GPU. What is proven without one is the order of waits
in host.py, on the double (tests/streams). Importing this module needs no CUDA; making a `CudaStreams` does.

A block is a `torch.UntypedStorage` on the device, or anything that owns one by reference. Its memory goes back to
whichever allocator made it when the last reference is dropped; torch's own allocator and ours both reuse memory in the
order of the stream that was current at its allocation, and know nothing of other streams. So deferral here is: hold a
reference until the events have passed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memmgr.tiers.streams import HostRange, StreamApi

# torch ships no annotations for these; one cast here instead of an ignore at each call.
_cuda: Any = torch.cuda
_storage_class: Any = torch.UntypedStorage


@dataclass(frozen=True, slots=True)
class PageLocked:
    """Page-locked host memory.

    Attributes:
        storage: the bytes; a storage and not `torch.empty`, because that would come from memmgr's own CPU arena where
            one is installed (a storage's constructor does not ask it) and count against a budget of the CPU device.
        registered: page-locked by cudaHostRegister (to be undone) rather than by torch's pool.
    """

    storage: torch.UntypedStorage
    registered: bool


@dataclass(frozen=True, slots=True)
class _Deferred:
    """A reference that keeps a block's memory from being reused before `after` have passed."""

    block: torch.UntypedStorage
    after: tuple[torch.cuda.Event, ...]
    home: torch.cuda.Stream | None


class CudaStreams:
    """Implements `StreamApi` for one CUDA device.

    Known limitations: not usable while a CUDA graph is being captured on any of its streams (events recorded outside
    the capture may not be waited for inside, nor queried). Events are made anew for each record, about a microsecond
    each (not measured).

    Args:
        device: a CUDA device or its index; the current one by default.

    Raises:
        RuntimeError: there is no CUDA here.
    """

    def __init__(self, device: torch.device | int | None = None) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("CudaStreams needs a CUDA device, and torch sees none here")
        index = torch.cuda.current_device() if device is None else torch.device("cuda", _index(device)).index
        self.device = torch.device("cuda", index)
        self._write_stream: torch.cuda.Stream = _cuda.Stream(self.device)
        self._read_stream: torch.cuda.Stream = _cuda.Stream(self.device)
        self._deferred: deque[_Deferred] = deque()
        self._sweeping = Lock()

    # ---- streams and events --------------------------------------------------------------------------------------

    @property
    def write_stream(self) -> torch.cuda.Stream:
        """Copies from device to host."""
        return self._write_stream

    @property
    def read_stream(self) -> torch.cuda.Stream:
        """Copies from host to device."""
        return self._read_stream

    def current_stream(self) -> torch.cuda.Stream:
        """torch's current stream of this device in the calling thread."""
        return torch.cuda.current_stream(self.device)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """A new event without timing, recorded on `stream`."""
        event: torch.cuda.Event = _cuda.Event(enable_timing=False)
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """cudaStreamWaitEvent."""
        stream.wait_event(event)

    def query(self, event: torch.cuda.Event) -> bool:
        """cudaEventQuery."""
        return _passed(event)

    def synchronize(self, event: torch.cuda.Event) -> None:
        """cudaEventSynchronize; torch releases the GIL for it."""
        event.synchronize()

    # ---- device blocks -------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, stream: torch.cuda.Stream) -> torch.UntypedStorage:
        """A storage from whichever CUDA allocator is installed, in the order of `stream`.

        If there is no room, deferred blocks with home `stream` are let go in stream order and it is tried once more.
        """
        self._sweep()
        try:
            return self._empty(nbytes, stream)
        except torch.OutOfMemoryError:
            if not self._deferred:
                raise
        # Outside the handler: the exception's traceback would hold what is to be given back (facts B4).
        self.settle(stream)
        return self._empty(nbytes, stream)

    def _empty(self, nbytes: int, stream: torch.cuda.Stream) -> torch.UntypedStorage:
        with _plain_torch(), torch.cuda.stream(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device).untyped_storage()

    def free(
        self,
        block: torch.UntypedStorage,
        after: Sequence[torch.cuda.Event],
        home: torch.cuda.Stream | None = None,
    ) -> None:
        """Holds a reference to `block` until all of `after` have passed. Never blocks: finalizers may call it.

        References are dropped by the next `free`, `allocate` or `settle` that finds the events passed. With `home`
        unknown that is the only way, and memory that is needed at once comes back late.
        """
        pending = tuple(event for event in after if not _passed(event))
        if pending:
            self._deferred.append(_Deferred(block, pending, home))  # atomic
        self._sweep()

    def settle(self, stream: torch.cuda.Stream) -> None:
        """`stream` waits for the events of every deferred block whose home it is; their references are dropped."""
        with self._sweeping:
            kept, gone = deque[_Deferred](), []
            while self._deferred:
                item = self._deferred.popleft()
                if item.home == stream:
                    for event in item.after:
                        stream.wait_event(event)
                    gone.append(item)
                else:
                    kept.append(item)
            self._deferred.extend(kept)
        del gone  # outside the lock: the last reference to a storage may run finalizers

    def _sweep(self) -> None:
        """Drops references whose events have passed, oldest first; stops at one that has not, so it is O(1) then."""
        gone = []
        if self._sweeping.acquire(blocking=False):
            try:
                # The oldest first; a slow one in front delays the rest, which costs room for a while but never bytes.
                while self._deferred and all(_passed(event) for event in self._deferred[0].after):
                    gone.append(self._deferred.popleft())
            finally:
                self._sweeping.release()
        del gone

    def copy_async(
        self,
        dst: torch.UntypedStorage | HostRange,
        src: torch.UntypedStorage | HostRange,
        nbytes: int,
        stream: torch.cuda.Stream,
    ) -> None:
        """cudaMemcpyAsync through `Tensor.copy_(non_blocking=True)` on bytes."""
        with _plain_torch(), torch.cuda.stream(stream):
            _bytes(dst, nbytes).copy_(_bytes(src, nbytes), non_blocking=True)

    # ---- host memory ---------------------------------------------------------------------------------------------

    def host_allocate(self, nbytes: int) -> PageLocked:
        """One storage, page-locked in place.

        Registered rather than taken from torch's pool, which rounds to powers of two. Falls back to the pool where
        registering is refused (some virtual machines and containers).

        Known limitation, not verified: a refused registration may leave CUDA's "last error" set, which torch's next
        kernel launch would then report as its own.

        Raises:
            RuntimeError: neither way gives page-locked memory, e.g. beyond the process's limit of locked memory.
        """
        storage: torch.UntypedStorage = _storage_class(nbytes)
        with torch.cuda.device(self.device):
            error = int(_cuda.cudart().cudaHostRegister(storage.data_ptr(), nbytes, 0))
            if error == 0:
                return PageLocked(storage, registered=True)
            del storage
            with _plain_torch():
                pooled = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).untyped_storage()
        return PageLocked(pooled, registered=False)

    def host_free(self, memory: PageLocked) -> None:
        """Undoes the registration; the storage itself dies with its last reference."""
        if memory.registered:
            with torch.cuda.device(self.device):
                _cuda.cudart().cudaHostUnregister(memory.storage.data_ptr())

    def host_address(self, memory: PageLocked) -> int:
        """The storage's address."""
        return memory.storage.data_ptr()


def _passed(event: Any) -> bool:
    return bool(event.query())


def _index(device: torch.device | int) -> int:
    """The index of a CUDA device, `torch.device("cuda")` meaning the current one."""
    if isinstance(device, int):
        return device
    if device.type != "cuda":
        raise ValueError(f"not a CUDA device: {device}")
    return torch.cuda.current_device() if device.index is None else device.index


def _bytes(place: torch.UntypedStorage | HostRange, nbytes: int) -> torch.Tensor:
    """The first `nbytes` bytes of a storage or host range, as a tensor with a version counter of its own (facts B3).

    Raises:
        ValueError: the storage is shorter. `set_` would grow it silently instead (rule 3).
    """
    if isinstance(place, HostRange):
        storage, offset = place.memory.storage, place.offset_bytes
    else:
        storage, offset = place, 0
    if offset + nbytes > storage.nbytes():
        raise ValueError(f"{nbytes} bytes at offset {offset} do not fit into a storage of {storage.nbytes()} bytes")
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return view.set_(storage, offset, (nbytes,), (1,))


@contextmanager
def _plain_torch() -> Iterator[None]:
    """Dispatch modes off: what a tier does is no op of the program, and must not be recorded (rule 5)."""
    with _disable_current_modes():
        yield


if TYPE_CHECKING:
    _implements: type[StreamApi] = CudaStreams
