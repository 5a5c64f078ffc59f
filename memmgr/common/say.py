"""Lines of memmgr among those of the program."""

from __future__ import annotations

import shutil
import sys
import textwrap
import warnings
from types import FrameType

PREFIX = "memmgr: "
_NOT_THE_PROGRAM = ("", "memmgr", "torch", "importlib", "runpy", "_frozen_importlib", "_frozen_importlib_external")
"""Packages that are between the program's line and a warning; code that torch has generated has no name."""


def say(*lines: str) -> None:
    """Prints each line on stderr, after "memmgr: ". On a terminal a long line goes on in the next one, between two words.
    A progress bar of tqdm is cleared for them and drawn again below.
    """
    if not lines:
        return
    said = [PREFIX + line for line in lines]
    text = "\n".join(map(_wrapped, said) if getattr(sys.stderr, "isatty", bool)() else said)
    # Programs put a function without `write` in the place of the class, to have no bars.
    write = getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "write", None)
    if write is None:
        print(text, file=sys.stderr, flush=True)
    else:
        write(text, file=sys.stderr)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns, after "memmgr: ", at the line of the program that led here; where there is none, without a line."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_PROGRAM:
        frame = frame.f_back
    if frame is None:
        warnings.warn_explicit(PREFIX + text, category, sys.argv[0] or "python", 0)
    else:
        names, place = frame.f_globals, frame.f_code.co_filename
        known = names.setdefault("__warningregistry__", {})
        warnings.warn_explicit(PREFIX + text, category, place, frame.f_lineno, names.get("__name__"), known)


def _wrapped(line: str) -> str:
    width = max(40, shutil.get_terminal_size().columns)
    if len(line) < width:
        return line  # with its blanks, as in a command
    return textwrap.fill(
        line, width, subsequent_indent=" " * len(PREFIX), break_long_words=False, break_on_hyphens=False
    )
