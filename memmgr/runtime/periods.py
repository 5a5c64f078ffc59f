"""The boundary between periods, and the receivers of a finished one: the plans, a file for the user."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from memmgr.common.say import warn
from memmgr.common.threads import join
from memmgr.observe.ranks import where_in_job
from memmgr.policies.trace import Trace, TraceError
from memmgr.telemetry import exclusive_output
from memmgr.telemetry.consumers import log_path
from memmgr.telemetry.publisher import Telemetry
from memmgr.telemetry.trace_file import write_trace

from .plans import Plans
from .rounds import Rounds
from .sizing import Sizing

if TYPE_CHECKING:
    from memmgr.native._pager import Pager


class TraceFile:
    """The file for which the user asked (`budget(trace=)`): one pass, the first from `number` on that ends well.

    `path`: where; compressed if the name ends in .gz. With several ranks each has a file of its own, `run.rank1.trace`,
    and so has a process beside one that lives and has written it, `run.12345.trace`. `number`: of the pass, from 1.
    `telemetry`: names the modules of its ops.
    """

    def __init__(self, path: str, number: int, telemetry: Telemetry) -> None:
        self._path = path
        self._number = number
        self._telemetry = telemetry
        self.trace: Trace | None = None
        self.error = ""  # why it is in no file
        self.path: Path | None = None  # the file, once there is one
        self._own = -1

    def wants(self, number: int) -> bool:
        """Is it this pass?"""
        return self.trace is None and number >= self._number

    def compares(self, number: int) -> bool:
        """Is it this pass, or the one before? Where the two are equal, the tensors that live from pass to pass are known."""
        return self.wants(number) or self.wants(number + 1)

    def begin(self) -> None:
        """It begins."""
        self._telemetry.name_modules(True)

    @property
    def modules(self) -> list[str]:
        """Paths by number."""
        return self._telemetry.modules.names

    def write(self, trace: Trace) -> None:
        """This is it."""
        self.trace = trace
        self._telemetry.name_modules(False)
        about = {**where_in_job(lambda types: []), "host": socket.gethostname()}
        path = Path(log_path(self._path))
        if "RANK" not in os.environ and (about["world_size"] or 1) > 1:  # no launcher: the process group says it
            path = path.with_suffix(f".rank{about['rank']}{path.suffix}")
        try:
            self.path, self._own = exclusive_output.begin(path)
            write_trace(self.path, trace, about if about["rank"] is not None else None)
        except OSError as error:
            self.error = error.strerror or str(error)
            warn(f"the trace was not written: {error}")

    def close(self) -> None:
        """Unregisters this object."""
        own, self._own = self._own, -1
        if own >= 0:
            os.close(own)


class Periods:
    """The periods of one budget."""

    def __init__(self, pager: Pager, plans: Plans, file: TraceFile | None, sizing: Sizing | None = None) -> None:
        self._pager = pager
        self._plans = plans
        self._file = file
        self._sizing = sizing
        self._lock = threading.Lock()
        self._noted = False
        self._rounds = Rounds()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """The first one begins."""
        if self._file is not None and self._file.compares(1):
            if self._file.wants(1):
                self._file.begin()
            self._pager.next_period(True)
            self._noted = True
        if self._plans.asked:
            self._pager.seek_loops(True)
            self._pager.sleeps_in(self._loop)
            self._thread = threading.Thread(target=self._loop, name="memmgr-loops", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Waits for the thread."""
        if self._thread is not None:
            self._pager.end_wait_for_loop()
            join(self._thread)

    def _loop(self) -> None:
        """Where there is no backward: turns of the program's loop that come again get a plan, too."""
        while self._pager.wait_for_loop():
            with self._lock:
                info = self._pager.take_loop()
                if info is not None:
                    self._plans.loop_turned(info)

    def ended(self, passes: int, completed: bool) -> None:
        """An outermost backward has ended.

        `passes`: how many, with this one. `completed`: whether it came to its end.
        """
        with self._lock:
            for_file = self._file is not None and self._file.compares(passes + 1)
            sizing = self._sizing if self._sizing is not None and self._sizing.wants_period else None
            next_one = for_file or sizing is not None or self._plans.wanted()
            if not next_one and not self._noted:
                return
            if self._file is not None and self._file.wants(passes + 1):
                self._file.begin()
            if for_file or sizing is not None or not next_one:
                self._rounds.forget()
            elif self._noted and not self._rounds.ends():
                return
            info = self._pager.next_period(next_one)
            noted, self._noted = self._noted, next_one
            if not noted or not info["ops"] or info["overflow"]:
                self._rounds.forget()
                return
            self._rounds.ended(info["hash"], info["ops"], info["followed"] and not info["ran_short"])
            if self._rounds.backwards > 1 and self._plans.fits_none(info["hash"]):
                self._rounds.refuse()
            if completed and self._file is not None and self._file.wants(passes):
                self._write(self._file, repeats=info["before"] == info["hash"])
            if sizing is not None:
                sizing.period_ended(info, lambda repeats: self._plans.noted(repeats=repeats))
            else:
                self._plans.period_ended(info)

    def _write(self, file: TraceFile, *, repeats: bool) -> None:
        try:
            trace = self._plans.measured(repeats=repeats, modules=file.modules).trace
        except TraceError as error:
            warn(f"the pass is no trace: {error}")
        else:
            file.write(trace)
