"""The script of a command line, found and compiled as `python` does."""

from __future__ import annotations

import argparse
import contextlib
import importlib.machinery
import importlib.util
import io
import os
import sys
import traceback
from types import CodeType, ModuleType

from memmgr.config.did_you_mean import meant
from memmgr.tools.common.usage_error import UsageError, cannot_read


def set_path(args: argparse.Namespace) -> None:
    """`sys.path[0]` becomes the script's folder, or the current one for a module. Under `python -P` it is neither."""
    if getattr(sys.flags, "safe_path", False):
        return
    if args.module:
        sys.path[0] = os.getcwd()
    elif os.path.isdir(args.script):
        sys.path[0] = os.path.realpath(args.script)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(args.script))


def load(args: argparse.Namespace) -> tuple[CodeType, ModuleType]:
    """The script's code, and the module `__main__` to run it in.

    Raises `UsageError`: there is no such script or module.
    """
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if args.module or os.path.isdir(args.script):
        spec = _find(args.script) if args.module else _find_in(args.script)
        assert spec.loader is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader)
        found = spec.loader.get_code(spec.name)
        assert found is not None
        main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
        main.__file__ = spec.origin
        return found, main
    path = os.path.join(os.getcwd(), args.script)
    try:
        with io.open_code(path) as file:
            source = file.read()
        edit = getattr(args, "edit", None)  # of the verb tune: another batch size
        code = compile(source if edit is None else edit(source, path), path, "exec", dont_inherit=True)
    except OSError as error:
        raise UsageError(f"{cannot_read(args.script, error)}{_meant_beside(path)}") from None
    except (SyntaxError, ValueError):
        traceback.print_exc(limit=0)
        raise SystemExit(1) from None
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    return code, main


def _find(name: str) -> importlib.machinery.ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(name + ".__main__")
    except (ImportError, ValueError) as error:
        raise UsageError(f"no module named {name}: {error}") from None
    if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
        raise UsageError(f"no module named {name} that can be run")
    return spec


def _meant_beside(path: str) -> str:
    """A script with almost this name, in the same folder."""
    folder, name = os.path.split(path)
    with contextlib.suppress(OSError):
        return meant(name, [found for found in os.listdir(folder) if found.endswith(".py")], 0.75)
    return ""


def _find_in(folder: str) -> importlib.machinery.ModuleSpec:
    spec = importlib.machinery.PathFinder.find_spec("__main__", [os.path.realpath(folder)])
    if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
        raise UsageError(f"there is no __main__.py in {folder}")
    return spec
