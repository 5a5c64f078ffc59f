"""Errors of compiled graphs: inductor's code allocates outside of ops, where C++ raises no error of ours."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

from memmgr.common.errors import BudgetError
from memmgr.readers.patches import Patches


class CompiledGraphs:
    """The compiled graph that each thread is in, unless it is paged, and its errors, for one budget.

    Args:
        spent: the error of a thread that found no room, from the allocator's message.
        refusal: the allocator's last message to this thread; empty once a later request succeeded.
        paged: whether a graph is paged launch by launch. Its errors are those of the eager code around it.
    """

    def __init__(
        self, spent: Callable[[str], BudgetError], refusal: Callable[[], str], paged: Callable[[Any], bool]
    ) -> None:
        self._spent = spent
        self._refusal = refusal
        self._paged = paged
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

    def _patch(self, name: str, module: ModuleType) -> None:
        if hasattr(module, name):
            self._patches.wrap(getattr(module, name), "__call__", self._explained)

    def _explained(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._paged(args[0]):
                return original(*args, **kwargs)
            self._local.depth = getattr(self._local, "depth", 0) + 1
            try:
                self._refusal()
                return original(*args, **kwargs)
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
