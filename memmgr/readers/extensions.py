"""Functions of C++ extensions: they take addresses and then allocate or write without an op (rules 3, 4 and 9)."""

from __future__ import annotations

import functools
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memmgr.native.pager import Pager

from .patches import Patches

_OURS = frozenset({"memmgr._pager", "memmgr._native"})
_SUFFIXES = tuple(importlib.machinery.EXTENSION_SUFFIXES)
_TORCH = os.path.dirname(os.path.realpath(torch.__file__)) + os.sep


class Extensions:
    """Guards what pybind11 has bound in extension modules that use torch's library, wherever it is called from.

    Known limitations: functions that were bound otherwise (the C API, Cython, nanobind) are not found.
    """

    def __init__(self, pager: Pager, patches: Patches) -> None:
        self._pager = pager
        self._patches = patches

    def install(self) -> None:
        self._patches.wrap(importlib.machinery.ExtensionFileLoader, "exec_module", self._after)
        self._patches.wrap(torch._ops._Ops, "load_library", self._loaded)
        loaded = [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
        self._guard([module for module in loaded if _file(module)])

    def remove(self) -> None:
        self._pager.unguard_all()

    def _after(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def exec_module(loader: Any, module: types.ModuleType) -> None:
            original(loader, module)
            self._guard([module])

        return exec_module

    def _loaded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load_library(*args: Any) -> Any:
            result = original(*args)
            self._pager.watch_foreign_calls()
            return result

        return load_library

    def _guard(self, modules: list[types.ModuleType]) -> None:
        theirs = [module for module in modules if (file := _file(module)) and not file.startswith(_TORCH)]
        if not theirs:
            return
        users = {os.path.realpath(path) for path in self._pager.libraries_that_use_torch()}
        found = [module for module in theirs if _file(module) in users and module.__name__ not in _OURS]
        for module in found:
            for function in _functions(module, module.__name__, set()):
                self._pager.guard(function)
        if found:
            self._pager.watch_foreign_calls()


def _file(module: types.ModuleType) -> str | None:
    file = vars(module).get("__file__")
    return os.path.realpath(file) if isinstance(file, str) and file.endswith(_SUFFIXES) else None


def _functions(owner: Any, name: str, met: set[int]) -> Iterator[Any]:
    """What a module and its classes bind to C functions."""
    if id(owner) in met:
        return
    met.add(id(owner))
    for value in list(vars(owner).values()):
        for function in (value, *(getattr(value, part, None) for part in ("__func__", "fget", "fset"))):
            if isinstance(function, types.BuiltinFunctionType):
                yield function
        inner = isinstance(value, types.ModuleType) and value.__name__.startswith(name + ".")
        if inner or (isinstance(value, type) and value.__module__ == name):
            yield from _functions(value, name, met)
