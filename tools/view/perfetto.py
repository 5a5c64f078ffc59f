"""A run as a trace that Perfetto and chrome://tracing show: bytes by place as counters, passes as slices, events as
marks.

The format is Chrome's "Trace Event Format", JSON: times in microseconds, one object an event. A process of the trace is one
budget; a log's ranks lie beside each other on one clock.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from memmgr.config.sizes import UNLIMITED
from memmgr.observe.states import KINDS
from memmgr.policies.trace import Trace
from memmgr.tools.view import period
from memmgr.tools.view.run_state import LAYERS, RunState

Event = dict[str, Any]
_THREADS = {1: "passes", 2: "evicted and restored", 3: "plans, errors"}
_COSTS = ("recompute", "reload", "stall")


def trace(sessions: Sequence[tuple[str, RunState]], passes: Sequence[tuple[str, Trace]] = ()) -> dict[str, Any]:
    """The whole file, of one or several sessions with the names of their logs, and of recorded passes.

    Known limitations: of recomputing and waiting the stream has sums over half a second and more, so they are marks and a share
    of the time, not slices. Passes beyond the 32 that a line tells one by one are one slice.
    """
    opened = [float(one.hello.get("time", 0.0)) - float(one.hello.get("seconds", 0.0)) for _, one in sessions]
    events: list[Event] = []
    for number, ((name, watched), begun) in enumerate(zip(sessions, opened, strict=True), start=1):
        shift = begun - min(opened)
        for event in _session(name, watched):
            if "ts" in event:
                event["ts"] = round(1e6 * (event["ts"] + shift))
            if "dur" in event:  # its end, until here: neighbouring slices must not overlap after rounding
                event["dur"] = max(0, round(1e6 * (event["dur"] + shift)) - event["ts"])
            if "tid" in event:  # some viewers take a thread's number for unique across processes
                event["tid"] += 10 * number
            events.append({**event, "pid": number})
    events += period.events(passes, len(sessions) + 1)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _session(name: str, watched: RunState) -> Iterator[Event]:
    """One budget's events, with times in seconds since it opened."""
    rank = watched.hello.get("rank")
    command = shlex.join(str(word) for word in watched.hello.get("command", []))
    who = f"{name}, process {watched.pid}" + ("" if rank is None else f", rank {rank}")
    yield _named("process_name", f"{who}: {command}")
    for tid, title in _THREADS.items():
        yield {**_named("thread_name", title), "tid": tid}
        yield {"ph": "M", "name": "thread_sort_index", "tid": tid, "args": {"sort_index": tid}}
    yield from _memory(watched)
    yield from _passes(watched)
    yield from _happened(watched)
    yield from _rare(watched)


def _named(what: str, name: str) -> Event:
    return {"ph": "M", "name": what, "args": {"name": name}}


def _counter(name: str, seconds: float, **values: float) -> Event:
    return {"ph": "C", "name": name, "ts": seconds, "args": values}


def _mark(name: str, seconds: float, tid: int, args: dict[str, Any]) -> Event:
    return {"ph": "i", "s": "t", "name": name, "ts": seconds, "tid": tid, "args": args}


def _slice(name: str, begin: float, end: float, tid: int, args: dict[str, Any]) -> Event:
    return {"ph": "X", "name": name, "ts": begin, "dur": end, "tid": tid, "args": args}


def _memory(watched: RunState) -> Iterator[Event]:
    for point in watched.points:
        yield _counter("resident", point.seconds, bytes=point.resident_bytes)
        yield _counter("absent", point.seconds, bytes=point.absent_bytes)
        layers = dict(zip(LAYERS, point.layers, strict=True))
        yield _counter("memory by layer", point.seconds, **layers)
        if f"moved_bytes.{KINDS[0]}" in point.counted:
            moved = {kind: point.figure(f"moved_bytes.{kind}") for kind in KINDS}
            yield _counter("moved since the beginning", point.seconds, **moved)
        if point.budget_bytes < UNLIMITED:
            yield _counter("budget", point.seconds, bytes=point.budget_bytes)


def _passes(watched: RunState) -> Iterator[Event]:
    first, before = 1, 0.0
    for one in watched.passes:
        last = first + one.count - 1
        begin = max(before, one.begin)  # a viewer loses slices that overlap, if only by the time of reading a clock
        turn = max(begin, one.end - one.backward_seconds)
        args = {"resident peak bytes": one.resident_peak_bytes, "unmanaged peak bytes": one.unmanaged_peak_bytes}
        yield _slice(f"pass {first}" if one.count == 1 else f"passes {first} to {last}", begin, one.end, 1, args)
        if one.count == 1:
            yield _slice("forward", begin, turn, 1, {})
            yield _slice("backward", turn, one.end, 1, {})
        first, before = last + 1, one.end


def _happened(watched: RunState) -> Iterator[Event]:
    before = 0.0
    for seconds, sums in watched.happened:
        for what, found in sums.items():
            args = {"count": found.count, "bytes": found.bytes, "seconds": found.seconds, "since": before}
            yield _mark(what, seconds, 2, args)
        window = max(seconds - before, 1e-9)
        shares = {what: 100 * sums[what].seconds / window if what in sums else 0.0 for what in _COSTS}
        yield _counter("percent of the time", before, **shares)
        before = seconds
    yield _counter("percent of the time", before, **dict.fromkeys(_COSTS, 0.0))


def _rare(watched: RunState) -> Iterator[Event]:
    for line in watched.rare:
        args = {key: value for key, value in line.items() if key not in ("type", "what", "seconds")}
        name, at = str(line["what"]).replace("_", " "), float(line["seconds"])
        took = min(float(line.get("took_seconds", 0.0)), at)
        yield _slice(f"making a {name}", at - took, at, 3, args) if took else _mark(name, at, 3, args)
    if watched.end is not None:
        name = "failed" if watched.end["failed"] else "end"
        yield _mark(name, float(watched.end["seconds"]), 3, {"summary": str(watched.end.get("summary", ""))})
