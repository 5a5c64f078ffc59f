"""Functions of C++ extensions: they take addresses and then allocate or write without an op (rules 3, 4 and 9)."""

from __future__ import annotations

import functools
import importlib.machinery
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memmgr.native.pager import Pager

from .patches import Patches

_SUFFIXES = tuple(importlib.machinery.EXTENSION_SUFFIXES)
_TORCHBIND = "__torch__.torch.classes."
_TORCH = os.path.dirname(os.path.realpath(torch.__file__)) + os.sep


class Extensions:
    """Guards what C++ extensions that use torch's library do without torch's kernels: what pybind11 has bound, wherever it
    is called from; methods of TorchBind classes; ops and autograd functions that run above the pager's kernel. What
    `torch._inductor.aoti_load_package` loads is as foreign, though torch itself has bound it.

    Known limitations: functions that were bound otherwise (the C API, Cython, nanobind) are not found. Tensors that C++ has
    kept from an earlier call are not among the arguments: `memmgr.pin` keeps them in memory.
    """

    def __init__(self, pager: Pager, patches: Patches) -> None:
        self._pager = pager
        self._patches = patches

    def install(self) -> None:
        self._patches.wrap(importlib.machinery.ExtensionFileLoader, "exec_module", self._after)
        self._patches.wrap(torch._ops._Ops, "load_library", self._loaded)
        for owner in ("ScriptMethod", "ScriptClass"):
            self._patches.wrap(getattr(torch._C, owner), "__call__", self._torchbind)
        # Not those of sys.modules alone: torch's own loader of extensions puts nothing there.
        self._guard([module for module in self._pager.objects_of((types.ModuleType,)) if _file(module)])
        if any(not path.startswith(_TORCH) for path in self._users()):
            self._pager.watch_foreign_calls()  # libraries of ops have no module
        for kind in [kind for kind in vars(torch._C._aoti).values() if isinstance(kind, type)]:
            for function in _functions(kind, kind.__module__, set()):
                self._pager.guard(function)

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

    def _torchbind(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Calls of TorchBind's methods and constructors; methods of modules in TorchScript are ops, which are seen."""
        pager = self._pager

        @functools.wraps(original)
        def call(method: Any, *args: Any, **kwargs: Any) -> Any:
            owner = getattr(method, "owner", None)  # a constructor has none
            if owner is not None and not owner.qualified_name.startswith(_TORCHBIND):
                return original(method, *args, **kwargs)
            return pager.call_foreign(original, (method, *args), kwargs)

        return call

    def _users(self) -> set[str]:
        """The files of the loaded libraries that use torch's, but for the pager's."""
        ours = getattr(self._pager, "__file__", "")
        return {_real(path) for path in self._pager.libraries_that_use_torch()} - {_real(ours)}

    def _guard(self, modules: list[types.ModuleType]) -> None:
        theirs = [module for module in modules if (file := _file(module)) and not file.startswith(_TORCH)]
        if not theirs:
            return
        users = self._users()
        found = [module for module in theirs if _file(module) in users]
        for module in found:
            for function in _functions(module, module.__name__, set()):
                self._pager.guard(function)
        if found:
            self._pager.watch_foreign_calls()


def _file(module: types.ModuleType) -> str | None:
    file = vars(module).get("__file__")
    return _real(file) if isinstance(file, str) and file.endswith(_SUFFIXES) else None


_real = functools.cache(os.path.realpath)  # every budget asks for hundreds of them


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
