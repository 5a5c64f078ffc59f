"""Output of the tools: a progress bar and a table with rich, the same as plain lines without it."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from memmgr.config.sizes import show_seconds


def _rich() -> bool:
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True


def megabytes(count: float) -> str:
    """Bytes as "1,234 MB" (10⁶), with a decimal where that is all there is."""
    return f"{count / 1e6:,.0f} MB" if count >= 10e6 else f"{count / 1e6:.1f} MB"


class ProgressBar:
    """Steps done out of `total`, and the time left, on stderr: a bar on a terminal that rich can draw on, else a line per
    step.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._first: tuple[int, float] | None = None  # steps done and the time when the first of them were
        self._bar: Any = None
        self._task: Any = None
        if _rich() and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str, advance: int = 0) -> None:
        """Shows the current work and advances by `advance` steps."""
        self._done += advance
        if self._bar is not None:
            self._bar.update(self._task, description=text, advance=advance)
        else:
            print(f"[{self._done}/{self._total}{self._left()}] {text}", file=sys.stderr, flush=True)

    def _left(self) -> str:
        now = time.monotonic()
        if self._first is None and self._done:
            self._first = self._done, now
        if self._first is None or self._done == self._first[0] or self._done >= self._total:
            return ""
        left = (now - self._first[1]) / (self._done - self._first[0]) * (self._total - self._done)
        return f", {show_seconds(max(1, round(left)))} left"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table on stdout; the first column to the left, the others to the right."""
    if _rich() and sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table

        drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for index, name in enumerate(head):
            drawn.add_column(name, justify="right" if index else "left", no_wrap=index == 0)
        for row in rows:
            drawn.add_row(*row)
        Console().print(drawn)
        return
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, ["-" * width for width in widths], *rows):
        cells = (
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(cells).rstrip())
