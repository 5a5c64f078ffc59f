"""Reads of torch.distributed outside of ops: DDP's reducer, pinned for the backwards in which it waits for gradients
(rule 3), and backends that are called directly.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from memmgr.common.constants import Escape

from .patches import Leave, Patches
from .raw import storages

if TYPE_CHECKING:
    from memmgr.native._pager import Pager, Pin

COLLECTIVES = (
    "broadcast",
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "allgather",
    "_allgather_base",
    "allgather_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "alltoall_base",
    "alltoall",
    "send",
    "recv",
    "recv_anysource",
)


class Reducers:
    """The reducers that have been met. Their buckets page like anything else between their backwards."""

    def __init__(self, pager: Pager, patches: Patches) -> None:
        self._pager = pager
        self._patches = patches
        self._met: weakref.WeakSet[Any] = weakref.WeakSet()
        self._results: list[Pin] = []  # of the collectives of the backward that runs
        self._backwards = 0

    def install(self) -> None:
        reducer = getattr(torch.distributed, "Reducer", None)
        if reducer is None:
            return
        self._patches.wrap(reducer, "prepare_for_backward", self._meet)
        self._patches.wrap(reducer, "_delay_all_reduce", self._with_gradients)
        self._patches.wrap(reducer, "_rebuild_buckets", self._with_new_buckets)
        for name in COLLECTIVES:
            self._patches.wrap(torch._C._distributed_c10d.Backend, name, self._by_address)
        self._patches.wrap(torch.distributed, "_verify_params_across_processes", self._in_cpp)
        self._patches.when_imported("torch.distributed.pipelining.stage", self._patch_stages)

    def begin_backward(self) -> Leave | None:
        """A backward begins; the result is called at its end. None: no reducer takes part in it."""
        pins = [pin for pin in (self._pager.pin_reducer(reducer, False) for reducer in self._met) if pin is not None]
        if not pins:
            return None
        self._pager.reducers_listen(True)
        self._backwards += 1

        def leave(_result: Any, _error: BaseException | None) -> None:
            self._backwards -= 1
            if not self._backwards:
                self._results.clear()
            self._pager.reducers_listen(False)
            pins.clear()

        return leave

    def keep_result(self, result: Any) -> None:
        """A communication hook's: the reducer asks whether it aliases the bucket."""
        if self._backwards:
            self._results.append(self._pager.pin(storages([result]), held=True))

    def _by_address(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # Asked of a backend and not of its group, a collective passes no dispatcher; its end is not reported.
        @functools.wraps(original)
        def collective(backend: Any, *args: Any, **kwargs: Any) -> Any:
            for addressed in storages([*args, *kwargs.values()]):
                self._pager.escape(addressed, Escape.POINTER)
            return original(backend, *args, **kwargs)

        return collective

    def _in_cpp(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # It reads a tensor of all parameters' sizes by its address, after ops on it. The parameters' bytes it does not read,
        # so they are not arguments here and need not be in memory.
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._pager.call_foreign(functools.partial(original, *args, **kwargs), (), {})

        return call

    def _patch_stages(self, stages: ModuleType) -> None:
        self._patches.wrap(stages, "_make_tensor_from_meta", self._touched)

    def _touched(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        # A stage makes its receive buffers for all micro-batches at once. No code has their addresses, so they need not
        # stay until something has come.
        @functools.wraps(original)
        def make_tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
            return original(*args, **kwargs).zero_()

        return make_tensor

    def _meet(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def prepare_for_backward(reducer: Any, *args: Any) -> Any:
            self._met.add(reducer)
            return original(reducer, *args)

        return prepare_for_backward

    def _with_gradients(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # A static graph's first backward reduces at its end, all gradients in one go.
        @functools.wraps(original)
        def delay_all_reduce(reducer: Any) -> Any:
            pin = self._pager.pin_reducer(reducer, True)
            try:
                return original(reducer)
            finally:
                del pin

        return delay_all_reduce

    def _with_new_buckets(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # After the first backward. It reads a list of indices by an address that it took before it wrote and sent the list,
        # and checks whether the gradients are views of a new bucket already.
        @functools.wraps(original)
        def rebuild_buckets(reducer: Any) -> Any:
            pin = self._pager.pin_reducer(reducer, True) if self._pager.moves_gradients(reducer) else None
            try:
                return self._pager.call_foreign(original, (reducer,), {})
            finally:
                del pin

        return rebuild_buckets
