"""memmgr's own threads: how they end."""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import ctypes
import gc
import multiprocessing.connection
import os
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from memmgr.native._pager import Pager

T = TypeVar("T")

_SLEEPS = {
    threading: ("wait", "_wait_for_tstate_lock"),
    concurrent.futures.thread: ("_worker",),
    selectors: ("select",),
    socket: ("accept", "readinto"),
    multiprocessing.connection: ("_recv",),
}


def sleeping_functions() -> list[FunctionType]:
    """Functions of Python's library in which a thread sleeps until another thread, or a peer, wakes it."""
    found = []
    for module, names in _SLEEPS.items():
        classes = [thing for thing in vars(module).values() if isinstance(thing, type)]
        for owner in (module, *(cls for cls in classes if cls.__module__ == module.__name__)):
            found += [thing for name in names if isinstance(thing := vars(owner).get(name), FunctionType)]
    return found


def join(thread: threading.Thread | None, seconds: float | None = None) -> None:
    """Waits for a daemon thread that has been asked to end, or never began.

    Not while the interpreter ends, where a generator may still close its budget: such a thread runs no more then, and from
    Python 3.13 on it does not end either.
    """
    if thread is not None and not sys.is_finalizing():
        with contextlib.suppress(RuntimeError):  # Ctrl-C came before it had begun
            thread.join(seconds)


class Stopped(BaseException):
    """The result of this computation is no longer needed."""


_NEVER = (2**31 - 1,) * 3  # thresholds that the collector does not meet
_usual = gc.get_threshold()


def _collect_as_usual() -> None:
    if gc.get_threshold() == _NEVER:
        gc.set_threshold(*_usual)


os.register_at_fork(after_in_child=_collect_as_usual)


class _Canary:
    def __init__(self) -> None:
        self.itself = self


def _collecting() -> bool:
    """A collection is under way: another one does nothing."""
    canary = weakref.ref(_Canary())
    gc.collect(0)
    return canary() is not None


class Computation:
    """A computation of some seconds in Python, in a thread of its own, until another thread ends it. The planner has no
    clock and checks no flag.

    `native`: raises an exception in another thread. `package`: the package whose functions may be interrupted. Other
    Python code in that thread, such as the user's finalizers, never is.
    """

    def __init__(self, native: Pager, package: str = "memmgr.policies") -> None:
        self._native = native
        self._package = package
        self._lock = threading.Lock()
        self._thread = 0  # that computes; 0: none
        self._stopped = False
        self._raised = False  # in that thread

    def run(self, compute: Callable[[], T]) -> T:
        """Runs `compute` and returns its result.

        Raises `Stopped`: `end` was called before or during the computation.
        """
        with self._lock:
            if self._stopped:
                raise Stopped
            self._thread = threading.get_ident()
        try:
            made = compute()
        except Stopped:
            raise
        except BaseException:
            self._end()
            raise
        self._end()
        return made

    def _end(self) -> None:
        with self._lock:
            thread, self._thread = self._thread, 0
            raised = self._raised
        if raised:  # it is on its way, and shall not come after this; or it was lost in a finalizer
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)
            raise Stopped

    def end(self, thread: threading.Thread | None) -> None:
        """Ends it where it computes, once and for all, and waits for its thread.

        Meanwhile the collector begins nothing of itself: an exception that is on its way to its thread would meet finalizers.
        """
        global _usual
        if gc.get_threshold() != _NEVER:  # no other thread ends one
            _usual = gc.get_threshold()
        try:
            gc.set_threshold(*_NEVER)
            while not self._told() and thread is not None and thread.is_alive() and not sys.is_finalizing():
                join(thread, 0.001)
            join(thread)
        finally:
            _collect_as_usual()

    def _told(self) -> bool:
        """It will end, or has ended."""
        with self._lock:
            self._stopped = True
            if self._raised or not self._thread:
                return True
        if _collecting():  # finalizers may run in that thread, and here
            return False
        with self._lock:
            if self._thread and not self._raised:
                self._raised = self._native.raise_in(self._thread, Stopped, self._package)
            return self._raised or not self._thread


class Rationed:
    """Work that gets a share of the time: it is due again when its last run is no more than that share of the time
    since.

    `share`: above 0.
    """

    def __init__(self, share: float, work: Callable[[], object]) -> None:
        self._share = share
        self._work = work
        self._due = 0.0

    def __call__(self) -> bool:
        """Was it due? Then it is done."""
        began = time.perf_counter()
        if began < self._due:
            return False
        self._work()
        now = time.perf_counter()
        self._due = now + (now - began) / self._share
        return True
