"""The end of threads that are ours."""

from __future__ import annotations

import contextlib
import sys
import threading


def join(thread: threading.Thread | None, seconds: float | None = None) -> None:
    """Waits for a daemon thread that has been asked to end, or never began.

    Not while the interpreter ends, where a generator may still close its budget: such a thread runs no more then, and from
    Python 3.13 on it does not end either.
    """
    if thread is not None and not sys.is_finalizing():
        with contextlib.suppress(RuntimeError):  # Ctrl-C came before it had begun
            thread.join(seconds)
