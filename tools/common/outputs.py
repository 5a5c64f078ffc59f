"""Output files of the verbs: paths are checked before the work begins, and files are put in place whole. Only this
module prints.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from memmgr.config.conf import check_file
from memmgr.tools.common.usage_error import UsageError


def check_output(path: Path, option: str, read: Iterable[Path] = ()) -> None:
    """Checks as far as possible that the file can be written, and that no input is lost by it.

    Raises `UsageError`: a folder, a file in no folder, or one of those that are read. `read`: files that the verb reads
    itself.
    """
    try:
        check_file(str(path), option)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if path.resolve() in [each.resolve() for each in read]:
        raise UsageError(f"{option}: {path} is what is read; name another file")


def write_whole(path: Path, text: str, errors: str = "strict") -> None:
    """Writes a temporary file beside it and renames that, so that a failure keeps the old file.

    Raises `OSError`: it cannot be written.
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
