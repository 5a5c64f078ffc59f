"""The planner's process: started by path, so that nothing of memmgr that imports torch is run.

It reads questions (a function of `planning` and its arguments) from a socket, which is its standard input, and
answers each. It ends when the socket does or its parent has, also in the middle of a computation, and deaf to Ctrl-C, which is
the training's.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import queue
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

LOOK_MILLISECONDS = 1000
"""How often it looks for its parent where the kernel cannot wake it (no pidfd)."""

_LENGTH = struct.Struct("<Q")


class Start(NamedTuple):
    """The first message to the process; sent as a plain tuple, since the process has no memmgr yet."""

    path: list[str]  # sys.path, of which numpy is found
    package: str  # the folder of memmgr
    policies: str  # the folder of memmgr.policies, which lies elsewhere in a checkout


@dataclass(frozen=True)
class Reply:
    """An answer."""

    value: Any  # of the function
    error: str | None  # why there is no value; None: there is one
    cpu_seconds: float  # of a processor


def framed(payload: bytes) -> bytes:
    """A message as it is sent."""
    return _LENGTH.pack(len(payload)) + payload


def unframed(read: Callable[[int], bytes]) -> bytes:
    """The next message.

    Raises `EOFError`: the other side is gone. `read`: at most so many bytes; empty: the other side is gone.
    """

    def exactly(count: int) -> bytes:
        parts = []
        while count:
            part = read(min(count, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    return exactly(_LENGTH.unpack(exactly(_LENGTH.size))[0])


class _Line:
    """The socket, as a thread of its own reads it."""

    def __init__(self, descriptor: int, parent: int) -> None:
        self._descriptor = descriptor
        self._parent = parent
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        self._timeout: int | None = None
        try:  # not PR_SET_PDEATHSIG: that comes when the thread ends that started us
            self._poll.register(os.pidfd_open(parent), select.POLLIN)
        except (AttributeError, OSError):
            self._timeout = LOOK_MILLISECONDS

    def read(self, count: int) -> bytes:
        """Reads at most so many bytes. Ends when the parent has ended, even if another process still holds the other
        end.
        """
        while True:
            ready = {descriptor for descriptor, _ in self._poll.poll(self._timeout)}
            if ready - {self._descriptor} or os.getppid() != self._parent:
                os._exit(0)
            if ready:
                return os.read(self._descriptor, count)

    def write(self, payload: bytes) -> None:
        left = memoryview(framed(payload))
        while left:
            left = left[os.write(self._descriptor, left) :]


def _lay_out(start: Start) -> None:
    """Sets up the packages of memmgr without running memmgr's __init__."""
    sys.path += [entry for entry in start.path if entry not in sys.path]
    package = ModuleType("memmgr")
    package.__path__ = [start.package]
    sys.modules["memmgr"] = package
    spec = importlib.util.spec_from_file_location(
        "memmgr.policies", os.path.join(start.policies, "__init__.py"), submodule_search_locations=[start.policies]
    )
    assert spec is not None and spec.loader is not None
    policies = importlib.util.module_from_spec(spec)
    sys.modules["memmgr.policies"] = policies
    spec.loader.exec_module(policies)
    package.policies = policies  # type: ignore[attr-defined]


def main(parent: int) -> NoReturn:
    """Answers until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    line = _Line(descriptor, parent)
    start = Start(*pickle.loads(unframed(line.read)))
    questions: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> NoReturn:
        while True:
            try:
                questions.put(unframed(line.read))
            except (EOFError, OSError):
                os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    _lay_out(start)
    from memmgr.runtime import planning

    line.write(b"")
    while True:
        begun = time.process_time()
        value, why = None, None
        try:
            function, arguments = pickle.loads(questions.get())
            value = function(*arguments)
        except Exception as error:
            why = planning.told(error)
        # A tuple: its class has another name here, where this file is the program.
        line.write(pickle.dumps((value, why, time.process_time() - begun), pickle.HIGHEST_PROTOCOL))


if __name__ == "__main__":
    main(int(sys.argv[1]))
