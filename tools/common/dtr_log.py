"""Reads the operator logs that DTR's authors recorded (one JSON object a line; sizes in bytes, times in ns)."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from memmgr.policies.trace import Trace, TraceBuilder, TraceError


class _CutShort(Exception):
    """The lines end inside an op."""


def read_dtr_log(path: Path) -> Trace:
    """The trace of an operator log, or of one compressed with xz.

    A log that ends between the lines of one op (cut after any line) is a trace without that op, `complete=False`.
    Raises `TraceError`: no such file, not such a log, or a line that makes no sense; the message names file and line.
    """
    try:
        opener = lzma.open if path.suffix == ".xz" else open
        with opener(path, "rt", encoding="utf-8") as lines:
            return parse_dtr_log(lines)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}: not a text file") from None


def parse_dtr_log(lines: Iterable[str]) -> Trace:
    """The trace that `lines` describe; see `read_dtr_log`. Lines before START are skipped.

    Raises `TraceError`: the message names the line.
    """
    numbered = _records(lines)
    builder = TraceBuilder(device="Titan V (operator log)")
    number = 0
    started = complete = True
    try:
        number, started = _to_start(numbered)
        for number, record in numbered:  # noqa: B007 (the message below names it)
            _event(builder, record, numbered)
    except _CutShort:
        complete = False
    except KeyError as error:
        raise TraceError(f"line {number}: no {error.args[0]}") from None
    except TraceError as error:
        raise TraceError(str(error) if str(error).startswith("line ") else f"line {number}: {error}") from None
    except (TypeError, ValueError) as error:
        raise TraceError(f"line {number}: {error}") from None
    if not started:
        raise TraceError("no START annotation: not an operator log" if number else "empty: not an operator log")
    return builder.build(complete=complete)


_Records = Iterator[tuple[int, dict[str, Any]]]


def _records(lines: Iterable[str]) -> _Records:
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise TraceError(f"line {number} is not a JSON object (cut short?): {line.strip()[:60]!r}") from None
        if not isinstance(record, dict) or not isinstance(record.get("INSTRUCTION"), str):
            raise TraceError(f"line {number} has no INSTRUCTION: not an operator log")
        yield number, record


def _to_start(records: _Records) -> tuple[int, bool]:
    number = 0
    for number, record in records:
        if record["INSTRUCTION"] == "ANNOTATE" and record["ANNOTATION"] == "START":
            return number, True
    return number, False


def _event(builder: TraceBuilder, record: dict[str, Any], records: _Records) -> None:
    match record["INSTRUCTION"]:
        case "CONSTANT":
            builder.constant(record["NAME"], int(_detail(records, "MEMORY")))
        case "COPY":
            builder.copy(record["SRC"], record["DST"])
        case "COPY_FROM":
            builder.copy_from(record["SRC"], record["DST"])
        case "RELEASE":
            builder.release(record["NAME"])
        case "CALL":
            results = [
                (name, int(_detail(records, "MEMORY")), int(_detail(records, "ALIAS"))) for name in record["RESULT"]
            ]
            builder.call(record["NAME"], int(record["TIME"]) / 1e9, record["ARGS"], results)
        case "MUTATE":
            builder.mutate(record["NAME"], int(record["TIME"]) / 1e9, record["ARGS"], record["MUTATE"])
        case "ANNOTATE":
            if record["ANNOTATION"] == "BACKWARD":
                builder.begin_backward()
        case other:
            raise TraceError(f"unknown instruction {other!r}")


def _detail(records: _Records, key: str) -> Any:
    """The value of a line that belongs to the op before it."""
    for number, record in records:
        if record["INSTRUCTION"] != key:
            raise TraceError(f"line {number}: {record['INSTRUCTION']} where {key} was due")
        return record[key]
    raise _CutShort
