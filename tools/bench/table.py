"""The tables: on a terminal, and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from memmgr.tools.common.console import megabytes

from .record import Record
from .rows import Row
from .systems import SYSTEMS, UNMANAGED

HEAD = (
    "model",
    "memory",
    "system",
    "peak",
    "of need",
    "resident",
    "step",
    "of reference",
    "quartiles",
    "processor",
    "same bits, or why not",
)
_BITS = {"yes": "yes", "no": "NO", "parameters": "yes, buffers differ"}


def title(row: Row) -> str:
    """The system's name: memmgr's are told apart, and those that are not compared with plain torch."""
    system = SYSTEMS[row.system]
    over = "" if system.reference == UNMANAGED else f", over {system.reference}"
    return (f"memmgr {row.system}" if system.policy else row.system) + over


def cells(rows: Iterable[Row], longest: int = 400) -> Iterator[list[str]]:
    """Words of each row; a reason, of `longest` letters at the most, takes the place of the figures."""
    for row in rows:
        if row.system == UNMANAGED and row.budget:
            continue  # a group's own reference: its ratio is one
        head = [row.model, row.budget or "its own", title(row)]
        if row.error:
            why = row.error if len(row.error) <= longest else row.error[: longest - 3] + "..."
            yield [*head, *[""] * 7, why]
            continue
        low, middle, high = row.ratios
        share = f"{row.inside_bytes / row.need_bytes:.0%}"
        figures = [megabytes(row.inside_bytes), share, megabytes(row.outside_bytes), f"{row.seconds * 1e3:,.0f} ms"]
        bits = _BITS[row.bits] + (", no plan" if _without_plan(row) else "")
        yield [*head, *figures, f"{middle:.2f}x", f"{low:.2f} to {high:.2f}", f"{row.processor:.2f}x", bits]


def _without_plan(row: Row) -> bool:
    """Memory was short, and the policy beneath the planner decided: none of the planner's schedules fits."""
    stats = row.stats or {}
    return SYSTEMS[row.system].planned and stats.get("reclaims", 0) > 0 and not stats.get("planned_passes")


LARGEST_HEAD = (
    "model",
    "memory",
    "system",
    "batch",
    "of unmanaged",
    "a sample",
    "of unmanaged's",
    "processor",
    "peak, or why not",
)


def largest_cells(record: Record) -> Iterator[list[str]]:
    """Words of the results of `--max-batch`."""
    for model, found in record.largest.items():
        first = found["systems"].get(UNMANAGED, {})
        for system, one in found["systems"].items():
            name = f"memmgr {system}" if SYSTEMS[system].policy else system
            head = [model, megabytes(found["memory_bytes"]), name]
            if one.get("error") or not one["batch"]:
                yield [*head, "-", "", "", "", "", one.get("error") or "not even one sample"]
                continue
            much = f"{one['batch'] / first['batch']:.2f}x" if first.get("batch") else ""
            sample = one["seconds"] / one["batch"]
            slower = f"{sample / (first['seconds'] / first['batch']):.2f}x" if first.get("batch") else ""
            busy = one["processor"] / one["batch"]
            busier = f"{busy / (first['processor'] / first['batch']):.2f}x" if first.get("batch") else ""
            figures = [f"{one['batch']}", much, f"{sample * 1e3:,.2f} ms", slower, busier]
            yield [*head, *figures, megabytes(one["peak_bytes"])]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def heading(record: Record) -> str:
    """One line: the measurement and the machine."""
    m: dict[str, Any] = record.machine
    where = m.get("gpu") or m["processor"]
    batch = record.settings["batch"]
    samples = "" if batch is None else f"; {batch} sample{'s' * (batch > 1)} a step"
    return (
        f"{where}, {m['cores']} cores, {m['memory_bytes'] / 1e9:.0f} GB; torch {m['torch']}, Python {m['python']}, "
        f"memmgr {m['memmgr']}; {record.settings['threads']} threads, medians of {record.settings['turns']} turns{samples}"
    )
