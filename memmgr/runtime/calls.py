"""Where a call of the model ends: without a backward that is the period (a token of `generate`, a batch of an evaluation)."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from memmgr.readers.patches import Patches

_MOST_CLASSES = 16


class Calls:
    """Finds the modules that a program calls without gradient, and says when a call of them has ended.

    A hook for all modules looks from the end of such a call to the beginning of the next, so that what is called inside of one
    costs nothing. An outermost call with gradient is a training's: then nothing looks any more. The classes that were found
    tell of their calls.

    Args:
        ended: told.

    Known limitations: a program that does not switch gradients off is taken for a training. Models that are first called
    after a `torch.compile` are not found.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._patches = Patches()
        self._known: set[type] = set()
        self._inside = threading.local()
        self._lock = threading.Lock()
        self._hook: Any = None
        self._done = False

    def install(self) -> None:
        """Begins to look."""
        self._patches.wrap(torch, "compile", self._compiled)
        self._look_for_another()

    def remove(self) -> None:
        """Leaves nothing behind."""
        self._done = True
        self._stop_looking()
        self._patches.undo()

    def _look_for_another(self) -> None:
        with self._lock:
            if self._hook is None and not self._done and len(self._known) < _MOST_CLASSES:
                self._hook = register_module_forward_pre_hook(self._look)

    def _stop_looking(self) -> None:
        with self._lock:
            if self._hook is not None:
                self._hook.remove()
                self._hook = None

    def _look(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or next(module.parameters(), None) is None:
            return  # a transform of the input, say
        if torch.is_grad_enabled():
            self._done = True
        elif type(module) not in self._known:
            if _called_by_another(module):
                return  # the budget was opened inside of a call
            self._known.add(type(module))
            self._patches.wrap(type(module), "__call__", self._told)
        self._stop_looking()

    def _compiled(self, original: Any) -> Any:
        """torch warns of global hooks; and what runs as one region has no order to plan."""

        @functools.wraps(original)
        def compile_(*args: Any, **kwargs: Any) -> Any:
            self._done = True
            self._stop_looking()
            return original(*args, **kwargs)

        return compile_

    def _told(self, original: Any) -> Any:
        @functools.wraps(original)
        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or torch.is_grad_enabled():
                return original(module, *args, **kwargs)
            here = self._inside.__dict__
            if here.get("inside"):
                return original(module, *args, **kwargs)
            here["inside"] = True
            try:
                result = original(module, *args, **kwargs)
            finally:
                here["inside"] = False
            self._ended()
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
