"""Wrapping attributes of other modules for a while, and putting them back."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_MISSING = object()

Leave = Callable[[Any, BaseException | None], None]
"""Called at the end of a function that `Pager.around` wraps, with its result and its error, one of which is None."""


class Patches:
    """A set of attributes that were replaced. `undo` puts them back, newest first."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []
        self._finder: _AfterImport | None = None

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """`owner.name` becomes `make(owner.name)`; nothing happens where there is no such attribute."""
        original = getattr(owner, name, _MISSING)
        if original is _MISSING:
            return
        # An inherited attribute is shadowed, and the shadow is deleted at the end.
        before = vars(owner).get(name, _MISSING)
        wrapper = make(original)
        setattr(owner, name, wrapper)
        self._done.append((owner, name, before, wrapper))

    def hide(self, owner: Any, name: str) -> None:
        """`owner` has no attribute of its own by that name."""
        before = vars(owner).get(name, _MISSING)
        if before is not _MISSING:
            delattr(owner, name)
            self._done.append((owner, name, before, _MISSING))

    def when_imported(self, module: str, patch: Callable[[ModuleType], None]) -> None:
        """Calls `patch` with the module, now or right after its import."""
        loaded = sys.modules.get(module)
        if loaded is not None:
            patch(loaded)
            return
        if self._finder is None:
            self._finder = _AfterImport()
            sys.meta_path.insert(0, self._finder)
        self._finder.waiting.setdefault(module, []).append(patch)

    def undo(self) -> None:
        """Takes the patches back. A patch that other code has wrapped since stays: it calls through ours."""
        if self._finder is not None:
            if sys.meta_path:  # the interpreter is not ending
                sys.meta_path.remove(self._finder)
            self._finder = None
        for owner, name, before, wrapper in reversed(self._done):
            if vars(owner).get(name, _MISSING) is not wrapper:
                continue
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._done.clear()


class _AfterImport(importlib.abc.MetaPathFinder):
    """A finder that finds no module itself: it sees the modules that the other finders found."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[ModuleType], None]]] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        patches = self.waiting.pop(name, None)  # first: another like this one asks this one in turn
        if patches is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                _patch_after(spec.loader, patches)
                return spec
        self.waiting[name] = patches
        return None


def _patch_after(loader: Any, patches: list[Callable[[ModuleType], None]]) -> None:
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        for patch in patches:
            patch(module)

    loader.exec_module = exec_module
