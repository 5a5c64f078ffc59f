"""`MEMMGR_BUDGET`: a whole script under a budget, from the first call of a module, or the first tensor that autograd saves,
to its end.

Nothing is installed at import: hooks that do nothing but open the budget wait for either.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from memmgr.common.errors import BudgetError
from memmgr.common.say import warn
from memmgr.config.conf import check_limit, give_up, is_strict, parse_conf

from .budget import budget, current, let_give_way

_PROFILED = "a profiler runs in this thread: open the budget in the script, with memmgr.budget(...)"


class Plain:
    """A tensor that was saved before the budget opened: kept as it is, with autograd's version check."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached: a saved output with its grad_fn would keep its own node alive.
        try:
            self.tensor = tensor.detach()
        except TypeError:  # no handler for it here: a fake tensor inside shape propagation
            self.tensor = tensor
        self.version = None if tensor.is_inference() else tensor._version

    def get(self) -> torch.Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was written to meanwhile.
        """
        if self.version is not None and self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.shape)}] is at version {self.tensor._version}; "
                f"expected version {self.version} instead."
            )
        return self.tensor


class NotOpenedError(RuntimeError):
    """The budget that was asked for cannot be had here: the script must not train without."""


def _when_the_op_is_over(act: Callable[[], None]) -> None:
    """Calls `act` when the op that is saving a tensor has returned to Python.

    The running op began unseen, so its inputs are not pinned. A budget that opened in its middle could evict them (rule
    12). The interpreter's profile hook reports when the frame that called the op continues.
    """
    caller: Any = sys._getframe(2)
    at = caller.f_lasti

    def event(frame: Any, what: str, arg: Any) -> None:
        # Events of the caller itself, or of a function that it calls next; Python that runs inside the op is neither.
        if frame is caller or (frame.f_back is caller and caller.f_lasti != at) or (frame is caller.f_back):
            sys.setprofile(None)
            act()

    sys.setprofile(event)


class _Autostart:
    """Waits for the first call of a module, and for the first saved tensor."""

    def __init__(self, opened: budget, strict: bool) -> None:
        self._budget = opened
        self._strict = strict
        self._fired = False
        self._lock = threading.Lock()
        self._local = threading.local()
        self._bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def wait(self) -> None:
        self._hook()
        self._forward = torch.nn.modules.module.register_module_forward_pre_hook(self._first_call)
        waiting = self

        def bootstrap(thread: threading.Thread) -> None:
            if not waiting._fired:
                waiting._hook()
            waiting._bootstrap(thread)

        threading.Thread._bootstrap_inner = bootstrap  # type: ignore[attr-defined]
        os.register_at_fork(after_in_child=self._in_child)
        atexit.register(self.close)

    def counting(self) -> budget | None:
        """The budget, where it is open or still waits."""
        is_open = self._budget._runtime is not None and self._budget._runtime is current()
        return self._budget if is_open or not self._fired else None

    def caused_elsewhere(self, error: BaseException) -> BaseException | None:
        """Handles an exception that ends the script. Returns the exception to show instead, if another rank is the
        cause.
        """
        opened = self.counting()
        return opened._failed(error) if opened is not None else None

    def _hook(self) -> None:
        hooks = torch.autograd.graph.saved_tensors_hooks(self._first, self._back)
        hooks.__enter__()
        self._local.hooks = hooks

    def _unhook(self) -> None:
        hooks = self._local.__dict__.pop("hooks", None)
        if hooks is not None:
            hooks.__exit__(None, None, None)

    def _in_child(self) -> None:
        self._fired = True  # a child trains without us

    def _begins(self) -> bool:
        """Is this the first of all, and is the budget this process's?"""
        with self._lock:
            first, self._fired = not self._fired, True
        if not first or torch.utils.data.get_worker_info() is not None:
            return False
        threading.Thread._bootstrap_inner = self._bootstrap  # type: ignore[attr-defined]
        self._unhook()
        self._forward.remove()
        return True

    def _first_call(self, module: torch.nn.Module, args: Any) -> None:
        if self._begins():
            self._open()

    def _first(self, tensor: torch.Tensor) -> Any:
        if self._begins():
            if sys.getprofile() is None:
                _when_the_op_is_over(self._open)
            elif self._strict:
                self._refuse(RuntimeError(_PROFILED))
            else:
                warn(f"MEMMGR_BUDGET is ignored, because {_PROFILED}")
        return Plain(tensor)

    def _open(self) -> None:
        try:
            if current() is not None and self._budget._gives_way:
                return  # the script's own budget has its figures
            if current() is not None:
                raise RuntimeError(
                    "the script has opened a budget of its own, and MEMMGR_BUDGET or memmgr run asks for another one. One budget "
                    "is open at a time: remove the script's, or start the script without the other"
                )
            self._budget.__enter__()
            if self._budget._gives_way:
                let_give_way(self._budget)
        except Exception as error:
            if self._strict:
                self._refuse(error)
            warn(f"MEMMGR_BUDGET is set but the budget cannot be opened: {error}")

    def _refuse(self, error: Exception) -> None:
        """Waits again: a script that catches this and continues, with a smaller batch for example, must not train
        unmanaged.
        """
        self._fired = False
        self._hook()
        self._forward = torch.nn.modules.module.register_module_forward_pre_hook(self._first_call)
        if isinstance(error, BudgetError):
            raise error
        raise NotOpenedError(f"the budget cannot be opened: {str(error).removeprefix('memmgr: ')}") from None

    def _back(self, saved: Plain) -> torch.Tensor:
        """Unpacks a tensor that the first op saved, or a thread that did not open the budget."""
        return saved.get()

    def close(self) -> None:
        """At the end of the process."""
        if self._budget._runtime is not None:
            # As after an exception: tensors that the graph of the last step still needs are restored only if they fit.
            # The log must not report that for a script that reached its end.
            self._budget._runtime.process_ends()
            self._budget.__exit__(SystemExit, None, None)


def _say_what_it_was() -> None:
    """A budget that cannot be opened has nothing to do with the line of the script where it shows; and where another rank is in
    trouble, that is the error. The other ranks hear of one of ours now, since the process may live on for long."""
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        instead = _waiting.caused_elsewhere(error) if _waiting is not None else None
        if instead is not None:
            instead.__cause__ = error
            shown(type(instead), instead, trace)
        elif isinstance(error, NotOpenedError):
            print(f"memmgr: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        else:
            shown(kind, error, trace)

    sys.excepthook = hook


_waiting: _Autostart | None = None


def budget_of_the_script() -> budget | None:
    """The budget of `MEMMGR_BUDGET`, open or still waiting for the first module; None: there is none in this process, or it only
    measures.
    """
    found = _waiting.counting() if _waiting is not None else None
    return None if found is None or found._gives_way else found


def autostart() -> None:
    """Reads the environment, and waits for the first module. A wrong setting ends the process here, before any
    training: a malformed size, a missing folder or device. If the tensors fit is only known at the first call of a
    module, or at the first saved tensor, and fails there. With `strict:off` either is a warning."""
    global _waiting
    text = os.environ.get("MEMMGR_CONF", "")
    try:
        check_limit(os.environ["MEMMGR_BUDGET"])
        conf = parse_conf(text)
        conf.pop("strict", None)
        opened = budget(os.environ["MEMMGR_BUDGET"], **conf)
    except Exception as error:
        why = str(error).removeprefix("memmgr: ")
        if not why.startswith("MEMMGR_"):
            why = f"MEMMGR_CONF: {why}" if isinstance(error, ValueError) else f"the budget cannot be opened: {why}"
        give_up(RuntimeError(why))
        return
    _say_what_it_was()
    _waiting = _Autostart(opened, is_strict(text))
    _waiting.wait()
