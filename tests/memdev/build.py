"""Compiles memdev and other libraries for the installed torch into ``build/tests``: once per content of their sources."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[1] / "build" / "tests"


def library() -> Path:
    """memdev."""
    return torch_library(
        "memdev",
        HERE / "memdev.cpp",
        sorted(HERE.glob("*.h")),
        ["-fvisibility=hidden", f"-I{sysconfig.get_path('include')}", "-ltorch_python"],
    )


def torch_library(name: str, source: Path, headers: Sequence[Path], flags: Sequence[str]) -> Path:
    """``build/tests/<name>-<hash>.so``; the hash is of the sources, torch's version and the command."""
    root = Path(torch.__file__).parent
    minor = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    assert compiler is not None, "no C++ compiler"
    command = [compiler, "-std=c++20" if minor >= (2, 12) else "-std=c++17", *"-O1 -g0 -DNDEBUG -fPIC -shared".split()]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}", str(source)]
    command += [f"-I{root / 'include'}", f"-L{root / 'lib'}", *flags, "-lc10", "-ltorch_cpu", "-ldl"]
    digest = hashlib.sha256(f"{torch.__version__} {command}".encode())
    for path in [source, *headers]:
        digest.update(path.name.encode() + path.read_bytes())
    target = FOLDER / f"{name}-{digest.hexdigest()[:16]}.so"
    if target.exists():
        return target
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes side by side compile it once
        if not target.exists():
            for old in FOLDER.glob(f"{name}-*.so"):
                old.unlink(missing_ok=True)
            part = FOLDER / f"{name}.part"
            done = subprocess.run([*command, "-o", str(part)], capture_output=True, text=True)
            assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
            part.rename(target)
    return target
