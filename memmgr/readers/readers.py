"""Changes of the process while a budget is open: raw readers, callbacks, captures."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memmgr.common.errors import BudgetError
from memmgr.native import dispatch

from .captures import Captures
from .distributed import Reducers
from .extensions import Extensions
from .inductor import PagedGraphs
from .names import pointers
from .patches import Leave, Patches
from .raw import RawReaders

if TYPE_CHECKING:
    from memmgr.native._pager import Pager


class Passes(Protocol):
    """An object that is told where passes begin and end."""

    def install(self, patches: Patches) -> None: ...


class Readers:
    """All patches of one budget. `remove` undoes them; the one for names may stay (names.py)."""

    def __init__(
        self, pager: Pager, device: torch.device, passes: Passes, meant_by: Callable[[RuntimeError], BudgetError | None]
    ) -> None:
        self._pager = pager
        self._meant_by = meant_by  # turns an error of torch's into a BudgetError
        self._patches = Patches()
        self.graphs = PagedGraphs(pager, device)
        self._raw = RawReaders(pager, self._patches, self.graphs)
        self._reducers = Reducers(pager, self._patches)
        self._extensions = Extensions(pager, self._patches)
        self._captures = Captures(pager, device, self._patches)
        self._passes = passes
        self._open = False

    def libraries(self) -> list[str]:
        """Those whose functions `install` wants."""
        return self._extensions.libraries()

    def install(self, found: list[Any]) -> None:
        """Puts the patches in place.

        Args:
            found: functions of `libraries()`.
        """
        self._open = True
        dispatch.prepare()
        self._raw.install()
        self._reducers.install()
        self._extensions.install(found)
        self._captures.install()
        wrap = self._patches.wrap
        # Their callbacks run in threads of C++, where no other code would see the ops. `then` returns an object of
        # torch._C, from which torch.futures' class derives.
        for name in ("then", "add_done_callback"):
            wrap(torch._C.Future, name, self._callback)
        wrap(torch._C.Future, "set_result", self._result)
        import torch.autograd.graph as graph

        wrap(graph, "_engine_run_backward", self._backward)
        for owner, name in (
            (torch.nn.Module, "load_state_dict"),
            (torch._C.ScriptFunction, "__call__"),
            (torch._C.ScriptMethod, "__call__"),
            (torch._C, "wait"),
            (torch._C.PyTorchFileReader, "get_storage_from_record"),
            (torch.UntypedStorage, "resize_"),
            (torch._C.Future, "wait"),
            (torch._C.Future, "value"),
            (graph, "_engine_run_backward"),  # of scripted graphs
        ):
            wrap(owner, name, self._quoting)
        self._passes.install(self._patches)

    def remove(self) -> None:
        """Undoes them."""
        self._open = False
        self._patches.undo()
        pointers.end()
        self._extensions.remove()
        self.graphs.remove()

    def escaped(self) -> dict[tuple[str, int], int]:
        """Where addresses were handed out for good, the file and the line, and how often."""
        return dict(self._raw.sites)

    def _callback(self, original: Any) -> Any:
        @functools.wraps(original)
        def register(future: Any, callback: Any) -> Any:
            @functools.wraps(callback)
            def run(done: Any) -> Any:
                seen = self._pager.see_this_thread(True)
                try:
                    result = callback(done)
                    self._reducers.keep_result(result)
                    return result
                finally:
                    if self._open:
                        self._pager.see_this_thread(seen)

            return original(future, run)

        return register

    def _result(self, original: Any) -> Any:
        @functools.wraps(original)
        def set_result(future: Any, result: Any) -> None:
            self._reducers.keep_result(result)
            original(future, result)

        return set_result

    def _quoting(self, original: Any) -> Any:
        """For functions that quote an error in one of their own, or allocate outside of ops: both end as a BudgetError."""

        def leave(_result: Any, error: BaseException | None) -> None:
            if not isinstance(error, RuntimeError) or isinstance(error, BudgetError):
                return
            meant = self._meant_by(error)
            if meant is not None:
                raise meant from error

        return self._pager.around(original, lambda *_, **__: leave)

    def _backward(self, original: Any) -> Any:
        def enter(*_args: Any, **_kwargs: Any) -> Leave | None:
            return self._reducers.begin_backward()

        return self._pager.around(original, enter)
