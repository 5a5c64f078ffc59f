"""Source lines: the ops that are recorded with the line that called them, and the lines in words.

The pager looks a line up when an op has made a large tensor: about a microsecond. By default it does so in some passes
only: the first two, those whose number is a power of two, and those in which the telemetry has a reader.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

import torch

from memmgr.common.constants import Lines

if TYPE_CHECKING:
    from memmgr.native._pager import Pager

MOST_LIKE = 4096
"""Ops and sizes whose lines are kept for tensors like theirs."""


@dataclass(frozen=True)
class SourceLine:
    """A line of Python, of the program or of a library that it uses.

    Attributes:
        file: shortened as in `show`.
        function: the qualified name of the function that the line is in.
        caller: of a library's line, the innermost line of the program that led there; None: the line is the program's.
    """

    file: str
    line: int
    function: str
    caller: SourceLine | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f", called from {self.caller}" if self.caller else "")

    @property
    def place(self) -> str:
        """The function that the line is in, for tensors whose module was not recorded. Modules of torch may have been between."""
        if self.function == "<module>":
            return f"(top level of {self.file})"
        return self.function if self.function.endswith(".forward") else f"{self.function}()"


@functools.cache
def skipped_folders() -> tuple[str, ...]:
    """The folders, and files, of functions that are not the program's: torch's, memmgr's, and decorators of Python's library."""
    library = sysconfig.get_paths()["stdlib"]
    of_python = [os.path.join(library, name) for name in ("contextlib.py", "functools.py", "threading.py", "runpy.py")]
    packages = [os.path.dirname(str(torch.__file__)), os.path.dirname(os.path.dirname(__file__))]
    return (*(package + os.sep for package in packages), *of_python)


@functools.cache
def library_folders() -> tuple[str, ...]:
    """The folders of Python's library and of installed packages. A line there has the program's own line beside it."""
    paths = sysconfig.get_paths()
    packages = [entry for entry in sys.path if os.path.basename(entry) in ("site-packages", "dist-packages")]
    folders = [*(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")), *packages]
    return tuple(folder + os.sep for folder in dict.fromkeys(folders))


def show(file: str) -> str:
    """A notebook's cell as `In[3]`; else the shorter of the paths from the current folder and from the entry of `sys.path`
    that has it; else as it is.
    """
    notebook = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    name_of = getattr(getattr(notebook, "compile", None), "format_code_name", None)  # IPython 7 has none
    if name_of is not None and (cell := name_of(file)):
        return str(cell[1])
    folders = [entry for entry in (os.getcwd(), *sys.path) if entry and file.startswith(entry.rstrip(os.sep) + os.sep)]
    return min((os.path.relpath(file, entry) for entry in folders), key=len, default=file)


def of_caller() -> SourceLine | None:
    """The line of the program that this thread is at."""
    return _line_from(sys._getframe(1), (*skipped_folders(), "<frozen"))


def _line_from(frame: FrameType | None, skipped: tuple[str, ...]) -> SourceLine | None:
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(skipped):
            of_library = code.co_filename.startswith(library_folders())
            caller = _line_from(frame.f_back, (*skipped, *library_folders())) if of_library else None
            name = getattr(code, "co_qualname", code.co_name)
            return SourceLine(show(code.co_filename), frame.f_lineno, name, caller)
        frame = frame.f_back
    return None


class TakenLines:
    """The passes in which lines are taken, and the lines by number.

    Args:
        native: the pager.
        always: lines are taken in all passes: the user asked for it.
    """

    def __init__(self, native: Pager, *, always: bool) -> None:
        self._native = native
        self._always = always
        self._known = KnownLines(native)

    def begin(self) -> None:
        """A budget opens: its first pass is recorded."""
        self._take(Lines.OF_ALL, log=True)

    def ended_pass(self, count: int, *, watched: bool) -> None:
        """A pass has ended; the next one has this number, counted from 0. `watched`: the telemetry has a reader."""
        on = self._always or watched or count & (count - 1) == 0
        self._take(Lines.OF_ALL if on else Lines.OF_MARKED_OPS, log=on)

    def end(self) -> None:
        """The budget closes."""
        self._take(Lines.OF_NONE, log=False)

    def _take(self, lines: Lines, *, log: bool) -> None:
        self._native.take_lines(lines=lines, log=log, folders=skipped_folders(), libraries=library_folders())

    def lines(self) -> Sequence[SourceLine | None]:
        """By number; None: the line is not known."""
        return self._known.all()


class KnownLines:
    """The lines that were recorded."""

    def __init__(self, native: Pager) -> None:
        self._native = native
        self._lines: list[SourceLine | None] = []
        self._like: dict[tuple[str | None, int], set[str]] = {}

    def all(self) -> Sequence[SourceLine | None]:
        """By number; None: the line is not known."""
        lines = [*self._lines]
        for row in self._native.source_lines()[len(lines) :]:  # a caller has a smaller number
            caller = lines[row["caller"]] if row["caller"] else None
            line = SourceLine(show(row["file"]), row["line"], row["function"], caller)
            lines.append(line if row["line"] else None)
        self._lines = lines  # in one go: the telemetry's thread reads, too
        return lines

    def place(self, number: int) -> str | None:
        """The function of a line."""
        line = self.all()[number] if number else None
        return line.place if line is not None else None

    def of(self, number: int, op: str | None, size: int) -> str | None:
        """The line of a tensor in words; where it was not recorded, the lines of those of its op and size."""
        like = self._like.setdefault((op, size), set()) if len(self._like) < MOST_LIKE else set()
        if number:
            line = str(self.all()[number])
            like.add(line)
            return line
        return " or ".join(sorted(like)) if 0 < len(like) <= 2 else None
