"""Ctrl-C where an exception would not arrive, and SIGTERM as an exception."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def termination_unwinds() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP leave as `SystemExit`, as Ctrl-C leaves as `KeyboardInterrupt`: files and processes are removed
    on the way out. A signal that has a handler, or is ignored (nohup), keeps that.
    """
    ours = threading.current_thread() is threading.main_thread()
    taken = [number for number in _ENDING if ours and signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def ends_at_once(verb: str) -> Iterator[None]:
    """Inside, Ctrl-C ends the process with the verb's line and code 130.

    For torch on fake tensors: Python is called there from C++ that no exception may pass, which ends the process as a crash. Some
    imports and finalizers take the exception for an error of their own, or for none.
    """

    def end(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(Exception):  # a stream may be in the middle of a line, or closed
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            os.write(2, f"memmgr {verb}: interrupted\n".encode())
        os._exit(128 + number)

    ours = threading.current_thread() is threading.main_thread()
    # a different handler was installed on purpose
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is end:  # and not one that a user's file has put there
            signal.signal(signal.SIGINT, signal.default_int_handler)
