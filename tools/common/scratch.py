"""Folders for the temporary files of a verb, which go with its process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from memmgr.tools.common.interrupts import termination_unwinds

_OURS = re.compile(r"memmgr-(tune|bench)-\w+")


@contextlib.contextmanager
def scratch_folder(verb: str) -> Iterator[Path]:
    """Makes a folder, and removes it at the end of the block: at SIGTERM, too. Removes abandoned ones before.

    The process holds a lock on its folder, so the system itself says which ones are abandoned.
    """
    for path in abandoned():
        shutil.rmtree(path, ignore_errors=True)
    with termination_unwinds(), _locked_folder(verb) as made:
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)


def abandoned() -> Iterator[Path]:
    """This user's folders whose process has ended without removing them. Each is locked until the next is asked for."""
    for path in sorted(Path(tempfile.gettempdir()).glob("memmgr-*")):
        if not _OURS.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid() and _lock(lock, fcntl.LOCK_NB):
                    yield path
            finally:
                os.close(lock)


@contextlib.contextmanager
def _locked_folder(verb: str) -> Iterator[Path]:
    while True:
        made = Path(tempfile.mkdtemp(prefix=f"memmgr-{verb}-"))
        try:
            lock = os.open(made, os.O_DIRECTORY)
        except FileNotFoundError:  # another process has taken it for an abandoned one
            continue
        _lock(lock)
        if made.is_dir():
            break
        os.close(lock)
    try:
        yield made
    finally:
        os.close(lock)


def _lock(folder: int, more: int = 0) -> bool:
    """False: another process has it, or the file system has no locks, where no folder is taken for an abandoned one."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | more)
    except OSError:
        return False
    return True
