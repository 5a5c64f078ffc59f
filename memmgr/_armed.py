"""`MEMMGR_BUDGET`: a whole script under a budget, from its first saved tensor to its end.

Nothing is installed at import: hooks that do nothing but open the budget wait for the first tensor that autograd saves.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ._budget import budget
from ._errors import BudgetError
from ._recorder import Plain

KEYS = "policy, disk, disk_size, host, device, log, verify, quiet, strict, placement, trace, trace_pass"


_PROFILED = "a profiler runs in this thread: open the budget in the script, with memmgr.budget(...)"


class NotOpenedError(RuntimeError):
    """A strict budget (`memmgr run --budget`) cannot be had here: the script must not train without."""


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    if text.lstrip().startswith("{"):
        try:
            for key, value in json.loads(text).items():
                yield str(key), str(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"MEMMGR_CONF: not JSON: {error}") from None
        return
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, colon, value = part.partition(":")
        if not colon:
            raise ValueError(f"MEMMGR_CONF: {part!r} is not key:value; keys are {KEYS}")
        yield key.strip(), value.strip()


def parse_conf(text: str) -> dict[str, Any]:
    """`policy:dtr,disk:/nvme` as keyword arguments of `budget`; a JSON object says the same.

    `strict` is none of them: with it a budget that cannot be opened is an error in the script (as `memmgr run` asks), not
    a warning beside an unmanaged one.

    Raises:
        ValueError: an unknown key or a pair without a colon; the text names what is accepted.
    """
    found: dict[str, Any] = {}
    folder, size = None, None
    for key, value in _pairs(text):
        if key in ("policy", "device", "host", "log", "trace"):
            found[key] = value
        elif key == "trace_pass":
            found[key] = int(value)
        elif key == "placement":
            found["_placement"] = value
        elif key == "disk":
            folder = value
        elif key == "disk_size":
            size = value
        elif key in ("verify", "quiet", "strict"):
            found[key] = value.lower() in ("1", "true", "yes", "on")
        else:
            raise ValueError(f"MEMMGR_CONF: unknown key {key!r}; keys are {KEYS}")
    if folder is not None:
        found["disk"] = False if folder.lower() in ("off", "none", "0") else (folder, size) if size else folder
    return found


def _when_the_op_is_over(act: Callable[[], None]) -> None:
    """Calls `act` when the op that is saving a tensor has returned to Python.

    A mode that begins in the middle of an op sees the rest of its kernel: of addmm the copy of the bias, not the product,
    and would take that for the recipe of the result (rule 6). The interpreter's profile hook says when the frame that
    called the op goes on.
    """
    caller: Any = sys._getframe(2)
    at = caller.f_lasti

    def event(frame: Any, what: str, arg: Any) -> None:
        # Events of the caller itself, or of a function that it calls next; Python that runs inside the op is neither.
        if frame is caller or (frame.f_back is caller and caller.f_lasti != at) or (frame is caller.f_back):
            sys.setprofile(None)
            act()

    sys.setprofile(event)


class _Armed:
    """Waits for the first saved tensor."""

    def __init__(self, opened: budget | Exception, strict: bool) -> None:
        self._budget = opened  # or why there is none, which the first saved tensor is told
        self._strict = strict
        self._fired = False
        self._lock = threading.Lock()
        self._local = threading.local()
        self._bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def arm(self) -> None:
        self._hook()
        armed = self

        def bootstrap(thread: threading.Thread) -> None:
            if not armed._fired:
                armed._hook()
            armed._bootstrap(thread)

        threading.Thread._bootstrap_inner = bootstrap  # type: ignore[attr-defined]
        os.register_at_fork(after_in_child=self._in_child)
        atexit.register(self.close)

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

    def _first(self, tensor: torch.Tensor) -> Any:
        with self._lock:
            first, self._fired = not self._fired, True
        if first and torch.utils.data.get_worker_info() is None:
            threading.Thread._bootstrap_inner = self._bootstrap  # type: ignore[attr-defined]
            self._unhook()
            if isinstance(self._budget, Exception):
                self._refuse(self._budget)
            elif sys.getprofile() is None:
                _when_the_op_is_over(self._open)
            elif self._strict:
                self._refuse(RuntimeError(_PROFILED))
            else:
                warnings.warn(f"memmgr: MEMMGR_BUDGET is ignored, because {_PROFILED}", stacklevel=2)
        return Plain(tensor)

    def _open(self) -> None:
        assert isinstance(self._budget, budget)
        try:
            self._budget.__enter__()
        except Exception as error:
            if self._strict:
                self._refuse(error)
            warnings.warn(f"memmgr: MEMMGR_BUDGET is set but the budget cannot be opened: {error}", stacklevel=2)

    def _refuse(self, error: Exception) -> None:
        """Waits again: who catches this and trains on, with a smaller batch say, shall not train unmanaged."""
        self._fired = False
        self._hook()
        if isinstance(error, BudgetError):
            raise error
        raise NotOpenedError(f"the budget cannot be opened: {str(error).removeprefix('memmgr: ')}") from error

    def _back(self, saved: Plain) -> torch.Tensor:
        """Unpacks what the first op saved, or a thread that did not open the budget."""
        return saved.get()

    def close(self) -> None:
        """At the end of the process."""
        if isinstance(self._budget, budget) and self._budget._manager is not None:
            # As after an exception: what the graph of the last step still needs comes back only if it fits. But that is not
            # what the log shall say of a script that came to its end.
            self._budget._manager.ended_well = getattr(sys, "last_value", None) is None
            self._budget.__exit__(SystemExit, None, None)


def arm() -> None:
    """Reads the environment and arms; a bad value is one clear warning, never an exception in `import torch`."""
    strict = False
    try:
        conf = parse_conf(os.environ.get("MEMMGR_CONF", ""))
        strict = bool(conf.pop("strict", False))
        limit = os.environ["MEMMGR_BUDGET"]
        opened: budget | Exception = budget(None if limit.lower() == "none" else limit, **conf)
    except Exception as error:
        if not strict:
            warnings.warn(f"memmgr: MEMMGR_BUDGET is ignored: {error}", stacklevel=2)
            return
        opened = error
    _Armed(opened, strict).arm()
