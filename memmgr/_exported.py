"""NumPy arrays and DLPack capsules over tensors from the time before a budget (rule 9).

From `import memmgr` on, `Tensor.numpy` and `Tensor.__dlpack__` are noted. A budget that opens keeps the bytes of these tensors
where they are: those of arrays that live, and those of DLPack while the storage lives.

Known limitation: an array from before `import memmgr` is not known.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

LEAST_BYTES = 64 << 10  # smaller storages are never paged


class Exported:
    """The arrays and storages that were noted in this process."""

    def __init__(self) -> None:
        self._arrays: dict[int, weakref.ref[Any]] = {}
        self._storages: dict[int, int] = {}  # address of the storage: the same, with a weak reference

    def begin(self) -> None:
        """Notes from now on. Only once a process."""
        if hasattr(torch.Tensor.numpy, "_memmgr"):
            return
        for name, note in (("numpy", self._note_array), ("__dlpack__", self._note_storage)):
            setattr(torch.Tensor, name, _noting(getattr(torch.Tensor, name), note))

    def owners(self) -> Iterator[torch.Tensor | torch.UntypedStorage]:
        """Tensors and storages whose bytes others can reach."""
        for reference in list(self._arrays.values()):
            array = reference()
            if array is not None and isinstance(array.base, torch.Tensor):
                yield array.base
        for address in list(self._storages):
            storage = torch.UntypedStorage._new_with_weak_ptr(address)
            if storage is not None:
                yield storage

    def _note_array(self, tensor: torch.Tensor, array: Any) -> None:
        if tensor.nbytes < LEAST_BYTES and tensor.untyped_storage().nbytes() < LEAST_BYTES:
            return
        key = id(array)
        self._arrays[key] = weakref.ref(array, lambda _: self._arrays.pop(key, None))

    def _note_storage(self, tensor: torch.Tensor, _: Any) -> None:
        for address in [a for a in self._storages if torch.UntypedStorage._expired(a)]:
            torch.UntypedStorage._free_weak_ref(self._storages.pop(address))
        storage: Any = tensor.untyped_storage()
        if storage.nbytes() >= LEAST_BYTES and storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage._weak_ref()


def _noting(original: Callable[..., Any], note: Callable[[torch.Tensor, Any], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        made = original(tensor, *args, **kwargs)
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            note(tensor, made)
        return made

    call._memmgr = True  # type: ignore[attr-defined]
    return call


exported = Exported()
