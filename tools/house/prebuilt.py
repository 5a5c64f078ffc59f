"""Puts the pager, compiled for the torch of each named Python, into a wheel.

    python tools/house/prebuilt.py WHEEL FOLDER PYTHON ...

Each PYTHON has torch and memmgr's other dependencies (psutil, numpy); the pager is made for its releases of both. The
wheel, with these libraries in `memmgr/_prebuilt`, lies in FOLDER afterwards. For any other release it compiles at first use.
Needs the package `wheel`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

LOAD = """
import sys, torch
from memmgr.native import binding
binding.load()
print(f"{torch.__version__}, Python {sys.version_info[0]}.{sys.version_info[1]}")
"""


def compile_for(python: str, package: Path, cache: Path) -> tuple[Path, str]:
    """The pager for this Python's torch, and the releases of both; `package`: the unpacked wheel."""
    env = {**os.environ, "PYTHONPATH": str(package), "MEMMGR_CACHE": str(cache), "MEMMGR_INSTALL": "0"}
    done = subprocess.run([python, "-P", "-c", LOAD], env=env, capture_output=True, text=True)
    made = list(cache.glob("pager-*/_pager.so"))
    if done.returncode != 0 or len(made) != 1:
        sys.exit(f"{python}: no pager was made for its torch:\n{done.stderr[-2000:]}")
    return made[0], f"torch {done.stdout.strip()}"


def main(wheel: str, folder: str, *pythons: str) -> None:
    """Unpacks, compiles, packs."""
    tool = [sys.executable, "-m", "wheel"]
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([*tool, "unpack", "--dest", scratch, wheel], check=True, stdout=subprocess.DEVNULL)
        (package,) = Path(scratch).iterdir()
        releases = []
        for number, python in enumerate(pythons):
            library, release = compile_for(python, package, Path(scratch) / f"cache{number}")
            target = package / "memmgr" / "_prebuilt" / f"{library.parent.name}.so"
            target.parent.mkdir(exist_ok=True)
            shutil.copy(library, target)
            releases.append(release)
        Path(folder).mkdir(parents=True, exist_ok=True)
        subprocess.run([*tool, "pack", "--dest-dir", folder, str(package)], check=True, stdout=subprocess.DEVNULL)
    print(f"the wheel needs no compiler with {'; '.join(releases)}. With another release it compiles at its first use.")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
