"""Errors of compiled graphs: inductor's code allocates outside of ops, where C++ raises no error of ours."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped

from memmgr.common.errors import BudgetError
from memmgr.config.sizes import show_size
from memmgr.readers.inductor import PagedGraphs
from memmgr.readers.patches import Patches


class CompiledGraphs:
    """The compiled graph that each thread is in, unless it is paged, and its errors, for one budget.

    `spent`: the error of a thread that found no room, from the allocator's message. `refusal`: the allocator's last
    message to this thread; empty once a later request succeeded. `graphs`: which graphs are paged launch by launch.
    Errors of these are those of the eager code around them.
    """

    def __init__(self, spent: Callable[[str], BudgetError], refusal: Callable[[], str], graphs: PagedGraphs) -> None:
        self._spent = spent
        self._refusal = refusal
        self._graphs = graphs
        # By the graph's id: the graph, the model, the reason, bytes.
        self._whole: dict[int, tuple[weakref.ref[Any], str, str, int]] = {}
        self._patches = Patches()
        self._local = threading.local()

    def install(self) -> None:
        """Puts the patches in place, now or when inductor is imported."""
        self._patches.when_imported("torch._inductor.output_code", functools.partial(self._patch, "CompiledFxGraph"))
        ahead = functools.partial(self._patch, "AOTICompiledModel")  # compiled ahead of time, and loaded
        self._patches.when_imported("torch.export.pt2_archive._package", ahead)

    def remove(self) -> None:
        """Undoes it."""
        self._patches.undo()

    def running(self) -> str:
        """The compiled model that the calling thread is in the graph of, by its class; empty: it is in none that is not paged."""
        if not getattr(self._local, "depth", 0):
            return ""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name == "__call__" and "self" in frame.f_code.co_varnames:
                model = getattr(frame.f_locals["self"], "__dict__", {}).get("_modules", {}).get("_orig_mod")
                if model is not None:
                    return type(model).__name__
            frame = frame.f_back
        return "graph"  # a compiled function's, or a backward

    def lines(self, *, binary: bool = False) -> list[str]:
        """A line of the summary for each model with graphs that were not paged: how much the largest has kept in memory."""
        models: dict[tuple[str, str], list[int]] = {}
        for _, name, reason, nbytes in self._whole.values():
            models.setdefault((name, reason), []).append(nbytes)
        return [
            f"{len(sizes)} compiled graph{'s' if len(sizes) > 1 else ''} of {name} ran as a whole ({reason}): "
            f"{'the largest' if len(sizes) > 1 else 'it'} kept at least {show_size(max(sizes), binary=binary)} in memory"
            for (name, reason), sizes in models.items()
        ]

    def _note_whole(self, graph: Any, storages: dict[int, int]) -> None:
        kept = storages | _storages(getattr(graph, "constants", None))
        self._whole[id(graph)] = weakref.ref(graph), self.running(), self._graphs.reason(graph), sum(kept.values())

    def _is_known(self, graph: Any) -> bool:
        known = self._whole.get(id(graph))  # another graph may have had the id
        return known is not None and known[0]() is graph

    def _patch(self, name: str, module: ModuleType) -> None:
        if hasattr(module, name):
            self._patches.wrap(getattr(module, name), "__call__", self._explained)

    def _explained(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._graphs.paged(args[0]):
                return self._graphs.call(original, args, kwargs)
            self._local.depth = getattr(self._local, "depth", 0) + 1
            try:
                self._refusal()
                given = None if self._is_known(args[0]) else _storages(args[1:])  # the call may end them
                result = original(*args, **kwargs)
                if given is not None:
                    self._note_whole(args[0], given | _storages(result))
                return result
            # a kernel of inductor's raises an error of its own, perhaps without the cause
            except RuntimeError as error:
                said = self._refusal()
                if isinstance(error, BudgetError) or not said:
                    raise
                spent = self._spent(said)
                cause = None if said in str(error) else error  # nothing is lost that is not said again
            finally:
                self._local.depth -= 1
            raise spent from cause

        return call


def _storages(values: Any) -> dict[int, int]:
    """Bytes of the storages of all strided tensors in nested containers, by their address."""
    if isinstance(values, torch.Tensor):
        if values.layout != torch.strided or is_wrapped(values):
            return {}
        try:
            storage = values.untyped_storage()
        except (RuntimeError, NotImplementedError):  # a subclass that has none
            return {}
        return {storage._cdata: storage.nbytes()}
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return {}
    found: dict[int, int] = {}
    for value in values:
        found |= _storages(value)
    return found
