"""Keeps Ctrl-C out of the accounting path's books.

The shim's state is changed in C++, where no signal handler of Python's runs. Here one may run, and raise, between any two
bytecodes: with a lock half taken, or inside the end of an object, where Python swallows what is raised. So while a budget
is open the handlers are wrapped: what arrives at such a moment is sent again a millisecond later.

Known limitation: only if the budget is opened in the main thread, the only one that may set handlers and runs them.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

RETRY_SECONDS = 0.001
# Where a signal may be handled although the function is ours: an op can take long.
_RUN_OPS = {"dispatch", "_op", "_accounted", "_run", "_replayed"}
_FOLDER = os.path.dirname(__file__)
_OURS = (os.path.join(_FOLDER, "_native_py."), os.path.join(_FOLDER, "_py_"))


class Deferred:
    """The wrapped handlers of this process, from `wrap` to `restore`."""

    def __init__(self, critical: Callable[[], bool]) -> None:
        self._critical = critical  # is this thread in the middle of a change?
        self._wrapped: dict[int, tuple[Any, Any]] = {}  # signal -> (handler before, ours)

    def wrap(self) -> None:
        """Wraps every handler that is a Python function; in another thread than the main one, none."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in signal.valid_signals():
            before = signal.getsignal(number)
            if callable(before) and number not in self._wrapped:
                ours = self._handler(before)
                self._wrapped[number] = before, ours
                signal.signal(number, ours)

    def restore(self) -> None:
        """Puts back what was there before, except where somebody else has set a handler meanwhile."""
        if threading.current_thread() is not threading.main_thread():
            return
        while self._wrapped:
            number, (before, ours) = self._wrapped.popitem()
            if signal.getsignal(number) is ours:
                signal.signal(number, before)

    def _must_wait(self, frame: FrameType | None) -> bool:
        """Would an exception here, raised by a signal handler, leave state half changed?"""
        if self._critical():
            return True
        code = frame.f_code if frame is not None else None
        return code is not None and code.co_filename.startswith(_OURS) and code.co_name not in _RUN_OPS

    def _handler(self, before: Any) -> Callable[[int, FrameType | None], None]:
        main = threading.get_ident()

        def again(number: int) -> None:
            time.sleep(RETRY_SECONDS)
            signal.pthread_kill(main, number)

        def handler(number: int, frame: FrameType | None) -> None:
            if not self._must_wait(frame):
                before(number, frame)
                return
            later = threading.Thread(target=again, args=(number,), daemon=True)
            later.memmgr_own = True  # type: ignore[attr-defined]
            later.start()

        return handler
