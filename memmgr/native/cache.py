"""The folder for libraries that are compiled on this machine, and its text for users."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memmgr.config import cache_folders

VARIABLE = cache_folders.VARIABLE
_TURNS = "|/-\\"


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _temporary() -> Path | None:
    """A folder of this user alone: libraries are loaded from it. None: another user has made it."""
    folder = cache_folders.temporary()
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return folder if ours and _is_writable(folder) else None


def folder() -> tuple[Path, str | None]:
    """Where new libraries are kept, and why not where they should be (None: they are)."""
    wanted = cache_folders.wanted()
    if wanted is not None and (os.environ.get(VARIABLE) or _is_writable(wanted)):
        return wanted, None
    why = "this user has no home" if wanted is None else f"{wanted} cannot be written"
    return _temporary() or wanted or Path(tempfile.gettempdir()) / "memmgr", why


def place(*parts: str) -> Path:
    """The path of one library: where it is, or where it is to be made. A folder that cannot be written may have it already."""
    wanted = cache_folders.wanted()
    if wanted is not None and wanted.joinpath(*parts).is_file():
        return wanted.joinpath(*parts)
    return folder()[0].joinpath(*parts)


@contextmanager
def said(what: str, where: Path) -> Iterator[None]:
    """Says on stderr that something is being compiled, and how long it took; on a terminal something turns meanwhile."""
    begun = time.perf_counter()
    line = f"memmgr: compiling {what}, once, in one to two minutes"
    if not sys.stderr.isatty():
        print(f"{line} (kept in {where})", file=sys.stderr, flush=True)
        yield
        print(f"memmgr: compiled in {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
        return
    over = threading.Event()

    def turn() -> None:
        count = 0
        while not over.wait(0.1):
            count += 1
            seconds = time.perf_counter() - begun
            print(f"\r{line} {_TURNS[count % 4]} {seconds:.0f} s", end="", file=sys.stderr, flush=True)

    turning = threading.Thread(target=turn, name="memmgr-compiling", daemon=True)
    print(line, end="", file=sys.stderr, flush=True)
    turning.start()
    try:
        yield
    finally:
        over.set()
        turning.join()
        took = f"{time.perf_counter() - begun:.0f} s"
        print(f"\r{line} (kept in {where}): {took}", file=sys.stderr, flush=True)
