"""Threads that are ours: how they end, and who goes first."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

_BEHIND = 10  # nice: about a tenth of what a thread gets that trains


def join(thread: threading.Thread | None, seconds: float | None = None) -> None:
    """Waits for a daemon thread that has been asked to end, or never began.

    Not while the interpreter ends, where a generator may still close its budget: such a thread runs no more then, and from
    Python 3.13 on it does not end either.
    """
    if thread is not None and not sys.is_finalizing():
        with contextlib.suppress(RuntimeError):  # Ctrl-C came before it had begun
            thread.join(seconds)


def let_others_first() -> None:
    """This thread has the processor where nobody who trains wants it: a kernel's threads wait for the last of them.

    For its whole life; only Linux has a priority for each thread.
    """
    mine = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, mine, max(_BEHIND, os.getpriority(os.PRIO_PROCESS, mine)))
