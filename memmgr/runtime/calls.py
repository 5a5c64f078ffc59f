"""Where a call of the model ends: without a backward that is the period (a token of `generate`, a batch of an evaluation)."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from memmgr.readers.patches import Patches

_MOST_CLASSES = 16
_LOOKED_AFTER = 8  # calls, each; then after 16, 32, 64, ...: to look is to change a class that all modules have


class Calls:
    """Finds the modules that a program calls without gradient, and says when a call of them has ended.

    `Module.__call__` is another function from the end of such a call to the beginning of the next, so that what is called inside
    of one costs nothing (a global hook would make compiled modules warn). An outermost call with gradient is a training's:
    then nothing looks any more. The classes that were found tell of their calls.

    Args:
        ended: told.

    Known limitations: a program that does not switch gradients off is taken for a training. Compiled modules, and others that
    have a `__call__` of their own, are not found.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._patches = Patches()
        self._looking = Patches()
        self._known: set[type] = set()
        self._inside = threading.local()
        self._lock = threading.Lock()
        self._count = 0
        self._looks = False
        self._done = False

    def install(self) -> None:
        """Begins to look."""
        self._look_for_another()

    def remove(self) -> None:
        """Leaves nothing behind."""
        self._done = True
        self._stop_looking()
        self._patches.undo()

    def _look_for_another(self) -> None:
        with self._lock:
            if not self._looks and not self._done and len(self._known) < _MOST_CLASSES:
                self._looks = True
                self._looking.wrap(torch.nn.Module, "__call__", self._first)

    def _stop_looking(self) -> None:
        with self._lock:
            self._looks = False
            self._looking.undo()

    def _first(self, original: Any) -> Any:
        @functools.wraps(original)
        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and self._looks and self._found(module):
                return type(module).__call__(module, *args, **kwargs)
            return original(module, *args, **kwargs)

        return call

    def _found(self, module: torch.nn.Module) -> bool:
        """Whether its class tells of its calls, from now on."""
        if next(module.parameters(), None) is None:
            return False  # a transform of the input, say
        if torch.is_grad_enabled():
            self._done = True
        elif _called_by_another(module):
            return False  # the budget was opened inside of a call
        self._stop_looking()
        if self._done or type(module) in self._known:
            return False
        self._known.add(type(module))
        self._patches.wrap(type(module), "__call__", self._told)
        return True

    def _told(self, original: Any) -> Any:
        @functools.wraps(original)
        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or torch.is_grad_enabled():
                return original(module, *args, **kwargs)
            here = self._inside.__dict__
            if here.get("inside"):
                return original(module, *args, **kwargs)
            if self._looks:
                self._stop_looking()
            here["inside"] = True
            try:
                result = original(module, *args, **kwargs)
            finally:
                here["inside"] = False
            self._ended()
            self._count += 1
            if self._count <= _LOOKED_AFTER or self._count.bit_count() == 1:
                self._look_for_another()
            return result

        return call


def _called_by_another(module: torch.nn.Module) -> bool:
    """Whether a call of another module is under way in this thread."""
    code = torch.nn.Module._call_impl.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get("self") is not module:
            return True
        frame = frame.f_back
    return False
