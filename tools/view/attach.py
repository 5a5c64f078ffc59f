"""A connection to a training process, read without waiting: the source of `memmgr top`."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from memmgr.telemetry import stream
from memmgr.tools.common.usage_error import UsageError
from memmgr.tools.view.run_state import RunState, parse_line

ANSWER_SECONDS = 10.0
"""A process without a line for so long counts as stuck: one op may hold the interpreter for a while."""


class Attached:
    """One process and its state.

    Args:
        pid: the process.
        request: the request sent to it: `interval_seconds`, `want`, `cells`, `columns`.

    Raises:
        UsageError: the process cannot be reached; the text has the reason.
    """

    def __init__(self, pid: int, request: dict[str, Any]) -> None:
        self.watched = RunState(pid)
        self.over = False
        self._rest = b""
        self._heard = time.monotonic()
        self._interval = float(request.get("interval_seconds", 1.0))
        try:
            self._socket: socket.socket = stream.connect(pid)
        except stream.Unreachable as error:
            raise UsageError(str(error)) from None
        self._socket.setblocking(False)
        self.ask(request)

    def ask(self, request: dict[str, Any]) -> None:
        """Changes the data that it sends. A request is far smaller than the socket's buffer."""
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps(request).encode() + b"\n")

    @property
    def hung_up(self) -> bool:
        """Has the process closed the stream? The lines before that may not have been received yet."""
        if self.over:
            return False
        ended = select.poll()
        ended.register(self._socket, select.POLLRDHUP)
        return bool(ended.poll(0))

    def receive(self) -> list[dict[str, Any]]:
        """The lines that have come; `over` is set at the end of the stream. Never waits.

        A stream that ends without its `end` has a last line of the type `gone`.

        Raises:
            UsageError: it does not speak our language.
        """
        lines = []
        while not self.over:
            try:
                data = self._socket.recv(1 << 20)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.over = True
                self._socket.close()
                if self.watched.end is None and not self.watched.error:
                    lines.append({"type": "gone", "seconds": self.watched.now})
                    self.watched.feed(lines[-1])
                break
            self._heard = time.monotonic()
            self._rest += data
            *whole, self._rest = self._rest.split(b"\n")
            for text in whole:
                line = parse_line(text)
                self.watched.feed(line)
                lines.append(line)
        silent = time.monotonic() - self._heard - (0.0 if self.watched.gone else self._interval)
        self.watched.silent_seconds = 0.0 if self.watched.end is not None else max(0.0, silent)
        return lines

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    def close(self) -> None:
        """Hangs up; the process forgets us."""
        self.over = True
        self._socket.close()


def wait(attached: Sequence[Attached], seconds: float, enough: Callable[[Attached], bool]) -> None:
    """Receives until each has enough or is over, or the time is up.

    Raises:
        UsageError: one does not speak our language.
    """
    deadline = time.monotonic() + seconds
    while True:
        open_ones = [one for one in attached if not one.over and not enough(one)]
        left = deadline - time.monotonic()
        if not open_ones or left <= 0:
            return
        for one in select.select(open_ones, [], [], left)[0]:
            one.receive()
