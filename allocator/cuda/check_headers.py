#!/usr/bin/env python3
"""Compiles the sources that include torch's headers (CUDA's allocator and the pager) against the headers of several
releases of torch.

    python allocator/cuda/check_headers.py 2.11.0 2.13.0

Nothing is linked and no GPU is needed. The headers are taken out of the wheels (a release with CUDA is some 500 MB; only
`include/` is kept, in build/headers). `installed` stands for the torch of this Python, and a folder for headers that are
there already. CUDA's own headers come from the packages nvidia-cuda-runtime and nvidia-cuda-crt.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ALLOCATOR = ROOT / "allocator"
UNITS = {"CUDA's allocator": ALLOCATOR / "cuda" / "plugin.cpp", "pager": ALLOCATOR / "pager" / "pager.cpp"}
KEPT = ROOT / "build" / "headers"
# A header that a build without CUDA leaves out; this is all of its text in a build with it.
MACROS = Path("c10/cuda/impl/cuda_cmake_macros.h")
MACROS_TEXT = "#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n"


def compiler() -> str | None:
    """The C++ compiler, or None."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")


def cuda_headers() -> Path | None:
    """A folder with CUDA's runtime headers and the headers that they include, or None."""
    places = [Path(place) for place in (*site.getsitepackages(), sysconfig.get_paths()["purelib"])]
    candidates = [place / "nvidia" / name / "include" for place in places for name in ("cu13", "cuda_runtime")]
    candidates += [place / "triton" / "backends" / "nvidia" / "include" for place in places]
    candidates += [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates.append(Path("/usr/local/cuda/include"))
    for folder in candidates:
        if (folder / "cuda_runtime_api.h").is_file() and (folder / "crt" / "host_config.h").is_file():
            return folder
    return None


def torch_version(include: Path) -> tuple[int, int]:
    """The version of the torch that has these headers."""
    for name in ("torch/headeronly/version.h", "torch/csrc/api/include/torch/version.h"):
        if (include / name).is_file():
            text = (include / name).read_text()
            found = [re.search(rf"#define TORCH_VERSION_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR")]
            if all(found):
                major, minor = (int(match[1]) for match in found if match)
                return major, minor
    raise SystemExit(f"{include} has no headers of torch")


def fetch(version: str) -> Path:
    """The include folder of a release, out of its wheel."""
    target = KEPT / f"torch-{version}" / "include"
    if target.is_dir():
        return target
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        subprocess.run([*command, "--dest", folder, f"torch=={version}"], check=True)
        (wheel,) = Path(folder).glob("torch-*.whl")
        partial = target.parent.with_suffix(".part")
        shutil.rmtree(partial, ignore_errors=True)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial, [n for n in archive.namelist() if n.startswith("torch/include/")])
    target.parent.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(target.parent, ignore_errors=True)
    (partial / "torch").rename(target.parent)
    shutil.rmtree(partial)
    return target


def check(source: Path, include: Path, cuda: Path, extra: Sequence[str] = (), standard: str = "") -> str:
    """Compiles one unit against these headers; the errors and warnings in our own files, or an empty string. `standard`: empty
    stands for the one that these headers ask for.
    """
    standard = standard or ("c++20" if torch_version(include) >= (2, 12) else "c++17")
    with tempfile.TemporaryDirectory() as stub:
        if not (include / MACROS).is_file():
            (Path(stub) / MACROS).parent.mkdir(parents=True)
            (Path(stub) / MACROS).write_text(MACROS_TEXT)
        api = include / "torch" / "csrc" / "api" / "include"  # c10d's headers want it
        outside = [include, api, Path(stub), cuda, Path(sysconfig.get_paths()["include"])]
        command = [compiler() or "g++", f"-std={standard}", "-fsyntax-only", "-DNDEBUG", "-Wall", "-Wextra"]
        command += ["-Wno-unused-parameter", "-Wno-missing-field-initializers", "-Wno-invalid-offsetof", *extra]
        command += ["-I", str(ALLOCATOR / "include"), "-I", str(source.parent)]
        command += [part for folder in outside for part in ("-isystem", str(folder))]
        done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    ours = [line for line in done.stderr.splitlines() if re.search(r"(error|warning):", line)]
    return "\n".join(ours) or (done.stderr if done.returncode else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "torch", nargs="*", default=["installed"], help="a release, a folder with headers, or `installed`"
    )
    args = parser.parse_args()
    cuda = cuda_headers()
    if cuda is None or compiler() is None:
        print("needs a C++ compiler and `pip install nvidia-cuda-runtime nvidia-cuda-crt`", file=sys.stderr)
        return 2
    good = True
    for name in args.torch:
        if name == "installed":
            import torch

            include = Path(torch.__file__).parent / "include"
        else:
            include = Path(name) if Path(name).is_dir() else fetch(name)
        for unit, source in UNITS.items():
            wrong = check(source, include, cuda)
            good = good and not wrong
            print(f"torch {'.'.join(map(str, torch_version(include)))}, {unit}: {wrong or 'ok'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
