"""The pager's module, compiled once per installed torch. `_pager.pyi`, which `make stub` writes, has its types."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.resources
import importlib.util
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch.autograd.graph import _engine_run_backward

from memmgr.common.threads import sleeping_functions
from memmgr.config.torch_versions import unfit

from . import cache, cuda
from .build import NotBuiltError, compile_library, include_folder, load_core, package_sources, prebuilt

if TYPE_CHECKING:
    from ._pager import Pager

_loaded: Pager | None = None


def load() -> Pager:
    """The module: from the wheel, or compiled if this torch has not been seen before.

    Raises `NotBuiltError`: no compiler, no headers, or a torch that the pager does not know.
    """
    global _loaded
    if _loaded is not None:
        _loaded.use_plugin(cuda.address())
        return _loaded
    sources = package_sources("pager", "pager.cpp")
    include = include_folder(sources)
    digest = hashlib.sha256(f"{torch.__version__} {sys.version_info[:2]} {sysconfig.get_platform()}".encode())
    files = [file for file in sources.rglob("*") if file.suffix in (".cpp", ".h", ".def")]
    for file in sorted([*files, *(include / "memmgr").glob("*.h")]):
        digest.update(file.name.encode() + file.read_bytes())
    name = f"pager-{digest.hexdigest()[:20]}"
    target = cache.place(name, "_pager.so")
    load_core()
    with contextlib.suppress(ImportError):  # made on a machine that is too unlike this one
        _loaded = _open(prebuilt(name))
    if _loaded is None and target.is_file():
        try:
            _loaded = _open(target)
        except ImportError:  # a library built while a source was being edited
            target.unlink()
    if _loaded is None:
        if why := unfit(torch.__version__):
            raise NotBuiltError(why)
        python = Path(sysconfig.get_paths()["include"])
        if not (python / "Python.h").is_file():
            raise NotBuiltError("Python.h was not found: install Python's headers (Debian: apt install python3-dev)")
        api = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "api" / "include"  # c10d's headers want it
        compile_library(
            sources / "pager.cpp",
            target,
            [sources, include, python, api],
            ["c10", "torch_cpu", "torch_python"],
            what="pager",
        )
        try:
            _loaded = _open(target)
        except ImportError as error:
            raise NotBuiltError(str(error)) from error
    _loaded.use_plugin(cuda.address())
    return _loaded


def _open(library: Path) -> Pager:
    loader = importlib.machinery.ExtensionFileLoader("memmgr._pager", str(library))
    spec = importlib.util.spec_from_file_location("memmgr._pager", library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    pager = cast("Pager", module)
    for function in sleeping_functions():
        pager.sleeps_in(function)
    pager.sets_gradients_in(_engine_run_backward)
    return pager
