"""The executor of background computations: a process, one for the life of this one, or a thread if none can be started.

A thread that computes in Python takes the interpreter's lock from every op of the training, up to the switch interval (5 ms)
each time; a process takes an idle core. Where all cores are busy it takes its share of one, at the training's priority: a search
of 1.7 s of a processor costs a training on two cores 1.1 to 1.9 s then. At nice 10 it costs 2.5 s of the next 17 s.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

import memmgr.policies
from memmgr.common.threads import Computation, Stopped

from . import planner_child
from .planner_child import Reply, Start, framed, unframed
from .planning import told

if TYPE_CHECKING:
    from memmgr.native._pager import Pager

T = TypeVar("T")

START_SECONDS = 60.0  # until it answers; numpy is loaded from a disk that others use
MOST_CRASHES = 2  # a process that ended of itself so often is not started again
_SHOWN_BYTES = 2000  # bytes of its output in an error's text


class Failed(Exception):
    """The computation failed; the message has the reason. `cpu_seconds`: processor time that it took."""

    def __init__(self, text: str, cpu_seconds: float = 0.0) -> None:
        super().__init__(text)
        self.cpu_seconds = cpu_seconds


class Executor(Protocol):
    """Computes functions of `planning` for one budget, one at a time."""

    @property
    def works(self) -> bool:
        """Is it worth asking?"""
        ...

    def prepare(self) -> None:
        """There will be something to compute soon."""
        ...

    def run(self, function: Callable[..., T], *arguments: Any) -> tuple[T, float]:
        """The function's value, and the seconds of a processor that it took.

        Raises `Failed`: by the function, or the process has ended; `Stopped`: by `end`, before or meanwhile.
        """
        ...

    def end(self, thread: threading.Thread | None) -> None:
        """Ends the executor: a running computation is given up, and `thread`, which waits for it, is joined."""
        ...


class InThread:
    """Computes in the thread that asks.

    `native`: raises an exception in another thread. `package`: see `Computation`.
    """

    works = True

    def __init__(self, native: Pager, package: str = "memmgr.policies") -> None:
        self._computation = Computation(native, package)

    def prepare(self) -> None:
        """Nothing is to be done."""

    def run(self, function: Callable[..., T], *arguments: Any) -> tuple[T, float]:
        """As `Executor` has it."""
        begun = time.thread_time()
        try:
            value = self._computation.run(lambda: function(*arguments))
        except Exception as error:
            raise Failed(told(error), time.thread_time() - begun) from error
        return value, time.thread_time() - begun

    def end(self, thread: threading.Thread | None) -> None:
        """As `Executor` has it."""
        self._computation.end(thread)


class Unavailable(Exception):
    """No process can be had here."""


class _Child:
    """One process, from its start to its end."""

    def __init__(self) -> None:
        executable = _interpreter()
        if executable is None:
            raise Unavailable("no interpreter")
        with contextlib.ExitStack() as given, contextlib.ExitStack() as kept:
            self._socket, theirs = socket.socketpair()
            kept.callback(self._socket.close)
            given.callback(theirs.close)
            self._said, prints = os.pipe()
            kept.callback(os.close, self._said)
            given.callback(os.close, prints)
            os.set_blocking(self._said, False)
            os.set_blocking(prints, False)  # output that finds no room is lost: it is read at the end only
            command = [executable, "-P", "-s", "-S", *(["-B"] if sys.dont_write_bytecode else [])]
            self._process = subprocess.Popen(  # by vfork: the driver's and the arena's memory is neither copied nor shared
                [*command, os.path.abspath(planner_child.__file__), str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=prints,
                stderr=prints,
                env=_environment(),
                cwd="/",
                # Ctrl-C is not for it. Not a session of its own: where the kernel groups by session, nice counts within one.
                process_group=0,
            )
            kept.pop_all()
        self.ready = False
        self.killed = False  # by us: that is no crash
        start = Start(_path(), str(Path(__file__).parent.parent), memmgr.policies.__path__[0])
        self._socket.settimeout(START_SECONDS)
        with contextlib.suppress(OSError):  # the caller finds out that it has ended
            self.send(pickle.dumps(tuple(start)))

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def lives(self) -> bool:
        return self._process.poll() is None

    def send(self, payload: bytes) -> None:
        # No signal: a program may have taken Python's handling of SIGPIPE back.
        self._socket.sendall(framed(payload), socket.MSG_NOSIGNAL)

    def wait_until_ready(self) -> None:
        """Raises:
        OSError: it does not answer.
        EOFError: it has ended.
        """
        if not self.ready:
            unframed(self._socket.recv)
            self._socket.settimeout(None)
            self.ready = True

    def ask(self, question: bytes) -> Reply:
        """Raises:
        OSError, EOFError: it has ended.
        """
        self.wait_until_ready()
        self.send(question)
        return Reply(*pickle.loads(unframed(self._socket.recv)))

    def kill(self) -> None:
        """Kills the process: a caller that waits for an answer gets none."""
        self.killed = True
        self._process.kill()

    def reap(self) -> int:
        """Ends it; its exit code. Its socket is left to a thread that may be reading it."""
        self._process.kill()
        return int(self._process.wait())

    def end(self) -> str:
        """Ends it, and says how it ended."""
        code = self.reap()
        said = ""
        with contextlib.suppress(OSError):  # no answer, and a child of that process holds the other end
            said = os.read(self._said, 1 << 16)[-_SHOWN_BYTES:].decode(errors="replace").strip()
        self._close()
        how = f"was ended by signal {-code}" if code < 0 else f"has ended with code {code}"
        return f"the planner's process {how}" + (f": {said}" if said else "")

    def forget(self) -> None:
        """In a forked child, whose it is not."""
        self._process.returncode = 0  # no warning that it runs still
        self._close()

    def _close(self) -> None:
        self._socket.close()
        said, self._said = self._said, -1
        if said >= 0:
            os.close(said)


def _interpreter() -> str | None:
    """A Python that runs a file; where Python is part of another program, `sys.executable` is that program."""
    path = sys.executable
    if not path or getattr(sys, "frozen", False) or not os.path.basename(path).lower().startswith("python"):
        return None
    return os.path.abspath(path)


def _environment() -> dict[str, str]:
    ours = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"}
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MEMMGR_") and (not name.startswith("PYTHON") or name == "PYTHONHOME")
    }
    return kept | dict.fromkeys(ours, "1")


def _path() -> list[str]:
    """Where modules are found: this process's numpy first, so that a script's folder hides none of the standard library."""
    first = str(Path(np.__file__).parent.parent)
    return [first, *(os.path.abspath(entry) for entry in sys.path if entry and entry != first)]


class PlannerProcess:
    """The process of this process: started when it is first needed, kept, and used by one at a time."""

    def __init__(self) -> None:
        self._forget()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._in_child)

    def _forget(self) -> None:
        self._turn = threading.Lock()  # whose question it has
        self._lock = threading.Lock()  # guards the attributes below
        self._child: _Child | None = None
        self._asker: InProcess | None = None
        self._closed = False
        self._crashes = 0
        self._unavailable = ""

    def _in_child(self) -> None:
        child = self._child
        self._forget()
        if child is not None:
            child.forget()

    @property
    def works(self) -> bool:
        """It has not ended of itself too often. Where none can be started at all a thread computes."""
        return bool(self._unavailable) or self._crashes < MOST_CRASHES

    @property
    def pid(self) -> int | None:
        """The process's; None: there is none."""
        child = self._child
        return child.pid if child is not None and child.lives() else None

    def prepare(self, asker: InProcess) -> None:
        """Starts it, and waits for nothing."""
        with contextlib.suppress(Unavailable, Failed, Stopped), self._turn:
            self._begin(asker)
            self._done()

    def run(self, asker: InProcess, function: Callable[..., T], arguments: tuple[Any, ...]) -> tuple[T, float]:
        """As `Executor` has it. Raises `Unavailable`: there is no process, and none can be started."""
        question = pickle.dumps((function, arguments), pickle.HIGHEST_PROTOCOL)
        with self._turn:
            child = self._begin(asker)
            try:
                reply = child.ask(question)
            except (OSError, EOFError) as error:
                raise self._lost(child, asker) from error
            finally:
                self._done()
        if reply.error is not None:
            raise Failed(reply.error, reply.cpu_seconds)
        return reply.value, reply.cpu_seconds

    def _begin(self, asker: InProcess) -> _Child:
        with self._lock:
            if self._closed or asker.stopped:
                raise Stopped
            if self._unavailable:
                raise Unavailable(self._unavailable)
            if self._child is not None and not self._child.lives():
                self._crashed(self._child)
            if not self.works:
                raise Failed("the planner's process has ended too often")
            if self._child is None:
                try:
                    self._child = _Child()
                except (OSError, ValueError, Unavailable, subprocess.SubprocessError) as error:
                    self._unavailable = str(error) or type(error).__name__
                    raise Unavailable(self._unavailable) from None
            self._asker = asker
            return self._child

    def _done(self) -> None:
        with self._lock:
            self._asker = None
            child = self._child
            if child is not None and child.killed:  # its answer was here already when `stop` came
                self._child = None
                child.end()

    def _crashed(self, child: _Child) -> str:
        self._child = None
        self._crashes += 1
        return child.end()

    def _lost(self, child: _Child, asker: InProcess) -> BaseException:
        with self._lock:
            if self._child is not child:  # `close` has ended it
                child.end()
                return Stopped()
            if self._closed or asker.stopped:
                self._child = None
                child.end()
                return Stopped()
            if child.ready:
                return Failed(self._crashed(child))
            self._unavailable = self._crashed(child)  # it does not even begin here
            return Unavailable(self._unavailable)

    def stop(self, asker: InProcess) -> None:
        """Gives up the computation of `asker`, and with it the process."""
        with self._lock:
            asker.stopped = True
            if self._asker is asker and self._child is not None:
                self._child.kill()

    def close(self) -> None:
        """At the end of this process."""
        with self._lock:
            self._closed = True
            child, self._child = self._child, None
            reads = self._asker is not None
        if child is not None:
            child.reap() if reads else child.end()


PLANNER = PlannerProcess()


class InProcess:
    """Computes in the planner's process, or in the thread that asks where there is none."""

    def __init__(self, native: Pager) -> None:
        self._here = InThread(native)
        self.stopped = False

    @property
    def works(self) -> bool:
        """As `Executor` has it."""
        return PLANNER.works

    def prepare(self) -> None:
        """As `Executor` has it."""
        PLANNER.prepare(self)

    def run(self, function: Callable[..., T], *arguments: Any) -> tuple[T, float]:
        """As `Executor` has it."""
        try:
            return PLANNER.run(self, function, arguments)
        except Unavailable:
            return self._here.run(function, *arguments)

    def end(self, thread: threading.Thread | None) -> None:
        """As `Executor` has it."""
        PLANNER.stop(self)
        self._here.end(thread)


def executor(native: Pager) -> Executor:
    """The executor of a budget."""
    return InProcess(native)
