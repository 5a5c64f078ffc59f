"""Remove the libraries that memmgr has compiled on this machine, and the temporary folders of a killed tune or bench.

    memmgr clean --dry-run     lists them, with sizes
    memmgr clean               removes them

The libraries are in MEMMGR_CACHE, else in ~/.cache/memmgr, else in the folder for temporary files. The next
budget compiles its own again. A process that has loaded one is not disturbed, and one that is being compiled
is left alone. Nothing else in these folders is touched.

Exit code: 0; 1 when something could not be removed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from memmgr.config.cache_folders import existing
from memmgr.config.sizes import show_size
from memmgr.tools.common.scratch import abandoned

_OURS = re.compile(r"(pager|cuda)-[0-9a-f]{20}")
COMPILING_SECONDS = 1800.0
"""A scratch folder that is older is of a compiler that was killed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("--dry-run", action="store_true", help="list them, and remove nothing")


def run(args: argparse.Namespace) -> int:
    """Removes them, and says how much that was."""
    total = failed = count = 0
    caches = existing()
    for folder in chain(*map(_libraries, caches), abandoned()):
        size = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
        if not args.dry_run:
            try:
                shutil.rmtree(folder)
            except OSError as error:
                print(f"memmgr clean: {folder} stays: {error.strerror}", file=sys.stderr)
                failed += 1
                continue
        print(f"{show_size(size):>8}  {folder}")
        total, count = total + size, count + 1
    for cache in caches if not args.dry_run else ():
        if cache.is_dir() and not any(cache.iterdir()):
            cache.rmdir()
    print(f"{'would remove' if args.dry_run else 'removed'} {count} folder{'s' * (count != 1)}, {show_size(total)}")
    return 1 if failed else 0


def _libraries(folder: Path) -> Iterator[Path]:
    """The folders of libraries in this one, save where a compiler is at work."""
    for path in sorted(folder.iterdir() if folder.is_dir() else ()):
        if not _OURS.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
            continue
        scratch = [inner for inner in path.iterdir() if inner.is_dir()]
        if all(time.time() - inner.stat().st_mtime > COMPILING_SECONDS for inner in scratch):
            yield path
