"""The thread that brings cells back before they are asked for, and answers a malloc that found the vault empty."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from memmgr.policies import Action, Upcoming

if TYPE_CHECKING:
    from ._manager import Manager

FIRST_RETRY_SECONDS = 0.002
MOST_ERRORS = 8  # of different texts; a text may hold an address


class Daemon:
    """Prefetches in the order of backward. Decides in `policies`, copies in the tier's own threads.

    It sleeps on an eventfd: a thread inside malloc wakes it without the GIL (design §4).
    """

    LOOK = 256  # offloaded cells to look at per round

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._native = manager.native
        self._stop = False
        self._parked: deque[Any] = deque()
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._thread = threading.Thread(target=self._loop, name="memmgr", daemon=True)
        self._thread.memmgr_own = True  # type: ignore[attr-defined]
        self.errors: list[str] = []
        self._native.daemon_open()

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and closes its file."""
        self._stop = True
        self._native.daemon_wake()
        with contextlib.suppress(RuntimeError):  # Ctrl-C came before it had begun
            self._thread.join()
        self._native.daemon_close()

    def wake(self) -> None:
        """There is something to prefetch."""
        self._native.daemon_wake()

    def park(self, cell: Any) -> None:
        """A managed tensor was used: its bytes go back to the tier as soon as they are written."""
        self._parked.append(cell)
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._native.daemon_wake()

    def _loop(self) -> None:
        while True:
            wanted = self._native.daemon_wait(self._retry_seconds if self._parked else -1.0)
            if self._stop:
                self._native.daemon_answer(0)
                return
            try:
                if wanted:
                    self._native.daemon_answer(self._manager.surprise(wanted))
                with self._manager.captures.lock:
                    if not self._manager.captures.under_way:
                        self._let_go()
                        self._prefetch()
            except BaseException as error:  # a prefetch that fails costs time, not correctness
                self._failed(f"{type(error).__name__}: {error}")
                if wanted:
                    self._native.daemon_answer(0)

    def _failed(self, text: str) -> None:
        """Each kind of failure is told once: to who watches now, and to the user at the end."""
        if text not in self.errors and len(self.errors) < MOST_ERRORS:
            self.errors.append(text)
            self._manager.telemetry.happened("daemon_error", text=text)

    def _let_go(self) -> None:
        """Releases what is parked. The program may still be about to drop its own references: those are tried again."""
        before = len(self._parked)
        for _ in range(before):
            cell = self._parked.popleft()
            if not self._native.release(cell, int(Action.OFFLOAD)) and cell.managed and cell.present and cell.handles:
                self._parked.append(cell)
        if self._parked:
            progress = len(self._parked) < before
            self._retry_seconds = FIRST_RETRY_SECONDS if progress else min(1.0, 2 * self._retry_seconds)

    def _prefetch(self) -> None:
        manager, native = self._manager, self._native
        if not manager.last.in_backward or manager.plans.brings_back():
            return
        cells, position, in_flight = native.offloaded(self.LOOK)
        if not cells:
            return
        resident, budget, *_ = native.pressure()
        reserve = native.reserve_bytes()
        upcoming = Upcoming(
            np.array([c.nbytes for c in cells], dtype=np.int64),
            np.maximum.accumulate(np.array([max(0, position - c.seq) for c in cells], dtype=np.int64)),
        )
        headroom = budget - resident - reserve
        chosen = manager.policy.prefetcher(upcoming, manager.link(), headroom, manager.seconds_per_use(), in_flight)
        for i in chosen:
            if native.prefetch(cells[int(i)], reserve) == 0:
                break
