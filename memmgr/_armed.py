"""`MEMMGR_BUDGET`: a whole script under a budget, from its first saved tensor to its end.

Nothing is installed at import: hooks that do nothing but open the budget wait for the first tensor that autograd saves.
"""

from __future__ import annotations

import atexit
import os
import threading
import warnings
from typing import Any

import torch

from ._budget import budget
from ._recorder import Plain

KEYS = "policy, disk, disk_size, host, device, verify, quiet, placement"


def parse_conf(text: str) -> dict[str, Any]:
    """`policy:dtr,disk:/nvme` as keyword arguments of `budget`.

    Raises:
        ValueError: an unknown key or a pair without a colon; the text names what is accepted.
    """
    found: dict[str, Any] = {}
    folder, size = None, None
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, colon, value = part.partition(":")
        if not colon:
            raise ValueError(f"MEMMGR_CONF: {part!r} is not key:value; keys are {KEYS}")
        key, value = key.strip(), value.strip()
        if key in ("policy", "device", "host"):
            found[key] = value
        elif key == "placement":
            found["_placement"] = value
        elif key == "disk":
            folder = value
        elif key == "disk_size":
            size = value
        elif key in ("verify", "quiet"):
            found[key] = value.lower() in ("1", "true", "yes", "on")
        else:
            raise ValueError(f"MEMMGR_CONF: unknown key {key!r}; keys are {KEYS}")
    if folder is not None:
        found["disk"] = False if folder.lower() in ("off", "none", "0") else (folder, size) if size else folder
    return found


class _Armed:
    """Waits for the first saved tensor."""

    def __init__(self, opened: budget) -> None:
        self._budget = opened
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
            try:
                self._budget.__enter__()
            except Exception as error:
                warnings.warn(f"memmgr: MEMMGR_BUDGET is set but the budget cannot be opened: {error}", stacklevel=2)
            else:
                manager = self._budget._manager
                if manager is not None:
                    return manager.native.pack(tensor)
        return Plain(tensor)

    def _back(self, saved: Any) -> torch.Tensor:
        """Unpacks the one tensor that opened the budget, or what was saved by a thread that did not."""
        if isinstance(saved, Plain):
            return saved.get()
        manager = self._budget._manager
        assert manager is not None
        tensor: torch.Tensor = manager.native.unpack(saved)
        return tensor

    def close(self) -> None:
        """At the end of the process."""
        if self._budget._manager is not None:
            self._budget.__exit__(None, None, None)


def arm() -> None:
    """Reads the environment and arms; a bad value is one clear warning, never an exception."""
    try:
        conf = parse_conf(os.environ.get("MEMMGR_CONF", ""))
        armed = _Armed(budget(os.environ["MEMMGR_BUDGET"], **conf))
    except Exception as error:
        warnings.warn(f"memmgr: MEMMGR_BUDGET is ignored: {error}", stacklevel=2)
        return
    armed.arm()
