"""What a verb writes: files are looked at before the work begins and put in place whole, and only it prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from memmgr.tools.common.usage_error import UsageError


def check_output(path: Path, option: str, read: Iterable[Path] = ()) -> None:
    """Can it be written, as far as one can say, and is nothing lost by it?

    Args:
        path: the file.
        option: the word that named it.
        read: what the verb reads itself.

    Raises:
        UsageError: a folder, a file in no folder, or one of those that are read.
    """
    if not path.name or path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"{option}: {str(path)!r} is not a file in a folder that exists")
    if path.resolve() in [each.resolve() for each in read]:
        raise UsageError(f"{option}: {path} is what is read; name another file")


def write_whole(path: Path, text: str, errors: str = "strict") -> None:
    """Writes it beside and puts it in place: what was there stays where this fails.

    Raises:
        OSError: it cannot be written.
    """
    if path.exists() and not path.is_file():  # /dev/stdout
        path.write_text(text, encoding="utf-8", errors=errors)
        return
    beside = path.with_name(path.name + ".part")
    try:
        beside.write_text(text, encoding="utf-8", errors=errors)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


@contextmanager
def quiet_output() -> Iterator[None]:
    """HiGHS prints lines of its own to the process's output now and then, and --json promises one object."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
