"""Consumers of the telemetry: readers on a socket, each with a bounded queue, and the log."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections import deque
from pathlib import Path
from typing import Any

from . import exclusive_output

QUEUE_LINES = 256
QUEUE_BYTES = 4 << 20
LONGEST_REQUEST = 4096
SHORTEST_SECONDS, LONGEST_SECONDS = 0.02, 3600.0
MOST_ITEMS = 64  # of one events line; the rest is one sum per kind
MOST_PASSES = 32  # listed one by one in a passes line; of the others only the sums


Level = tuple[float, int, int, int, int, int]
"""The bytes of a moment: seconds, resident, evictable, evicted, offloaded; passes that had ended."""


def dumps(line: dict[str, Any]) -> bytes:
    """One line of the stream."""
    return json.dumps(line, separators=(",", ":"), default=str).encode() + b"\n"


def log_path(path: str) -> Path:
    """Where this process's log goes: with several ranks each has a file of its own, `run.rank1.jsonl`."""
    wanted = Path(path).expanduser()
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdecimal() and world.isdecimal() and int(world) > 1:
        return wanted.with_suffix(f".rank{rank}{wanted.suffix}")
    return wanted


class Consumer:
    """A receiver of telemetry lines: how often it gets them, which kinds, and the sums since its last line."""

    interval_seconds = 1.0
    cells = 50
    modules = 200
    explains = False
    """It gets the holders of memory with each line of cells."""
    urgent = False
    """Its cells are wanted now, at any cost."""
    columns = 200

    def __init__(self) -> None:
        self.due = 0.0
        self.wants: frozenset[str] = frozenset()
        self._sums: dict[tuple[str, str | None, str | None], list[float]] = {}
        self._unlisted = 0
        self._passes: list[float] | None = None
        self._each: deque[list[float]] = deque(maxlen=MOST_PASSES)

    def send(self, data: bytes, *, sample: bool = False) -> None:
        """Takes a line as bytes; never blocks on a slow reader."""
        raise NotImplementedError

    def put(self, line: dict[str, Any]) -> None:
        """Takes a line."""
        self.send(dumps(line))

    def look(self, sample: dict[str, Any]) -> None:
        """Called with the sample that it is about to get: the kinds that it needs may depend on it."""

    def had(self, kind: str) -> None:
        """Records that a line of this kind was sent."""

    def collect(self, events: list[Any], unlisted: int, passes: list[tuple[int, int, float, float, float]]) -> None:
        """Adds events to the sums."""
        for what, op, module, count, nbytes, seconds in events:
            sums = self._sums.setdefault((what, op, module), [0, 0, 0.0])
            sums[0] += count
            sums[1] += nbytes
            sums[2] += seconds
        self._unlisted += unlisted
        for resident, unmanaged, forward, backward, ended in passes:
            self._each.append([ended, round(forward, 6), round(backward, 6), resident, unmanaged])
            pile = self._passes = self._passes or [0, 0, 0, 0.0, 0.0]
            pile[0] += 1
            pile[1], pile[2] = max(pile[1], resident), max(pile[2], unmanaged)
            pile[3] += forward
            pile[4] += backward

    def put_collected(self, now: float) -> None:
        """Sends the pile."""
        if self._passes is not None:
            count, resident, unmanaged, forward, backward = self._passes
            self.put(
                {
                    "type": "passes",
                    "seconds": now,
                    "count": int(count),
                    "resident_peak_bytes": int(resident),
                    "unmanaged_peak_bytes": int(unmanaged),
                    "forward_seconds": round(forward, 6),
                    "backward_seconds": round(backward, 6),
                    "each": list(self._each),
                }
            )
            self._passes = None
            self._each.clear()
        if self._sums or self._unlisted:
            self.put({"type": "events", "seconds": now, "items": self._items(), "unlisted": self._unlisted})
            self._sums, self._unlisted = {}, 0

    def _items(self) -> list[dict[str, Any]]:
        ranked = sorted(self._sums.items(), key=lambda item: (-item[1][2], -item[1][1]))
        rest: dict[str, list[float]] = {}
        for (what, _, _), sums in ranked[MOST_ITEMS:]:
            pile = rest.setdefault(what, [0, 0, 0.0])
            for i in range(3):
                pile[i] += sums[i]
        shown = [(*key, sums) for key, sums in ranked[:MOST_ITEMS]] + [(w, "others", None, s) for w, s in rest.items()]
        return [
            {
                "what": what,
                "op": op,
                "module": module,
                "count": int(sums[0]),
                "bytes": int(sums[1]),
                "seconds": round(sums[2], 9),
            }
            for what, op, module, sums in shown
        ]


class Log(Consumer):
    """A file of the same lines. It is sampled less often the longer the run is: some ten thousand samples a day.

    Between the samples it has levels: the bytes alone, which cost a quarter of a sample. The first of them are taken at any cost,
    so that a short run has a curve, too.

    Cells and holders are in it for the moments that matter, so often that the size of a file stays bounded: for a high that is
    a tenth above the last one that was looked at, and for a leak when it is found. A high of twice as many bytes is looked at
    at any cost. In the first pass every moment is a high; one that takes less than a second is not looked at.
    """

    FIRST_SECONDS, DOUBLED_AFTER = 0.5, 1000
    LEVEL_SECONDS, LEVELS_DOUBLED_AFTER, LEVELS_A_LINE = 0.02, 2000, 64
    HURRIED, LEAST_SECONDS = 200, 0.004
    GROWN, GROWN_MUCH, NEAR = 1.1, 2.0, 0.9
    FIRST_PASS_SECONDS = 1.0
    MOST_CELL_LINES = 24
    cells = 20
    modules = 20
    explains = True

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.error = ""
        self.interval_seconds = self.FIRST_SECONDS
        self.level_seconds = self.LEVEL_SECONDS
        self.level_due = 0.0
        self._samples = self._level_count = 0
        self._levels: list[Level] = []
        self._cell_lines = 0
        self._held = self._highest = self._looked_at = self._leaks = 0
        self._leaked = False  # a leak was found, and its holders were not looked at
        self.path, self._fd = exclusive_output.begin(path)

    def send(self, data: bytes, *, sample: bool = False) -> None:
        """Writes the line whole, after the levels before it. A failed write ends the log, never the run."""
        if self._levels:
            levels, self._levels = self._levels, []
            self.put({"type": "levels", "seconds": levels[-1][0], "each": levels})
        if self.error or self._fd < 0:
            return
        self._samples += sample
        if sample and self._samples % self.DOUBLED_AFTER == 0:
            self.interval_seconds *= 2
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            self.error = error.strerror or str(error)

    def take_level(self, level: Level, now: float) -> None:
        """Takes a level, and wants cells where it is a new high, or where a leak was found."""
        self._levels.append(level)
        self._level_count += 1
        self.level_due = now + (self.LEAST_SECONDS if self.hurries else self.level_seconds)
        if self._level_count % self.LEVELS_DOUBLED_AFTER == 0:
            self.level_seconds *= 2
        seconds, resident, _, evicted, offloaded, passes = level
        self._held = resident + evicted + offloaded
        self._highest = max(self._highest, self._held)
        high = self._held >= self.NEAR * self._highest and (passes or seconds > self.FIRST_PASS_SECONDS)
        self.urgent = self._leaked or bool(high and self._held > self.GROWN_MUCH * self._looked_at)
        wanted = self.urgent or (high and self._held > self.GROWN * self._looked_at)
        self.wants = frozenset({"cells"} if wanted and self._cell_lines < self.MOST_CELL_LINES else ())
        if len(self._levels) >= self.LEVELS_A_LINE:
            self.send(b"")

    def look(self, sample: dict[str, Any]) -> None:
        """Sees leaks that were found since the last sample."""
        found = len(sample["leaks"])
        self._leaked |= found > self._leaks
        self._leaks = max(self._leaks, found)

    def collect(self, events: list[Any], unlisted: int, passes: list[tuple[int, int, float, float, float]]) -> None:
        """Adds events to the sums; the peaks of passes are highs that no level may have met."""
        super().collect(events, unlisted, passes)
        self._highest = max([self._highest, *(peak for _, peak, *_ in passes)])

    @property
    def hurries(self) -> bool:
        """Levels are due at their time, at any cost."""
        return self._level_count < self.HURRIED

    def had(self, kind: str) -> None:
        """These were the cells of that moment."""
        self._cell_lines += 1
        self._looked_at = max(self._looked_at, self._held)
        self._leaked = self.urgent = False
        self.wants = frozenset()

    def close(self) -> None:
        """Closes the file. Unbuffered, so a forked child that closes its copy writes nothing."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1


class Reader(Consumer):
    """One connection. Lines wait in a bounded queue; the oldest are dropped, and counted."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._socket = connection
        self._queue: deque[bytes] = deque()
        self._queued = 0
        self._part = b""  # the unsent rest of a line
        self._asked = b""
        self._dropped = 0
        self.dead = False
        self.due = time.perf_counter()

    @property
    def waiting(self) -> bool:
        """There is something to send."""
        return bool(self._part or self._queue)

    def send(self, data: bytes, *, sample: bool = False) -> None:
        """Queues the line and sends as many bytes as the socket takes."""
        self._queue.append(data)
        self._queued += len(data)
        while len(self._queue) > QUEUE_LINES or (self._queued > QUEUE_BYTES and len(self._queue) > 1):
            self._queued -= len(self._queue.popleft())
            self._dropped += 1
        self.flush()

    def flush(self) -> None:
        """Sends as much as goes without waiting."""
        try:
            while not self.dead:
                if not self._part:
                    if self._dropped:
                        self._part, self._dropped = dumps({"type": "dropped", "lines": self._dropped}), 0
                    elif self._queue:
                        self._part = self._queue.popleft()
                        self._queued -= len(self._part)
                    else:
                        return
                sent = self._socket.send(self._part, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
                self._part = self._part[sent:]
        except BlockingIOError:
            return
        except OSError:
            self.dead = True

    def receive(self) -> None:
        """Takes the reader's requests; a malformed one is answered with an error."""
        try:
            data = self._socket.recv(65536, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.dead = True
            return
        *requests, self._asked = (self._asked + data).split(b"\n")
        if len(self._asked) > LONGEST_REQUEST:
            self.put({"type": "error", "text": f"a request is one line of at most {LONGEST_REQUEST} bytes"})
            self.dead = True
            return
        for request in requests[:16]:
            if request.strip():
                try:
                    self._settle(json.loads(request))
                except (ValueError, TypeError, RecursionError) as error:
                    self.put({"type": "error", "text": f"not understood: {str(error)[:200]}"})

    def _settle(self, request: Any) -> None:
        if not isinstance(request, dict):
            raise ValueError("a request is a JSON object")
        if "interval_seconds" in request:
            seconds = float(request["interval_seconds"])
            if not SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS:
                raise ValueError(f"interval_seconds: {SHORTEST_SECONDS} to {LONGEST_SECONDS}")
            self.interval_seconds = seconds
            self.due = min(self.due, time.perf_counter() + seconds)
        if "want" in request:
            wants = frozenset(str(w) for w in request["want"])
            if wants - {"cells", "map", "holders"}:
                raise ValueError("want: cells, map, holders")
            self.wants = wants
        if "cells" in request:
            self.cells = max(1, min(500, int(request["cells"])))
        if "columns" in request:
            self.columns = max(1, min(4096, int(request["columns"])))

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()
