"""A bar on a terminal while the first passes measure the need of a run."""

from __future__ import annotations

import sys
from typing import Any


class MeasuringBar:
    """Shows how many passes have been measured, on stderr. Nothing is shown where that is no terminal, or without rich.

    It has no thread, and leaves the program's streams as they are: it is drawn again at the end of each pass.

    Args:
        shown: False where the budget is quiet.
        passes: that are expected; the bar grows where it takes more.
    """

    def __init__(self, shown: bool, passes: int) -> None:
        self._shown = shown and sys.stderr.isatty()
        self._passes = passes
        self._bar: Any = None
        self._task: Any = None

    def passed(self, count: int) -> None:
        """So many passes have been measured."""
        if not self._shown:
            return
        if self._bar is None and not self._start():
            self._shown = False
            return
        self._bar.update(self._task, completed=count, total=max(self._passes, count + 1), refresh=True)

    def _start(self) -> bool:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        except ImportError:
            return False
        columns = (TextColumn("memmgr: measures what the run needs, pass"), MofNCompleteColumn(), BarColumn())
        self._bar = Progress(
            *columns, console=Console(stderr=True), transient=True, auto_refresh=False, redirect_stdout=False,
            redirect_stderr=False,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=self._passes)
        self._bar.start()
        return True

    def stop(self) -> None:
        """Removes the bar from the terminal."""
        self._shown = False
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
