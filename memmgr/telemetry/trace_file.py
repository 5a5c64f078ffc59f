"""The trace file: one JSON object a line, gzip if the name ends in .gz. `memmgr simulate` reads it.

A process that dies while it writes leaves a file without its last line, which the reader refuses.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from memmgr.policies.trace import HELD, VERSION, Op, OpKind, Storage, TierLink, Trace, TraceError

_MAGIC = "memmgr_trace"


ABOUT = ("rank", "world_size", "job", "host")
"""Facts about the process that the head may contain: its rank of how many, in which job, on which machine."""


def write_trace(path: Path, trace: Trace, about: Mapping[str, Any] | None = None) -> None:
    """Writes a whole trace.

    Args:
        path: compressed if it ends in .gz.
        trace: the pass.
        about: the known entries of `ABOUT`.

    Raises:
        OSError: the file cannot be written.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        for record in _records(trace, about or {}):
            file.write(json.dumps(record, separators=(",", ":")) + "\n")


def _records(trace: Trace, about: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The lines: the head, the events in order, the end."""
    yield {
        _MAGIC: VERSION,
        "device": trace.device,
        "links": [asdict(link) for link in trace.links],
        "copy_on_write": trace.copy_on_write,
        **{key: about[key] for key in ABOUT if about.get(key) is not None},
    }
    unpinned: dict[int, list[int]] = {}
    for i, s in enumerate(trace.storages):
        if 0 < s.pinned_until < HELD:
            unpinned.setdefault(s.pinned_until, []).append(i)
    for k in range(len(trace.ops) + 1):
        if k == trace.backward_at:
            yield {"backward": True}
        if k in unpinned:  # the program itself no longer holds these
            yield {"unpin": unpinned[k]}
        if trace.released_before[k]:
            yield {"free": trace.released_before[k]}
        if k < len(trace.ops):
            yield _ran(trace.ops[k], [trace.storages[s] for s in trace.ops[k].outputs])
    yield {"end": len(trace.ops), **({"cycle": trace.cycle} if trace.cycle else {})}


def _ran(op: Op, outputs: list[Storage]) -> dict[str, Any]:
    """One op; empty fields are left out."""
    record = {
        "op": op.name,
        "s": op.seconds,
        "in": op.inputs,
        "out": [[s.name, s.size_bytes] for s in outputs],
        "kind": int(op.kind),
        "writes": op.writes,
        "module": op.module,
        "pinned": [i for i, s in enumerate(outputs) if s.pinned_until > 0],
    }
    return {key: value for key, value in record.items() if value or key in ("op", "s")}


def read_trace(path: Path) -> Trace:
    """Reads a trace file.

    Raises:
        TraceError: no such file, another format or version, cut short, or a line that makes no sense; the message names
            file and line.
    """
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as lines:
            return _parse(enumerate(lines, 1))
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    except (EOFError, zlib.error):
        raise TraceError(f"{path}: cut short inside its compressed data") from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}: not a text file") from None


def read_about(path: Path) -> dict[str, Any]:
    """The entries of `ABOUT` in a trace file; empty if it is not one."""
    if not is_trace(path):
        return {}
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        head = _object(1, file.readline())
    return {key: head[key] for key in ABOUT if key in head}


def is_trace(path: Path) -> bool:
    """Tells if the file begins as a trace file does. An unreadable file does not."""
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            return file.read(len(_MAGIC) + 4).startswith(f'{{"{_MAGIC}"')
    except (OSError, EOFError, zlib.error, UnicodeDecodeError):
        return False


def _parse(lines: Iterator[tuple[int, str]]) -> Trace:
    number, line = next(lines, (0, ""))
    head = _object(number, line) if number else {}
    if _MAGIC not in head:
        raise TraceError("not a trace file of memmgr" if number else "empty")
    if head[_MAGIC] != VERSION:
        raise TraceError(f"trace version {head[_MAGIC]!r}; this memmgr reads version {VERSION}")
    ops: list[Op] = []
    storages: list[Storage] = []
    backward_at: int | None = None
    ended = False
    cycle: tuple[tuple[int, int], ...] = ()
    for number, line in lines:
        record = _object(number, line)
        try:
            if ended:
                raise TraceError("there is more after the end")
            if "end" in record:
                ended = True
                if record["end"] != len(ops):
                    raise TraceError(f"{record['end']} ops announced, {len(ops)} found")
                cycle = tuple((int(end), int(start)) for end, start in record.get("cycle", ()))
            elif "backward" in record:
                backward_at = len(ops)
            elif "free" in record:
                for s in record["free"]:
                    storages[s] = replace(storages[s], released=len(ops))
            elif "unpin" in record:
                for s in record["unpin"]:
                    storages[s] = replace(storages[s], pinned_until=len(ops))
            else:
                _op(record, ops, storages)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise TraceError(f"line {number}: {what}") from None
    if not ended:
        raise TraceError(f"cut short: no end after line {number} ({len(ops)} ops)")
    try:
        links, device, how = tuple(TierLink(**link) for link in head["links"]), head["device"], head["copy_on_write"]
    except (KeyError, TypeError) as error:
        raise TraceError(f"line 1: {f'no {error}' if isinstance(error, KeyError) else error}") from None
    return Trace(tuple(ops), tuple(storages), device, backward_at, links, how, cycle=cycle).check()


def _object(number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise TraceError(f"line {number} is not a JSON object (cut short?)")
    return record


def _op(record: dict[str, Any], ops: list[Op], storages: list[Storage]) -> None:
    k, first = len(ops), len(storages)
    for name, size in record.get("out", ()):
        if not isinstance(size, int) or size < 0:
            raise TraceError(f"{name} has {size!r} bytes")
        storages.append(Storage(name, size, k))
    for i in record.get("pinned", ()):
        storages[first + i] = replace(storages[first + i], pinned_until=HELD)
    pairs = tuple((int(old), int(new)) for old, new in record.get("writes", ()))
    ops.append(
        Op(
            record["op"],
            float(record["s"]),
            tuple(record.get("in", ())),
            tuple(range(first, len(storages))),
            OpKind(record.get("kind", 0)),
            pairs,
            str(record.get("module", "")),
        )
    )
