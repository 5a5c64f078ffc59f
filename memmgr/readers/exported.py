"""NumPy arrays, DLPack capsules and slices of storages from the time before a budget, or from an earlier one (rule 9).

From `import memmgr` on, `Tensor.numpy`, `Tensor.__dlpack__`, `to_dlpack`, `Tensor.__cuda_array_interface__` and slices of
`UntypedStorage` are noted. A budget that opens keeps the bytes of these tensors where they are: those of arrays that live, and
the others while the storage lives. Slices of a mapped file may leave: the pager knows their ranges.

Known limitations: an array, a capsule or a slice from before `import memmgr` is not known, nor is a bare address
(`data_ptr()`), or a use of DLPack's table of C functions from before the budget.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memmgr.config.sizes import SMALL_BYTES

DLPACK = (
    (torch.Tensor, "__dlpack__"),
    (torch._C, "_to_dlpack"),
    (torch._C, "_to_dlpack_versioned"),
    (torch.utils.dlpack, "to_dlpack"),
    (torch, "to_dlpack"),
)
"""The functions that hand out a tensor's bytes as a capsule. `Tensor.__dlpack__` calls one of the others."""


class Exported:
    """The arrays and storages that were noted in this process."""

    def __init__(self) -> None:
        self._arrays: dict[int, weakref.ref[Any]] = {}
        # Addresses of storages, each with a weak reference.
        self._storages: dict[int, int] = {}
        self._sliced: dict[int, int] = {}

    def begin(self) -> None:
        """Notes from now on. Only once a process."""
        if hasattr(torch.Tensor.numpy, "_memmgr"):
            return
        setattr(torch.Tensor, "numpy", _noting(torch.Tensor.numpy, self._note_array))  # noqa: B010
        bound = torch._C._to_dlpack
        for owner, name in DLPACK:
            setattr(owner, name, _noting(getattr(owner, name), self._note_storage))
        for module in list(sys.modules.values()):  # that have it by `from torch.utils.dlpack import to_dlpack`
            names = getattr(module, "__dict__", {})
            if names.get("to_dlpack") is bound:
                names["to_dlpack"] = vars(torch)["to_dlpack"]
        interface = vars(torch.Tensor)["__cuda_array_interface__"].fget
        setattr(torch.Tensor, "__cuda_array_interface__", property(_noting(interface, self._note_storage)))  # noqa: B010
        setattr(torch.UntypedStorage, "__getitem__", self._noting_slices(torch.UntypedStorage.__getitem__))  # noqa: B010

    def sliced(self) -> Iterator[torch.UntypedStorage]:
        """Storages that have slices, or had some."""
        return _alive(self._sliced)

    def owners(self) -> Iterator[torch.Tensor | torch.UntypedStorage]:
        """Tensors and storages whose bytes others can reach."""
        for reference in list(self._arrays.values()):
            array = reference()
            if array is not None and isinstance(array.base, torch.Tensor):
                yield array.base
        yield from _alive(self._storages)

    def _note_array(self, tensor: torch.Tensor, array: Any) -> None:
        if tensor.nbytes < SMALL_BYTES and tensor.untyped_storage().nbytes() < SMALL_BYTES:
            return
        key = id(array)
        self._arrays[key] = weakref.ref(array, lambda _: self._arrays.pop(key, None))

    def _noting_slices(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def item(storage: Any, index: Any) -> Any:
            made = original(storage, index)
            if isinstance(index, slice):
                _keep(self._sliced, storage)
            return made

        return item

    def _note_storage(self, tensor: torch.Tensor, _: Any) -> None:
        _keep(self._storages, tensor.untyped_storage())


def _keep(storages: dict[int, int], storage: Any) -> None:
    if storage.nbytes() < SMALL_BYTES or storage._cdata in storages:
        return
    for address in [a for a in storages if torch.UntypedStorage._expired(a)]:
        torch.UntypedStorage._free_weak_ref(storages.pop(address))
    storages[storage._cdata] = storage._weak_ref()


def _alive(storages: dict[int, int]) -> Iterator[torch.UntypedStorage]:
    for address in list(storages):
        storage = torch.UntypedStorage._new_with_weak_ptr(address)
        if storage is not None:
            yield storage


def _noting(original: Callable[..., Any], note: Callable[[torch.Tensor, Any], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        made = original(tensor, *args, **kwargs)
        if isinstance(tensor, torch.Tensor):
            with torch._C.DisableTorchFunctionSubclass(), contextlib.suppress(RuntimeError):  # it has no storage
                note(tensor, made)
        return made

    call._memmgr = True  # type: ignore[attr-defined]
    return call


exported = Exported()
