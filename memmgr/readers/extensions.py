"""Functions of C++ extensions: they take addresses and then allocate or write without an op (rules 3, 4 and 9)."""

from __future__ import annotations

import functools
import importlib.machinery
import mmap
import os
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .patches import Patches

if TYPE_CHECKING:
    from memmgr.native._pager import Pager

_SUFFIXES = tuple(importlib.machinery.EXTENSION_SUFFIXES)
_TORCHBIND = "__torch__.torch.classes."
# Special methods that a class of torch.classes may define, except those that Python calls on every object.
_SPECIAL = tuple(
    name
    for name in vars(torch._C.ScriptObject)
    if name.startswith("__")
    and name not in ("__doc__", "__module__", "__init__", "__getattr__", "__setattr__", "__hash__")
)
_REGISTERING = (
    b"pybind11",
    b"Library",
    b"aoti_torch_library",
    b"RegisterOperators",
    b"Dispatcher",
    b"CustomClass",
    b"CppNode",
)
"""Parts of names that a library with functions of pybind11, ops, TorchBind classes or autograd functions contains."""
_TORCH = os.path.dirname(os.path.realpath(torch.__file__)) + os.sep


class Extensions:
    """Guards C++ extensions that use torch's library outside of torch's kernels: functions bound by pybind11, from any
    caller; methods of TorchBind classes; ops and autograd functions that run above the pager's kernel. Packages loaded
    by `torch._inductor.aoti_load_package` count as foreign, though torch itself has bound them.

    Known limitations: functions that were bound otherwise (the C API, Cython, nanobind) are not found, nor is one that a
    pybind11 function hands out inside of an object, until the next budget opens. Tensors that C++ has kept from an earlier
    call are not among the arguments: `memmgr.pin` keeps them in memory.
    """

    def __init__(self, pager: Pager, patches: Patches) -> None:
        self._pager = pager
        self._patches = patches
        self._users: list[str] = []  # the libraries whose functions are guarded, or will be by `install`

    def libraries(self) -> list[str]:
        """The libraries whose functions `install` needs.

        The search takes as long as the rest of an opening, so it is part of the one search over all objects.
        """
        self._users = self._users_among(self._pager.libraries_that_use_torch())
        return self._users

    def install(self, found: list[Any]) -> None:
        """Guards the functions that were found.

        Args:
            found: functions of `libraries()`.
        """
        self._patches.wrap(importlib.machinery.ExtensionFileLoader, "exec_module", self._after)
        self._patches.wrap(torch._ops._Ops, "load_library", self._loaded)
        for owner in ("ScriptMethod", "ScriptClass"):
            self._patches.wrap(getattr(torch._C, owner), "__call__", self._torchbind)
        for name in _SPECIAL:
            self._patches.wrap(torch._C.ScriptObject, name, functools.partial(self._special, name))
        libraries = self._pager.libraries_that_use_torch()
        if users := self._users_among(libraries):
            self._guard(users, found if users == self._users else None)
        kinds = [kind for kind in vars(torch._C._aoti).values() if isinstance(kind, type)]
        functions = [getattr(value, "__func__", value) for kind in kinds for value in vars(kind).values()]
        self._pager.guard(functions, libraries)

    def remove(self) -> None:
        self._pager.unguard_all()

    def _after(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def exec_module(loader: Any, module: types.ModuleType) -> None:
            original(loader, module)
            file = vars(module).get("__file__")
            if isinstance(file, str) and file.endswith(_SUFFIXES):
                users = self._users_among(self._pager.libraries_that_use_torch())
                # A module that registers nothing may have loaded a library that does.
                if _real(file) in map(_real, users) or not set(users) <= set(self._users):
                    self._guard(users)

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

    def _special(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Special methods of TorchBind objects: Python calls them without a ScriptMethod (`copy.deepcopy` of packed weights)."""
        pager = self._pager

        @functools.wraps(original)
        def call(owner: Any, *args: Any) -> Any:
            # `__setstate__` constructs the object: before, it has no type.
            if name != "__setstate__" and not owner._type().qualified_name().startswith(_TORCHBIND):
                return original(owner, *args)
            if name in ("__copy__", "__deepcopy__") and owner._has_method("__getstate__"):
                # The copy is constructed from the state, so its tensors count as arguments.
                state = owner._get_method("__getstate__")()
                return pager.call_foreign(lambda owner, state: original(owner, *args), (owner, state), {})
            return pager.call_foreign(original, (owner, *args), {})

        return call

    def _users_among(self, libraries: list[str]) -> list[str]:
        """Those that may be called around the dispatcher, without torch's own and the pager's."""
        ours = _real(getattr(self._pager, "__file__", ""))
        reals = {path: _real(path) for path in libraries}
        return [p for p, real in reals.items() if not real.startswith(_TORCH) and real != ours and registers(real)]

    def _guard(self, libraries: list[str], functions: list[Any] | None = None) -> None:
        self._users = libraries
        # All functions that there are: those of modules, and those that a program has had made.
        self._pager.guard(self._pager.objects_of((), libraries) if functions is None else functions, libraries)
        self._pager.watch_foreign_calls()  # libraries of ops have no functions


_real = functools.cache(os.path.realpath)  # every budget asks


@functools.cache  # every budget asks
def registers(library: str) -> bool:
    """False: its code hands torch and Python no function to guard. Kernels that Inductor compiles are such libraries."""
    try:
        with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as code:
            return any(code.find(name) >= 0 for name in _REGISTERING)
    except (OSError, ValueError):  # not to be read, or empty
        return True
