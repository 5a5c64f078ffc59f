"""Publishes the activity of a budget to the readers of this process's socket and to a log, one JSON object a line.

One thread, asleep in `poll` without a time-out while no reader is connected and no log is kept. It sends sums and
snapshots; the training threads never wait for it, and never send anything themselves. Its own processor time is
measured and kept under a share of the run by doing less.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memmgr.common.constants import Purpose, Stretch
from memmgr.common.threads import Rationed, join
from memmgr.observe.holdings import Explanation, Holder
from memmgr.observe.leaks import Leak
from memmgr.observe.qualified_names import Named, by_storage
from memmgr.observe.ranks import where_in_job
from memmgr.observe.source_lines import KnownLines

from . import stream
from .consumers import Consumer, Level, Log, Reader, dumps, log_path
from .modules import BACKWARD, GRADIENTS, PLACES, Modules

if TYPE_CHECKING:
    from memmgr.native._pager import Pager

SHARES = {"sample": 15e-4, "levels": 3e-3, "events": 5e-4, "cells": 3e-4, "map": 2e-4, "holders": 3e-4, "names": 3e-4}
"""The most processor time of the telemetry's thread, as a share of the run's time. An expensive task runs less often.
"""

LOG_SHARE = 0.02
"""The same for the cells of a log, which asks for them two dozen times at most."""

EVENTS_SECONDS = 0.5  # least time between two lines of events: each line is a sum over many small events

MAP_STATES = tuple(state.name.lower() for state in Stretch)
MOST_READERS = 8
MOST_HOLDERS = 20  # of a log's line
CLOSING_SECONDS = 0.2  # for readers to take the last lines


class About(Protocol):
    """A run's description of itself."""

    device_type: str

    def hello(self) -> dict[str, Any]:
        """The facts that do not change during the run."""

    def sample(self) -> dict[str, Any]:
        """The figures that change."""

    def look(self) -> None:
        """Finds the owners of tensors, for the next samples."""

    def owners(self) -> list[Any]:
        """The models and optimizers that are known."""

    def explain(self) -> Explanation:
        """The holders of memory."""


def _is_of(holder: Holder, leak: Leak) -> bool:
    """Does the leak have these tensors?"""
    made_there = leak.line is None or leak.line in holder.lines
    return holder.by_op and made_there and holder.name in {op.removeprefix("aten::") for op in leak.ops}


_open: set[Telemetry] = set()


@atexit.register
def _tidy() -> None:
    """A process that ends with its budget open still removes its address."""
    for telemetry in list(_open):
        telemetry.forget_address()


class Telemetry:
    """The stream of one open budget."""

    def __init__(self, native: Pager, about: About, log: str | None) -> None:
        self._native = native
        self._about = about
        self.modules = Modules(native)
        self.detail = False  # a reader is connected: the training threads record per-op detail
        self._log_wanted = log_path(log) if log is not None else None
        self._log: Log | None = None
        self._readers: dict[int, Reader] = {}
        self._passes: deque[tuple[int, int, float, float, float]] = deque(maxlen=4096)
        self._ended = 0  # passes
        self._happenings: deque[dict[str, Any]] = deque(maxlen=256)
        self._server: Any = None
        self._path: Any = None
        self._wake = -1
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._stop = False
        self._names_always = False
        self._named: dict[int, Named] = {}
        self._look_for_names = Rationed(SHARES["names"], self._find_names)
        self._lines = KnownLines(native)
        self._ending: dict[str, Any] | None = None
        self._begun = time.perf_counter()
        self._not_before: dict[str, float] = {}
        self.errors: list[str] = []
        self.no_socket = ""  # why there is none

    @property
    def log_path(self) -> Path | None:
        """Where the log is, once there is one."""
        return self._log.path if self._log is not None else None

    @property
    def watched(self) -> bool:
        """A reader is connected; a log is none."""
        return bool(self._readers)

    # -- in the training threads --

    def start(self) -> None:
        """Opens socket and log, and the thread.

        Raises:
            OSError: the log cannot be written. (Without a socket there is no dashboard; training goes on.)
        """
        if self._log_wanted is not None:
            self._log = Log(self._log_wanted)
        if os.environ.get("MEMMGR_TELEMETRY", "1") != "0":
            try:
                self._server, self._path = stream.listen()
            except OSError as error:
                self.no_socket = str(error)
        if self._server is None and self._log is None:
            return
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        if self._log is not None:
            self._set_detail(True)
            self.modules.begin()
            self._log.put(self._hello())
        _open.add(self)
        # Deadlines of tasks that walk Python objects begin as if each had just run: a dashboard that connects and
        # disconnects in the first seconds must cost nothing.
        self._not_before["holders"] = self._begun + 0.02 / SHARES["holders"]
        self._native.sleeps_in(self._round)
        self._thread = threading.Thread(target=self._loop, name="memmgr-telemetry", daemon=True)
        self._thread.start()

    def ended_pass(self, resident_peak: int, unmanaged_peak: int, forward: float, backward: float) -> None:
        """Records a pass that has ended; kept only while a reader is connected."""
        self._ended += 1
        if self.detail:
            self._passes.append((resident_peak, unmanaged_peak, forward, backward, self._now()))
            self.modules.ended_pass()

    def name_modules(self, on: bool, *, always: bool = False) -> None:
        """The next pass is recorded with the modules of its ops; off: it is over. `always`: all passes are."""
        self._names_always |= always
        if on:
            self.modules.begin()
        elif not self.detail and not self._names_always:
            self.modules.forget()

    def happened(self, what: str, **fields: Any) -> None:
        """One rare event (a plan, an error); the common ones are counted in the pager."""
        if self.detail:
            self._happenings.append({"what": what, "seconds": self._now(), **fields})

    def close(self, stats: dict[str, Any], summary: str, failed: bool, error: str) -> None:
        """Sends the end, and leaves no thread, no file and no hook (rule 13)."""
        self.modules.forget()  # also without a reader: a recorded pass, a plan's or a trace's, has hooks, too
        if self._thread is None or os.getpid() != self._pid:
            return
        self._ending = {"stats": stats, "summary": summary, "failed": failed, "error": error}
        self._stop = True
        os.eventfd_write(self._wake, 1)
        join(self._thread, 2.0)
        self._thread = None
        self._shut()
        self.forget_address()

    def complaints(self) -> list[str]:
        """Errors of the telemetry, to report when the budget ends."""
        said = []
        if self._log is not None and self._log.error:
            said.append(f"the log {self._log.path} is not complete: {self._log.error}")
        if self.errors:
            said.append(f"the telemetry failed {len(self.errors)} times ({self.errors[0]}); please report this")
        return said

    def forget_address(self) -> None:
        """Removes the socket's file, if it is this process's."""
        _open.discard(self)
        if self._path is not None and os.getpid() == self._pid:
            stream.remove(self._path)
            self._path = None

    def in_child(self) -> None:
        """In a forked child: all open files are the parent's. No line is sent, no file is unlinked."""
        _open.discard(self)
        self._thread = None
        self._path = None
        self.detail = False
        self.modules.forget()
        self._shut()

    def _shut(self) -> None:
        self._set_detail(False)
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        if self._log is not None:
            self._log.close()
        if self._server is not None:
            self._server.close()
            self._server = None
        wake, self._wake = self._wake, -1  # first: a child that is forked now closes nothing of another's
        if wake >= 0:
            os.close(wake)

    def _now(self) -> float:
        return round(time.perf_counter() - self._begun, 6)

    def _set_detail(self, on: bool) -> None:
        if on == self.detail:
            return
        self.detail = on
        self._native.set_detail(on)
        self._passes.clear()
        if on:
            self.modules.watch()
        else:
            self.modules.forget()

    # -- the thread --

    def _loop(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if self._server is not None:
            poll.register(self._server, select.POLLIN)
        while True:
            try:
                self._round(poll)
            except BaseException as error:  # errors here must not reach the run
                self.errors.append(f"{type(error).__name__}: {error}")
                if len(self.errors) > 20:
                    return
            if self._stop:
                with contextlib.suppress(Exception):
                    self._end()
                return

    def _round(self, poll: Any) -> None:
        for fd, happened in poll.poll(self._timeout_ms()):
            if fd == self._wake:
                continue
            if self._server is not None and fd == self._server.fileno():
                self._accept(poll)
            elif fd in self._readers:
                reader = self._readers[fd]
                if happened & select.POLLIN:
                    reader.receive()
                if happened & select.POLLOUT:
                    reader.flush()
                if happened & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
                    reader.dead = True
        if not self._stop and self._consumers():
            self._tick()
        for fd, reader in list(self._readers.items()):
            if reader.dead:
                poll.unregister(fd)
                reader.close()
                del self._readers[fd]
            else:
                poll.modify(fd, select.POLLIN | (select.POLLOUT if reader.waiting else 0))
        if not self._consumers():
            self._set_detail(False)

    @property
    def _writing(self) -> Log | None:
        """The log, while it can be written."""
        return self._log if self._log is not None and not self._log.error else None

    def _consumers(self) -> list[Consumer]:
        found: list[Consumer] = [reader for reader in self._readers.values() if not reader.dead]
        if self._writing is not None:
            found.append(self._writing)
        return found

    def _level_due(self, log: Log) -> float:
        return log.level_due if log.hurries else max(log.level_due, self._not_before.get("levels", 0.0))

    def _timeout_ms(self) -> int | None:
        consumers = self._consumers()
        if not consumers:
            return None
        due = max(min(consumer.due for consumer in consumers), self._not_before.get("sample", 0.0))
        if self._writing is not None:
            due = min(due, self._level_due(self._writing))
        return max(0, int((due - time.perf_counter()) * 1e3) + 1)

    def _accept(self, poll: Any) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:
            return  # it is gone again
        connection.setblocking(False)
        reader = Reader(connection)
        if len(self._readers) >= MOST_READERS:
            reader.put({"type": "error", "text": f"{MOST_READERS} readers are connected already"})
            reader.close()
            return
        self._readers[connection.fileno()] = reader
        poll.register(connection, select.POLLIN)
        self._set_detail(True)
        reader.put(self._hello())

    def _tick(self) -> None:
        """Samples, and sends each consumer the lines that are due. The measured cost decides when the next tick may be."""
        now = time.perf_counter()
        paced = now < self._not_before.get("sample", 0.0)
        due = [] if paced else [consumer for consumer in self._consumers() if consumer.due <= now]
        looking = list(due)
        log = self._writing
        if log is not None and now >= self._level_due(log):
            begun = time.thread_time()
            log.take_level(self._level(), now)
            self._pace("levels", begun, now, SHARES["levels"])
            looking = [*(consumer for consumer in due if consumer is not log), log]
        if due:
            self._send_samples(due, now)
        for kind, make in (("cells", self._cells), ("map", self._map), ("holders", self._holders)):
            wanting = [consumer for consumer in looking if kind in consumer.wants]
            urgent = any(consumer.urgent for consumer in wanting)
            if wanting and (urgent or now >= self._not_before.get(kind, 0.0)):
                begun = time.thread_time()
                data = dumps(make(wanting))
                for consumer in wanting:
                    consumer.send(data)
                    consumer.had(kind)
                    if kind == "cells" and consumer.explains:
                        consumer.put(self._explained())
                explained = any(consumer.explains for consumer in wanting)  # the log asks for few lines
                self._pace(kind, begun, now, LOG_SHARE if explained else SHARES[kind])

    def _send_samples(self, due: list[Consumer], now: float) -> None:
        begun = time.thread_time()
        sample = self._sample()
        data = dumps(sample)
        for consumer in due:
            consumer.look(sample)
            consumer.send(data, sample=True)
            consumer.due = now + consumer.interval_seconds
        self._pace("sample", begun, now, SHARES["sample"])
        if now >= self._not_before.get("events", 0.0):
            begun = time.thread_time()
            self._gather()
            for consumer in self._consumers():
                consumer.put_collected(self._now())
            self._pace("events", begun, now, SHARES["events"])
            self._not_before["events"] = max(self._not_before["events"], now + EVENTS_SECONDS)

    def _pace(self, kind: str, begun: float, now: float, share: float) -> None:
        self._not_before[kind] = now + (time.thread_time() - begun) / share

    def _gather(self) -> None:
        """Adds the events since the last call to the sums of all consumers."""
        events = self._native.drain_events()
        passes = [self._passes.popleft() for _ in range(len(self._passes))]
        happenings = [self._happenings.popleft() for _ in range(len(self._happenings))]
        named = [
            (
                event["what"],
                event["op"],
                self.modules.name(event["module"]),
                event["count"],
                event["bytes"],
                event["seconds"],
            )
            for event in events["sums"]
        ]
        for consumer in self._consumers():
            consumer.collect(named, events["unlisted"], passes)
            for event in happenings:
                consumer.put({"type": "event", **event})

    def _end(self) -> None:
        self._gather()
        sample = self._sample()
        for consumer in self._consumers():
            consumer.put(sample)
            consumer.put_collected(self._now())
            if self._ending is not None:
                consumer.put({"type": "end", "seconds": self._now(), **self._ending})
        deadline = time.perf_counter() + CLOSING_SECONDS
        while any(r.waiting and not r.dead for r in self._readers.values()) and time.perf_counter() < deadline:
            for reader in self._readers.values():
                reader.flush()
            time.sleep(0.002)

    # -- lines --

    def _hello(self) -> dict[str, Any]:
        return {
            "type": "hello",
            "protocol": stream.PROTOCOL,
            "memmgr": sys.modules["memmgr"].__version__,
            "torch": str(torch.__version__),
            "python": sys.version.split()[0],
            "pid": self._pid,
            **where_in_job(self._native.objects_of),
            "command": list(getattr(sys, "orig_argv", sys.argv)),
            "script": list(sys.argv),
            "time": time.time(),
            "seconds": self._now(),
            **self._about.hello(),
            "map_states": list(MAP_STATES),
        }

    def _sample(self) -> dict[str, Any]:
        return {"type": "sample", "seconds": self._now(), **self._about.sample()}

    def _level(self) -> Level:
        """The bytes of a sample alone: a whole sample costs four times as much where the caches are cold."""
        now = self._native.stats()
        resident = now["resident_bytes.current"]
        evictable = max(0, min(resident, now["resident_cell_bytes"] - now["escaped_bytes"]))
        absent = now["evicted_now_bytes"], now["offloaded_now_bytes"]
        return self._now(), resident, evictable, *absent, self._ended + now["loop_turns"]

    def _cells(self, wanting: list[Consumer]) -> dict[str, Any]:
        self._look_for_names()
        watched = self._native.watch_cells(max(consumer.cells for consumer in wanting))
        cells = []
        for row in watched["cells"]:
            cell: dict[str, Any] = {**row}
            place, line = row["module"], row["line"]
            cell["name"] = self._name_of(cell.pop("storage"), place)
            cell["module"] = self.modules.name(place) or self._lines.place(line)
            cell["line"] = self._lines.of(line, row["op"], row["bytes"])
            cells.append(cell)
        shares: dict[str, list[int]] = {}
        for number, sums in watched["modules"].items():
            share = shares.setdefault(self.modules.name(number) or "?", [0, 0, 0])
            for i, size in enumerate((sums["resident"], sums["fixed"], sums["absent"])):
                share[i] += size
        by_module = [
            {"module": name, "resident_bytes": resident, "fixed_bytes": fixed, "absent_bytes": absent}
            for name, (resident, fixed, absent) in sorted(shares.items(), key=lambda item: -sum(item[1]))
        ]
        return {
            "type": "cells",
            "seconds": self._now(),
            "cells": cells,
            "modules": by_module[: max(consumer.modules for consumer in wanting)],
        }

    def _find_names(self) -> None:
        self._named = by_storage(self._native, self._about.owners())

    def _name_of(self, storage: int, place: int) -> str | None:
        """A gradient's storage may have been another tensor's since its name was found: the pager knows where it was made."""
        named = self._named.get(storage) if place <= len(PLACES) else None
        if named is None or (named.purpose is Purpose.GRADIENTS and place not in (BACKWARD, GRADIENTS)):
            return None
        return named.name

    def _explained(self) -> dict[str, Any]:
        """The holders now, or at the peak of the last recorded pass if they are more. Those of a leak are in the former."""
        found = self._about.explain()
        held, most = (sum(holder.bytes for holder in holders) for holders in (found.now, found.peak))
        at_peak = most > held and not found.leaks
        rows = [
            {
                "kind": holder.kind,
                "name": holder.name,
                "module": holder.module,
                "line": holder.where,
                "bytes": holder.bytes,
                "absent_bytes": None if at_peak else holder.absent_bytes,
                "count": holder.count,
                "leak": any(_is_of(holder, leak) for leak in found.leaks),
            }
            for holder in (found.peak if at_peak else found.now)
        ]
        rows.sort(key=lambda row: not row["leak"])
        lines = dict(list(found.by_line(peak=at_peak).items())[:MOST_HOLDERS])
        return {
            "type": "explained",
            "seconds": self._now(),
            "at_peak": at_peak,
            "bytes": (most if at_peak else held) + found.small_bytes,
            "leaks": len(found.leaks),
            "holders": rows[:MOST_HOLDERS],
            "lines": lines,
        }

    def _map(self, wanting: list[Consumer]) -> dict[str, Any]:
        return {
            "type": "map",
            "seconds": self._now(),
            **self._native.memory_map(max(consumer.columns for consumer in wanting)),
        }

    def _holders(self, wanting: list[Consumer]) -> dict[str, Any]:
        self._about.look()
        kinds, modules = self.modules.holdings(self._about.device_type)
        ranked = sorted(modules.items(), key=lambda item: -item[1])[:100]
        return {"type": "holders", "seconds": self._now(), "kinds": kinds, "modules": dict(ranked)}
