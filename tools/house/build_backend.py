"""scikit-build-core's build, which begins by looking for a compiler: without one it ends in a sentence of ours, not in CMake's.

pip puts a frame of its own around the output of a build ("This error originates from a subprocess, and is likely not a
problem with pip"). That can't be helped; the earliest hook makes it shortest, and the sentence the only line inside.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
from collections.abc import Callable
from typing import Any

try:
    from scikit_build_core import build
except ModuleNotFoundError:
    raise SystemExit(
        "memmgr is built with scikit-build-core, which is not installed: pip install scikit-build-core cmake ninja, or leave "
        "--no-build-isolation out"
    ) from None

COMPILERS = ("c++", "CC", "g++", "clang++", "icpx", "icx", "xlC", "aCC")  # that CMake tries
NAMED = ("CMAKE_ARGS", "SKBUILD_CMAKE_ARGS", "CMAKE_TOOLCHAIN_FILE")  # may name one that is nowhere on the PATH


def _look_for_a_compiler() -> None:
    first = (shlex.split(os.environ.get("CXX", "")) or [""])[0]
    if any(map(shutil.which, [first] if first else COMPILERS)) or any(map(os.environ.get, NAMED)):
        return
    found = f"CXX={first} is none" if first else "there is none on the PATH"
    raise SystemExit(
        f"memmgr cannot be built without a C++20 compiler, and {found}. Install one (Debian and Ubuntu: apt install g++; Fedora: "
        "dnf install gcc-c++; conda: conda install gxx), set CXX, or install a wheel that `make wheel` has made elsewhere."
    )


def _checked(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _look_for_a_compiler()
        return hook(*args, **kwargs)

    return checked


__all__ = build.__all__
for _name in __all__:  # an sdist needs no compiler
    _hook = getattr(build, _name)
    globals()[_name] = _hook if _name.endswith("sdist") else _checked(_hook)
