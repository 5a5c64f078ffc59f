"""Finds the core library, compiles the torch-facing shim once per installed torch, and loads both.

The shim is compiled on the user's machine because it uses torch's C++ headers, whose binary interface changes with
every release; the result is kept in the user's cache folder under a name made of the sources' and torch's identity.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.machinery
import importlib.resources
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

from . import _cache


class NoShim(RuntimeError):
    """The shim cannot be had; the text says why and what to do about it."""


_loaded: ModuleType | None = None
_core: ctypes.CDLL | None = None


def core_library() -> Path:
    """The path of the core library.

    Raises:
        NoShim: it is not installed.
    """
    override = os.environ.get("MEMMGR_CORE_LIB")
    path = Path(override) if override else Path(str(importlib.resources.files("memmgr") / "libmemmgr_core.so"))
    if not path.is_file():
        raise NoShim(f"the core library is missing ({path.name} is not in the package): reinstall memmgr")
    return path


def _sources() -> Path:
    # In a checkout the sources beside us are the ones that are being edited.
    checkout = Path(__file__).resolve().parent.parent / "allocator" / "shim"
    if (checkout / "shim.cpp").is_file():
        return checkout
    installed = Path(str(importlib.resources.files("memmgr") / "_shim_src"))
    if (installed / "shim.cpp").is_file():
        return installed
    raise NoShim("the shim's sources are missing from the package: reinstall memmgr")


def include_folder(sources: Path) -> Path:
    """Where `memmgr/core.h` is: beside the sources when installed."""
    return sources if (sources / "memmgr" / "core.h").is_file() else sources.parent / "include"


def cxx_standard() -> str:
    """The one that torch's headers ask for."""
    minor = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    return "c++20" if minor >= (2, 12) else "c++17"


def compile_library(source: Path, target: Path, include: list[Path], libraries: list[str], what: str = "shim") -> None:
    """Compiles one translation unit against the installed torch; `target` appears whole or not at all.

    Raises:
        NoShim: no compiler, or an error; the first one is in the text.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if not compiler or not shutil.which(compiler.split()[0]):
        raise NoShim(
            f"no C++ compiler was found to make the {what} for torch {torch.__version__}: install one such as g++ (Debian: apt "
            "install g++ python3-dev), or a wheel of memmgr that carries its library for this release of torch"
        )
    torch_root = Path(torch.__file__).parent
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=target.parent)
    except OSError as error:
        raise NoShim(
            f"{error.filename} cannot be written ({error.strerror}): name a folder with {_cache.VARIABLE}"
        ) from None
    with scratch as folder, _cache.said(f"the {what} for torch {torch.__version__}", target.parent.parent):
        out = Path(folder) / target.name
        command = [
            *compiler.split(),
            f"-std={cxx_standard()}",
            "-O2",
            "-DNDEBUG",  # torch's headers assert against a release build otherwise
            "-fPIC",
            "-shared",
            "-fvisibility=hidden",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
            str(source),
            "-o",
            str(out),
            *(f"-I{path}" for path in (*include, torch_root / "include")),
            f"-L{torch_root / 'lib'}",
            *(f"-l{name}" for name in libraries),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise NoShim(f"compiling the {what} failed: {errors[0] if errors else 'no message'}")
        os.replace(out, target)


def load_core() -> ctypes.CDLL:
    """The core library, its symbols open to whatever is loaded later.

    Raises:
        NoShim: it is not installed.
    """
    global _core
    if _core is None:
        _core = ctypes.CDLL(str(core_library()), mode=ctypes.RTLD_GLOBAL)
    return _core


def _compile(sources: Path, target: Path) -> None:
    python_include = Path(sysconfig.get_paths()["include"])
    if not (python_include / "Python.h").is_file():
        raise NoShim("Python.h was not found: install Python's headers (Debian: apt install python3-dev)")
    include = [include_folder(sources), python_include]
    compile_library(sources / "shim.cpp", target, include, ["c10", "torch_cpu", "torch_python"])


def load() -> ModuleType:
    """The shim as a module, compiled if this torch has not been seen before.

    Raises:
        NoShim: no compiler, no headers, or a torch that the shim does not know.
    """
    from . import _cuda  # which needs this module to compile

    global _loaded
    if _loaded is not None:
        return _loaded
    core_library()
    sources = _sources()
    digest = hashlib.sha256()
    headers = (include_folder(sources) / "memmgr").glob("*.h")
    for file in sorted([*sources.glob("*.cpp"), *sources.glob("*.h"), *headers]):
        digest.update(file.name.encode() + file.read_bytes())
    digest.update(f"{torch.__version__} {sys.version_info[:2]} {sysconfig.get_platform()}".encode())
    target = _cache.place(f"shim-{digest.hexdigest()[:20]}", "_native.so")
    if not target.is_file():
        _compile(sources, target)
    load_core()  # the shim's calls into it are resolved through the global symbols of the process
    spec = importlib.util.spec_from_file_location(
        "memmgr._native", target, loader=importlib.machinery.ExtensionFileLoader("memmgr._native", str(target))
    )
    if spec is None or spec.loader is None:
        raise NoShim(f"cannot load {target}")
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.find_payload(torch.zeros(1))
    except ImportError as error:
        raise NoShim(str(error)) from error
    _cuda.attach(module)
    _loaded = module
    return module
