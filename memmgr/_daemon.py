"""The thread that brings cells back before they are asked for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from memmgr.policies import Upcoming

if TYPE_CHECKING:
    from ._manager import Manager


class Daemon:
    """Prefetches in the order of backward. Decides in `policies`, copies in the tier's own threads."""

    LOOK = 256  # offloaded cells to look at per round

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._wake = threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._loop, name="memmgr", daemon=True)
        self._thread.memmgr_own = True  # type: ignore[attr-defined]
        self.errors: list[BaseException] = []

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop = True
        self._wake.set()
        self._thread.join()

    def wake(self) -> None:
        if not self._wake.is_set():
            self._wake.set()

    def _loop(self) -> None:
        while True:
            self._wake.wait()
            if self._stop:
                return
            self._wake.clear()
            try:
                self._round()
            except BaseException as error:  # a prefetch that fails costs time, not correctness; kept for the report
                self.errors.append(error)
                return

    def _round(self) -> None:
        manager = self._manager
        native = manager.native
        cells, position, in_flight = native.offloaded(self.LOOK)
        if not cells:
            return
        resident, budget, _, _, _, largest, _ = native.pressure()
        reserve = manager.reserve_bytes(largest)
        upcoming = Upcoming(
            np.array([c.nbytes for c in cells], dtype=np.int64),
            np.maximum.accumulate(np.array([max(0, position - c.seq) for c in cells], dtype=np.int64)),
        )
        headroom = budget - resident - reserve
        chosen = manager.policy.prefetcher(upcoming, manager.link(), headroom, manager.seconds_per_use(), in_flight)
        for i in chosen:
            if native.prefetch(cells[int(i)], reserve) == 0:
                break
