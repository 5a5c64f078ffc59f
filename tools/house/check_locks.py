"""Compares guarded state with the locks that are held, in the whole pager (`make check-locks`).

    python tools/house/check_locks.py               # exit code 1 where a guarded member is read or written without its lock
    python tools/house/check_locks.py --unit FILE   # one other C++ file

clang's thread safety analysis reads GUARDED_BY, OF_GRAPH and REQUIRES (allocator/pager/base/lock.h), which g++ ignores. It runs
in clang-tidy, a wheel without a compiler. The pager is one unit, so one run of about ten seconds sees all of it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# clang-tidy refuses to run without a check of its own; this one is quick.
CHECKS = "-*,llvm-twine-local,clang-diagnostic-error,clang-diagnostic-thread-safety*"


def program() -> str | None:
    """The clang-tidy beside this Python, else the shell's; None: there is none."""
    return shutil.which("clang-tidy", path=str(Path(sys.executable).parent)) or shutil.which("clang-tidy")


def flags() -> list[str]:
    import torch

    include = Path(torch.__file__).parent / "include"
    system = [include, include / "torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    ours = [f"-I{ROOT / 'allocator' / folder}" for folder in ("include", "pager")]
    return [
        "-std=c++20",
        "-DNDEBUG",
        "-Wno-everything",
        "-Wthread-safety",
        *ours,
        *(f"-isystem{path}" for path in system),
    ]


def check(unit: Path) -> subprocess.CompletedProcess[str]:
    """Runs clang-tidy on a file. `stdout` has its errors, without the count of hidden warnings."""
    tidy = program()
    if not tidy:
        sys.exit("check_locks: there is no clang-tidy; install it with: pip install clang-tidy")
    command = [tidy, "--quiet", f"--checks={CHECKS}", "--warnings-as-errors=*", str(unit), "--", *flags()]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares guarded state with the locks that are held.")
    parser.add_argument("--unit", type=Path, default=ROOT / "allocator" / "pager" / "pager.cpp")
    done = check(parser.parse_args().unit)
    print(done.stdout or done.stderr if done.returncode else "guarded state is read and written under its locks")
    return min(done.returncode, 1)


if __name__ == "__main__":
    sys.exit(main())
