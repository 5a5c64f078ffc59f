"""The true floor of a training run, measured without memmgr. Shares no code with it.

A tensor that autograd saved and nothing else holds could be elsewhere; everything else cannot. So the
floor is the largest sum, over the run, of the bytes not held by autograd alone plus the working set of the running op or
node (its inputs, outputs and temporaries).

How it is measured: the run is made once with an *ideal manager*. Saved-tensor hooks copy the bytes of every saved
tensor out of torch's memory (into numpy's) at the moment of saving, and keep no reference; when a backward node asks,
the bytes come back, once per storage, and live as long as the node or the program holds them. It takes no time to think,
needs no room to work and looks into the future as little as it likes: no manager that works by saved-tensor hooks can
need less. The peak of torch's own memory in such a run *is* the floor.

Live bytes come from torch's profiler, which hears of each allocation and each free of torch's own CPU allocator:
temporaries inside ops are counted, mkldnn's scratch (which does not pass the allocator) is not.

Known limitation: gradients on their way between two nodes are counted, although only the engine holds them: they are
not saved tensors, and no hook can take them out.
"""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass
class Curve:
    """Live bytes over a run, one entry per allocation or free, from the run's start on."""

    live_bytes: np.ndarray

    @property
    def peak_bytes(self) -> int:
        """The highest point."""
        return int(self.live_bytes.max(initial=0))


def live_curve(run: Callable[[], object]) -> Curve:
    """Calls `run` and returns the bytes that torch's CPU allocator held above those it held before.

    Blocks that are older than the call are counted neither when it begins nor when they are freed, so `run` has to
    build its model itself. One intra-op thread: the profiler does not see allocations of others.
    """
    gc.collect()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.autograd.profiler.profile(profile_memory=True) as profiler:  # makes no objects of events until asked
            run()
            gc.collect()
    finally:
        torch.set_num_threads(threads)
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    assert events, "the profiler saw no allocation: nothing was measured"
    return Curve(np.cumsum([e.nbytes() for e in events]))


class _Copy:
    """One storage's bytes, outside torch; and the storage that has them now, if one does."""

    __slots__ = ("__weakref__", "data", "where")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.where = weakref.ref(storage)
        self.refresh(storage)

    def refresh(self, storage: torch.UntypedStorage) -> None:
        """Copies all of it. The parts that were saved before are unchanged: autograd insists on that."""
        self.data = torch.empty(0, dtype=torch.uint8).set_(storage).numpy().copy()

    def storage(self) -> torch.UntypedStorage:
        now = self.where()
        if now is None:
            fresh = torch.empty(len(self.data), dtype=torch.uint8)
            fresh.numpy()[:] = self.data
            now = fresh.untyped_storage()
            self.where = weakref.ref(now)
        return now


class IdealManager:
    """Saved-tensor hooks that keep every saved byte out of torch's memory. See the module."""

    def __init__(self) -> None:
        self._copies: weakref.WeakValueDictionary[int, _Copy] = weakref.WeakValueDictionary()
        self.saves = 0

    def __enter__(self) -> "IdealManager":
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._hooks.__exit__(None, None, None)

    def _pack(self, tensor: torch.Tensor) -> Any:
        with torch.no_grad():
            storage = tensor.untyped_storage()
            copy = self._copies.get(storage._cdata)
            if copy is None or copy.where() is not storage:  # an address may be used again
                copy = self._copies[storage._cdata] = _Copy(storage)
            else:
                copy.refresh(storage)  # other parts of it may have been written since (`unsafe_chunk`)
            self.saves += 1
            return copy, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _unpack(self, packed: Any) -> torch.Tensor:
        copy, dtype, size, stride, offset = packed
        with torch.no_grad():
            return torch.empty(0, dtype=dtype).set_(copy.storage(), offset, size, stride)


def true_floor(run: Callable[[], object]) -> int:
    """The smallest budget that `run` could have, in bytes. `run` builds its model itself."""

    def shadow() -> None:
        with IdealManager() as ideal:
            run()
        assert ideal.saves > 0, "autograd saved nothing: this run has no floor to speak of"

    return live_curve(shadow).peak_bytes
