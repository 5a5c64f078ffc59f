"""Finds the core library, and compiles the libraries that use torch's C++ headers for the installed torch.

Their binary interface changes with every release of torch. A wheel carries the libraries for some releases; for another one
it is compiled on the user's machine, and kept in the user's cache folder. Either is found by a name made of the sources' and
torch's identity.
"""

from __future__ import annotations

import ctypes
import importlib.resources
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from . import cache


class NotBuiltError(RuntimeError):
    """A native part cannot be built or found; the text gives the reason and a remedy."""


_core: ctypes.CDLL | None = None


def core_library() -> Path:
    """The path of the core library. Raises `NotBuiltError`: it is not installed."""
    override = os.environ.get("MEMMGR_CORE_LIB")
    path = Path(override) if override else Path(str(importlib.resources.files("memmgr") / "libmemmgr_core.so"))
    if not path.is_file():
        raise NotBuiltError(f"the core library is missing ({path.name} is not in the package): reinstall memmgr")
    return path


def package_sources(name: str, first: str) -> Path:
    """The folder of sources `name`: in a checkout the ones that are being edited, else those in the package.

    Raises `NotBuiltError`: they are not installed. `first`: a file that lies there.
    """
    checkout = Path(__file__).resolve().parents[2] / "allocator" / name
    installed = Path(str(importlib.resources.files("memmgr") / f"_{name}_src"))
    for folder in (checkout, installed):
        if (folder / first).is_file():
            return folder
    raise NotBuiltError(f"sources ({name}) are missing from the package: reinstall memmgr")


def prebuilt(name: str) -> Path:
    """Where a wheel that carries the library `name` has it; `tools/house/prebuilt.py` puts it there."""
    return Path(str(importlib.resources.files("memmgr") / "_prebuilt" / f"{name}.so"))


def include_folder(sources: Path) -> Path:
    """Where `memmgr/core.h` is for these sources."""
    beside = sources.parent / "include"
    return beside if (beside / "memmgr" / "core.h").is_file() else sources.parent / "_include"


def cxx_standard() -> str:
    """The one that torch's headers ask for."""
    minor = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    return "c++20" if minor >= (2, 12) else "c++17"


def compile_library(source: Path, target: Path, include: list[Path], libraries: list[str], what: str) -> None:
    """Compiles one translation unit against the installed torch; `target` appears whole or not at all.

    Raises `NotBuiltError`: no compiler, or an error; the first one is in the text.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if not compiler or not shutil.which(compiler.split()[0]):
        raise NotBuiltError(
            f"no C++ compiler was found to make the {what} for torch {torch.__version__}: install one such as g++ (Debian: apt "
            "install g++ python3-dev), or a wheel of memmgr that carries its library for this release of torch"
        )
    torch_root = Path(torch.__file__).parent
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=target.parent)
    except OSError as error:
        raise NotBuiltError(
            f"{error.filename} cannot be written ({error.strerror}): name a folder with {cache.VARIABLE}"
        ) from None
    with scratch as folder, cache.said(f"the {what} for torch {torch.__version__}", target.parent.parent):
        out = Path(folder) / target.name
        command = [
            *compiler.split(),
            f"-std={cxx_standard()}",
            "-O2",
            "-DNDEBUG",  # torch's headers assert against a release build otherwise
            "-fPIC",
            "-shared",
            "-fvisibility=hidden",
            "-fno-plt",  # calls of torch go straight
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
            raise NotBuiltError(f"compiling the {what} failed: {errors[0] if errors else 'no message'}")
        os.replace(out, target)


def load_core() -> ctypes.CDLL:
    """The core library, its symbols open to libraries that are loaded later.

    Raises `NotBuiltError`: it is not installed.
    """
    global _core
    if _core is None:
        _core = ctypes.CDLL(str(core_library()), mode=ctypes.RTLD_GLOBAL)
    return _core
