"""Names of modules and of the tensors of models and optimizers: one name for each.

A module's name is the path from the outermost module that contains it: `GPT.blocks.1.ff`. A parameter's name leaves the
outermost class out, as `named_parameters` does, unless several models have parameters: `blocks.1.ff.0.weight`.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memmgr.common.constants import Purpose

from .roles import plain
from .source_lines import SourceLine, show

if TYPE_CHECKING:
    from memmgr.native._pager import Pager, StorageInfo


@dataclass(frozen=True)
class Named:
    """A tensor of a model or an optimizer.

    Attributes:
        purpose: its use; a buffer's is OTHER.
        name: `blocks.1.ff.0.weight`, `exp_avg of blocks.1.ff.0.weight`, `gradient of blocks.1.ff.0.weight`.
        module: the name of the module that has the parameter; empty: none has.
    """

    purpose: Purpose
    name: str
    module: str


class ModulePaths:
    """The names of modules, from the containers among them.

    Args:
        modules: all modules of the process, or those that are known.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        known = list(modules)
        self._parents: dict[int, tuple[torch.nn.Module, str]] = {}
        for module in known:
            for name, child in list(module.__dict__.get("_modules", {}).items()):
                if child is not None and child is not module:
                    self._parents.setdefault(id(child), (module, name))
        self._roots: dict[int, str] = {}
        used: dict[str, int] = {}
        for module in known:
            if id(module) in self._parents:
                continue
            name = type(module).__name__
            used[name] = count = used.get(name, 0) + 1
            self._roots[id(module)] = name if count == 1 else f"{name}#{count}"

    def path(self, module: torch.nn.Module) -> tuple[str, str]:
        """(name of the outermost container, path from there; empty for the outermost one itself)."""
        parts: list[str] = []
        seen = {id(module)}
        while id(module) in self._parents:
            module, name = self._parents[id(module)]
            if id(module) in seen:
                break  # modules that contain one another
            seen.add(id(module))
            parts.append(name)
        return self._roots.get(id(module), type(module).__name__), ".".join(reversed(parts))

    def name(self, module: torch.nn.Module) -> str:
        """Both as one: `GPT.blocks.1.ff`."""
        return ".".join(filter(None, self.path(module)))


class ModulesOfLines:
    """The modules whose methods have a source line.

    Args:
        modules: all that live.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._modules = list(modules)
        self._names: dict[tuple[str, str], str | None] = {}

    def name(self, line: SourceLine) -> str | None:
        """`GPT.head`; where several modules run the line `GPT.blocks.*`; None: the line is in no method of a module."""
        key = line.file, line.function
        if key not in self._names:
            has = {kind: _has_method(kind, line) for kind in set(map(type, self._modules))}
            found = [module for module in self._modules if has[type(module)]]
            paths = ModulePaths(self._modules) if found else None
            self._names[key] = None if paths is None else _common([paths.name(module) for module in found])
        return self._names[key]


def _has_method(kind: type, line: SourceLine) -> bool:
    method = inspect.getattr_static(kind, line.function.rpartition(".")[2], None)
    code = getattr(inspect.unwrap(method) if callable(method) else None, "__code__", None)
    name = getattr(code, "co_qualname", None)  # Python 3.10 has none
    return code is not None and name == line.function and show(code.co_filename) == line.file


def _common(names: Sequence[str]) -> str:
    """One name for all, with a star where they differ."""
    parts = [name.split(".") for name in names]
    if len({len(each) for each in parts}) > 1:
        return f"{names[0]} and {len(names) - 1} more"
    return ".".join(each[0] if len(set(each)) == 1 else "*" for each in zip(*parts, strict=True))


def named_tensors(modules: Iterable[Any], optimizers: Iterable[Any]) -> Iterator[tuple[Named, torch.Tensor]]:
    """Parameters, buffers and optimizer states with their names; not the gradients.

    A tensor that several modules have is named by the first one.
    """
    modules = list(modules)
    paths = ModulePaths(modules)
    roots = {paths.path(module)[0] for module in modules if any(_own(module, "_parameters"))}
    names: dict[int, tuple[str, str]] = {}
    for module in modules:
        root, path = paths.path(module)
        prefix = [root, path] if len(roots) > 1 else [path]
        for table, purpose in (("_parameters", Purpose.PARAMETERS), ("_buffers", Purpose.OTHER)):
            for key, tensor in _own(module, table):
                if id(tensor) not in names:
                    name = ".".join(filter(None, [*prefix, key]))
                    names[id(tensor)] = name, paths.name(module)
                    yield Named(purpose, name, paths.name(module)), tensor
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        number = 0
        for group in list(getattr(optimizer, "param_groups", [])):
            for parameter in list(group["params"]):
                name, module = names.get(id(parameter), (f"parameter {number} of {kind}", ""))
                if id(parameter) not in names:
                    yield Named(Purpose.PARAMETERS, name, module), parameter
                number += 1
                for key, state in _states(optimizer.state.get(parameter)):
                    yield Named(Purpose.OPTIMIZER_STATES, f"{key} of {name}", module), state


def by_storage(native: Pager, owners: Iterable[Any]) -> dict[int, Named]:
    """The names by the address of the storage, gradients included.

    Args:
        native: the pager.
        owners: modules and optimizers.
    """
    optimizers = [owner for owner in owners if issubclass(type(owner), torch.optim.Optimizer)]
    modules = [owner for owner in owners if not issubclass(type(owner), torch.optim.Optimizer)]
    found: dict[int, Named] = {}

    def put(info: StorageInfo | None, named: Named) -> None:
        if info is not None:
            found.setdefault(info["storage"], named)

    for named, tensor in named_tensors(modules, optimizers):
        for part in plain(tensor):
            put(native.storage_info(part), named)
            if named.purpose is Purpose.PARAMETERS:
                gradient = Named(Purpose.GRADIENTS, f"gradient of {named.name}", named.module)
                put(native.gradient_info(part), gradient)
    return found


def _own(module: Any, table: str) -> list[tuple[str, torch.Tensor]]:
    items = list(module.__dict__.get(table, {}).items())
    return [(name, tensor) for name, tensor in items if isinstance(tensor, torch.Tensor)]


def _states(state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in list(state.items()) if isinstance(state, dict) else ():
        for each in value if isinstance(value, list) else (value,):  # LBFGS keeps lists
            if isinstance(each, torch.Tensor):
                yield str(key), each


class LivingPaths:
    """`ModulePaths` of the modules that live, found again where an unknown module asks for its name."""

    def __init__(self, find: Any) -> None:
        self._find = find
        self._names: dict[int, tuple[weakref.ref[torch.nn.Module], str]] = {}

    def name(self, module: torch.nn.Module) -> str:
        """`GPT.blocks.1.ff`: the same for the life of the module."""
        known = self._names.get(id(module))
        if known is None or known[0]() is not module:
            modules = self._find((torch.nn.Module,))
            paths = ModulePaths(modules)
            for each in modules:
                there = self._names.get(id(each))
                if there is None or there[0]() is not each:
                    self._names[id(each)] = weakref.ref(each), paths.name(each)
            known = self._names.get(id(module))
        return known[1] if known is not None else type(module).__name__
