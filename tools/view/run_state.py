"""State of one process from its telemetry: takes the lines of the stream, and returns data for the views. `top` feeds
it from a socket, `report` from a file. It does not draw, and does not import torch.
"""

from __future__ import annotations

import json
import shlex
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memmgr.config.sizes import UNLIMITED, show_floor, show_seconds, show_size
from memmgr.observe.figures import FOLLOWED
from memmgr.observe.states import Flows, flows
from memmgr.telemetry.stream import PROTOCOL, processes
from memmgr.tools.common.usage_error import UsageError

LAYERS = ("fixed", "evictable", "evicted", "offloaded")
"""The layers of a moment's memory, from below, by their names in every picture."""

GONE = "gone (killed?)"
"""The state of a process whose stream ended without its `end`."""

EVENTS = {
    "evict": "evicted", "offload": "offloaded", "reload": "read back", "recompute": "recomputed", "stall": "waits for room",
}  # fmt: skip
"""The stream's events, as views name them."""


@dataclass(frozen=True)
class Point:
    """One sample. `evictable` is part of `resident`; `evicted` and `offloaded` are absent."""

    seconds: float
    resident_bytes: int
    evictable_bytes: int
    evicted_bytes: int
    offloaded_bytes: int
    budget_bytes: int
    counted: Mapping[str, float]  # the `FOLLOWED` figures that the process reports

    def figure(self, name: str) -> float:
        """One of `FOLLOWED`; 0 if the process does not report it."""
        return self.counted.get(name, 0)

    @property
    def passes(self) -> int:
        """Passes that have ended."""
        return int(self.figure("passes"))

    @property
    def absent_bytes(self) -> int:
        """Bytes that are absent and can be restored."""
        return self.evicted_bytes + self.offloaded_bytes

    @property
    def unmanaged_bytes(self) -> int:
        """Bytes that would be resident without memmgr."""
        return self.resident_bytes + self.absent_bytes

    @property
    def layers(self) -> tuple[int, ...]:
        """The bytes of each of `LAYERS`; their sum is `unmanaged_bytes`."""
        return (
            self.resident_bytes - self.evictable_bytes,
            self.evictable_bytes,
            self.evicted_bytes,
            self.offloaded_bytes,
        )


@dataclass(frozen=True)
class Pass:
    """One pass, or several of which only the sums are known (`count`)."""

    end: float
    forward_seconds: float
    backward_seconds: float
    resident_peak_bytes: int
    unmanaged_peak_bytes: int
    count: int = 1

    @property
    def begin(self) -> float:
        """When its forward began, in seconds since the budget opened."""
        return max(0.0, self.end - self.forward_seconds - self.backward_seconds)


@dataclass
class Sum:
    """Events, summed by kind, op and module."""

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def add(self, count: int, size: int, seconds: float) -> None:
        """Adds to all three."""
        self.count += count
        self.bytes += size
        self.seconds += seconds


class RunState:
    """The state of one stream.

    Args:
        pid: whose stream it is, as far as is known before it says so itself.
        points: how many samples are kept; a report keeps them all (None).
    """

    def __init__(self, pid: int = 0, points: int | None = 600) -> None:
        self.pid = pid
        self.hello: dict[str, Any] = {}
        self.points: deque[Point] = deque(maxlen=points)
        self.sample: dict[str, Any] = {}
        self.cells: dict[str, Any] = {}
        self.map: dict[str, Any] = {}
        self.holders: dict[str, Any] = {}
        self.explained: dict[str, Any] = {}
        self.passes: deque[Pass] = deque(maxlen=points)
        self.pass_count = 0
        self.happened: deque[tuple[float, dict[str, Sum]]] = deque(maxlen=points)
        self.rare: deque[dict[str, Any]] = deque(maxlen=500)
        self.sums: dict[tuple[str, str | None, str | None], Sum] = {}
        self.unlisted = 0
        self.log: deque[tuple[float, str]] = deque(maxlen=500)
        self.plans: deque[tuple[float, str]] = deque(maxlen=100)
        self.end: dict[str, Any] | None = None
        self.gone = False  # the stream has ended, and its end did not come
        self.limit_seconds = 0.0  # when the budget came that is a share of the need; passes before it measured
        self.silent_seconds = 0.0  # since the next line was due; 0 after the end
        self.error = ""
        self.runs_on = False  # its lines come from a file that its process still writes

    @property
    def of_log(self) -> bool:
        """Its lines come from a file, which has all of them and nothing that is so now."""
        return self.points.maxlen is None

    @property
    def over(self) -> bool:
        """Nothing of it is so now: it has ended, its process has gone, or its lines come from a file."""
        return self.end is not None or self.gone or self.of_log

    @property
    def stats(self) -> dict[str, Any]:
        """`memmgr.stats()` at the end, or as the last sample had it."""
        if self.end is not None and self.end.get("stats"):
            return dict(self.end["stats"])
        return dict(self.sample.get("total", {}))

    @property
    def command(self) -> str:
        """The command line, with Python's and memmgr's names in place of their paths."""
        words = [clean(str(word)) for word in self.hello.get("command", [])]
        return shlex.join([word.rpartition("/")[2] if i < 2 else word for i, word in enumerate(words)])

    @property
    def program(self) -> str:
        """The script and its arguments; the whole command where no script is known."""
        words = [clean(str(word)) for word in self.hello.get("script") or ()]
        if not words or words[0] in ("", "-c"):
            return self.command
        folder, _, name = words[0].removesuffix("/__main__.py").rpartition("/")
        return shlex.join([name or folder, *words[1:]])

    @property
    def tier(self) -> str:
        """The tier below the device: disk, host, or unknown."""
        return clean(str(self.hello.get("tier") or ""))

    @property
    def leaks(self) -> list[str]:
        """A sentence about each leak that goes on."""
        return [clean(str(text)) for text in self.sample.get("leaks", [])]

    @property
    def now(self) -> float:
        """Seconds since the budget opened, as far as is heard."""
        return float(self.sample.get("seconds", self.hello.get("seconds", 0.0)))

    @property
    def budget_bytes(self) -> int:
        """The limit; `UNLIMITED` where there is none."""
        return int(self.sample.get("budget_bytes", self.hello.get("budget_bytes", UNLIMITED)))

    @property
    def binary(self) -> bool:
        """Sizes are shown in powers of two, as the user wrote the budget."""
        return bool(self.hello.get("binary"))

    def size(self, count: float) -> str:
        """As views show it."""
        return show_size(count, binary=self.binary)

    def feed(self, line: dict[str, Any]) -> None:
        """Takes one line. Types that it does not know are passed over.

        Raises:
            UsageError: another version of the format, or malformed fields.
        """
        taken = getattr(self, f"_take_{line.get('type')}", None)
        if taken is None:
            return
        try:
            taken(line)
        except UsageError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"a line of type {line.get('type')!r} that is not of this format: {error!r}") from None

    def _take_hello(self, line: dict[str, Any]) -> None:
        spoken = line.get("protocol")
        if spoken != PROTOCOL:
            raise UsageError(
                f"process {line.get('pid', '?')} writes telemetry version {spoken} (memmgr {line.get('memmgr', '?')}), and "
                f"this memmgr reads version {PROTOCOL}: use the memmgr that the process has"
            )
        self.hello = line
        self.pid = int(line["pid"])
        limit = int(line["budget_bytes"])
        self._note(line, "attached" if limit == UNLIMITED else f"attached; the budget is {self.size(limit)}")

    def _take_sample(self, line: dict[str, Any]) -> None:
        total = line["total"]
        self.sample = line
        self.points.append(
            Point(
                float(line["seconds"]),
                int(line["resident_bytes"]),
                int(line["evictable_bytes"]),
                int(line["evicted_bytes"]),
                int(line["offloaded_bytes"]),
                int(line["budget_bytes"]),
                {name: +total[name] for name in FOLLOWED if name in total},
            )
        )

    def _take_levels(self, line: dict[str, Any]) -> None:
        counted = self.points[-1].counted if self.points else {}
        for seconds, *sizes, passes in line["each"]:
            resident, evictable, evicted, offloaded = map(int, sizes)
            each = {**counted, "passes": int(passes)}
            self.points.append(Point(float(seconds), resident, evictable, evicted, offloaded, self.budget_bytes, each))

    def _take_passes(self, line: dict[str, Any]) -> None:
        count = int(line["count"])
        told = [Pass(float(p[0]), float(p[1]), float(p[2]), int(p[3]), int(p[4])) for p in line.get("each", ())]
        self.pass_count += count
        if len(told) < count:
            spent = float(line["forward_seconds"]), float(line["backward_seconds"])
            peaks = int(line["resident_peak_bytes"]), int(line["unmanaged_peak_bytes"])
            rest = spent[0] - sum(p.forward_seconds for p in told), spent[1] - sum(p.backward_seconds for p in told)
            end = told[0].begin if told else float(line["seconds"])
            self.passes.append(Pass(end, max(0.0, rest[0]), max(0.0, rest[1]), *peaks, count - len(told)))
        self.passes.extend(told)

    def _take_events(self, line: dict[str, Any]) -> None:
        now: dict[str, Sum] = {}
        for item in line["items"]:
            sums = (int(item["count"]), int(item["bytes"]), float(item["seconds"]))
            self.sums.setdefault((str(item["what"]), item["op"], item["module"]), Sum()).add(*sums)
            now.setdefault(str(item["what"]), Sum()).add(*sums)
        self.unlisted += int(line.get("unlisted", 0))
        said = [
            f"{EVENTS.get(what, what)} {s.count}x ({self.size(s.bytes)}{f', {show_seconds(s.seconds)}' if s.seconds else ''})"
            for what, s in now.items()
        ]
        if said:
            self.happened.append((float(line["seconds"]), now))
            self._note(line, "  ".join(said))

    def _take_event(self, line: dict[str, Any]) -> None:
        self.rare.append({**line, "seconds": float(line["seconds"])})
        text = str(line["what"]).replace("_", " ")
        if line["what"] == "budget_error":
            enough = int(line.get("enough_bytes", line["floor_bytes"]))
            text += f": a budget of {show_floor(enough, binary=self.binary)} ({enough:,} bytes) should do"
        if line["what"] == "plan":
            text += (
                f": of {int(line['ops'])} ops {int(line['rematerialize'])} run again, {int(line['offload'])} offloads"
            )
            if "took_seconds" in line:
                text += f"; made in {show_seconds(float(line['took_seconds']))}"
            if "overhead" in line:
                text += f", predicted {float(line['overhead']):.3f}x"
            if "lower_bound" in line:
                text += f", bound {float(line['lower_bound']):.3f}x"
        if line["what"] in ("no_plan", "left_plan", "limit"):
            text += f": {line.get('text', 'no reason is given')}"
        if line["what"] == "limit":
            self.limit_seconds = float(line["seconds"])
        if line["what"] in ("plan", "no_plan", "left_plan"):
            self.plans.append((float(line["seconds"]), text))
        self._note(line, text)

    def _take_cells(self, line: dict[str, Any]) -> None:
        if not isinstance(line["cells"], list) or not isinstance(line["modules"], list):
            raise ValueError("cells, modules")
        self.cells = line

    def _take_map(self, line: dict[str, Any]) -> None:
        if not isinstance(line["columns"], list):
            raise ValueError("columns")
        self.map = line

    def _take_holders(self, line: dict[str, Any]) -> None:
        if not isinstance(line["kinds"], dict) or not isinstance(line["modules"], dict):
            raise ValueError("kinds, modules")
        self.holders = line

    def _take_explained(self, line: dict[str, Any]) -> None:
        if not isinstance(line["holders"], list) or not isinstance(line["lines"], dict):
            raise ValueError("holders, lines")
        self.explained = max(self.explained, line, key=_worth)

    def _take_dropped(self, line: dict[str, Any]) -> None:
        self._note(self.sample, f"{int(line['lines'])} lines were dropped: this reader was slow")

    def _take_error(self, line: dict[str, Any]) -> None:
        self.error = str(line["text"])
        self._note(self.sample, self.error)

    def _take_gone(self, line: dict[str, Any]) -> None:
        self.gone = True
        self._note(line, "gone: the process was killed, or has left its budget in another way that sends no end")

    def _take_end(self, line: dict[str, Any]) -> None:
        self.end = line
        self._note(line, self.ending)

    def _note(self, line: dict[str, Any], text: str) -> None:
        self.log.append((float(line.get("seconds", 0.0)), text))

    # -- for the views --

    @property
    def ending(self) -> str:
        """The way in which the run ended; empty: not yet."""
        if self.end is None:
            return ""
        if not self.end["failed"]:
            return "ended"
        name = clean(str(self.end.get("error") or ""))
        return "was interrupted (Ctrl-C)" if name == "KeyboardInterrupt" else f"ended by {name or 'an exception'}"

    def shares(self, window_seconds: float = 10.0) -> tuple[float, float]:
        """Recomputing and waiting, as shares of the last seconds; until so many were seen, of all the time so far."""
        if not self.points:
            return 0.0, 0.0
        last = self.points[-1]
        if not self.seen_for(window_seconds):
            so_far = max(last.seconds, 1e-9)
            return last.figure("recompute_seconds") / so_far, last.figure("stall_seconds") / so_far
        first = self._since(window_seconds)
        spent = max(last.seconds - first.seconds, 1e-9)
        recompute, stall = (
            max(0.0, last.figure(name) - first.figure(name)) / spent for name in ("recompute_seconds", "stall_seconds")
        )
        return recompute, stall

    def flows(self, window_seconds: float = 10.0) -> Flows | None:
        """Model states: where they are, and bytes moved per pass in the last seconds, from the pass that was running at
        their begin. At the first look, and at the end, of the whole run.
        """
        since: dict[str, Any] = {}
        for point in reversed(self.points if self.end is None else ()):
            last = self.points[-1]
            if point.seconds <= last.seconds - window_seconds and point.passes < last.passes:
                since = {**point.counted, "wall_seconds": point.seconds}
                break
        return flows(self.stats, since)

    def rate(self, window_seconds: float = 10.0) -> tuple[float, str]:
        """Steps of the optimizer a second, over the same seconds as `shares`; passes if no step was recorded. Returns:
        The rate and its unit: "step" or "pass". A step that accumulates gradients has several passes.
        """
        if not self.points:
            return 0.0, "pass"
        last = self.points[-1]
        of, name = ("step", "steps") if last.figure("steps") else ("pass", "passes")

        def count(point: Point) -> float:
            return point.figure(name)

        if not self.seen_for(window_seconds):
            return count(last) / max(last.seconds, 1e-9), of
        first = self._since(window_seconds)
        return max(0, count(last) - count(first)) / max(last.seconds - first.seconds, 1e-9), of

    def seen_for(self, seconds: float = 10.0) -> bool:
        """Tells if samples were seen for so long."""
        return len(self.points) > 1 and self.points[-1].seconds - self.points[0].seconds >= seconds

    def _since(self, window_seconds: float) -> Point:
        last = self.points[-1]
        first = next((p for p in self.points if p.seconds >= last.seconds - window_seconds), self.points[0])
        return self.points[-2] if first is last else first

    def by_plan(self, window_seconds: float = 10.0) -> bool:
        """Did most of the passes that ended in the last seconds follow a plan?"""
        if len(self.points) < 2:
            return False
        first, last = self._since(window_seconds), self.points[-1]
        planned, all_passes = (last.figure(name) - first.figure(name) for name in ("planned_passes", "passes"))
        return 2 * planned > all_passes

    def by(self, key: str) -> list[tuple[str, dict[str, Sum]]]:
        """Sums by `op` or by `module`, most seconds first, then most bytes."""
        found: dict[str, dict[str, Sum]] = {}
        for (what, op, module), sums in self.sums.items():
            name = (
                "(waiting for room)" if what == "stall" else origin(op, module) if key == "op" else name_of(key, module)
            )
            found.setdefault(name, {}).setdefault(what, Sum()).add(sums.count, sums.bytes, sums.seconds)

        def weight(item: tuple[str, dict[str, Sum]]) -> tuple[float, int]:
            return -sum(s.seconds for s in item[1].values()), -sum(s.bytes for s in item[1].values())

        return sorted(found.items(), key=weight)


def _worth(explained: dict[str, Any]) -> tuple[bool, bool, int]:
    """The rank of a line of holders: one with leaks is shown before one without, then one of more bytes before one of fewer."""
    return bool(explained), bool(explained.get("leaks")), int(explained.get("bytes", 0))


def clean(text: str) -> str:
    """The text without control characters and characters that the terminal cannot encode (names of programs may contain
    any).
    """
    return "".join(c if c.isprintable() else "?" for c in text)


def name_of(key: str, name: Any) -> str:
    """The name of an op or a module (`key`) in every view: short, and in words if the stream has none."""
    if name is None or name == "?":
        return "(not recorded)"
    if key == "op":
        name = str(name).removeprefix("aten.").removeprefix("aten::").removesuffix(".default")
    return clean(str(name))


def origin(op: Any, module: Any, name: Any = None) -> str:
    """A tensor in words: the name of a parameter or state, else its op, else the place that it comes from."""
    if name is not None:
        return clean(str(name))
    return name_of("module", module) if op is None and str(module).startswith("(") else name_of("op", op)


def parse_line(data: bytes | str) -> dict[str, Any]:
    """One line of the stream.

    Raises:
        UsageError: it is not a JSON object.
    """
    try:
        line = json.loads(data)
    except (ValueError, RecursionError):
        raise UsageError("it is not lines of JSON") from None
    if not isinstance(line, dict):
        raise UsageError("it is not lines of JSON objects")
    return line


def is_log(path: Path) -> bool:
    """Does it begin as a telemetry log does?"""
    try:
        with path.open("rb") as file:
            return file.read(15) == b'{"type":"hello"'
    except OSError:
        return False


def read_log(path: Path) -> tuple[list[RunState], str]:
    """The sessions in a log, one for each budget that was opened, and a sentence about missing parts (or "").

    Raises:
        UsageError: it cannot be read, it is no telemetry log, or it holds no sample.
    """
    sessions: list[RunState] = []
    missing = ""
    try:
        with path.open("rb") as file:
            for number, (line, last) in enumerate(_with_last(file), start=1):
                if not line.strip():
                    continue
                try:
                    found = parse_line(line)
                except UsageError:
                    if last and sessions:
                        missing = f"line {number} is cut off"
                        break
                    if number == 1 and line.strip() == b"{":
                        raise UsageError(f"{path}: this is a summary (run --json); name the file of --log") from None
                    raise UsageError(f"{path}: line {number} is no JSON object; is this a log of memmgr?") from None
                if found.get("type") == "hello":
                    sessions.append(RunState(points=None))
                elif not sessions:
                    raise UsageError(f"{path}: it does not begin as a log of memmgr does")
                try:
                    sessions[-1].feed(found)
                except UsageError as error:
                    raise UsageError(f"{path}: line {number}: {error}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    if not sessions:
        raise UsageError(f"{path} is empty")
    full = [session for session in sessions if session.points]
    if not full:
        raise UsageError(f"{path}: nothing but its beginning is there; the run ended before the first sample")
    if not missing and full[-1].end is None:
        full[-1].runs_on = full[-1].pid in processes()
        missing = (
            f"process {full[-1].pid} still writes it: memmgr top {full[-1].pid} shows the run as it is now"
            if full[-1].runs_on
            else "it has no end: the process was killed, or runs on another machine"
        )
    return full, missing


def _with_last(lines: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Each line, and whether it is the last one and lacks its end."""
    for line in lines:
        yield line, not line.endswith(b"\n")
