"""Files that a process writes, of which every process of a script has the name: each belongs to one at a time."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

_begun: set[tuple[int, Path]] = set()


def begin(path: Path) -> tuple[Path, int]:
    """Opens a file for this process alone. Returns its name and descriptor. The name contains this process's number if
    another process, probably its parent, writes to the file. A file that another budget of this process has begun is
    continued, one session after the other.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_APPEND, 0o666)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        return path, file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return begin(path.with_suffix(f".{os.getpid()}{path.suffix}"))
    except OSError:
        pass  # a file system without locks
    mine = os.getpid(), path.resolve()
    if mine not in _begun:
        os.ftruncate(file, 0)
    _begun.add(mine)
    return path, file
