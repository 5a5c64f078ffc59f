"""`--max-batch`: the largest batch of each system in a fixed memory, by bisection, one process a try."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from .systems import SYSTEMS
from .turns import Nursery, Say, Spec, once

MOST = 1 << 14
"""No batch is tried above: a system that offloads everything ends at the disk."""


@dataclass(frozen=True)
class Try:
    """One batch: the seconds of a step, by the clock and of the processor, the peak, and why it does not do."""

    batch: int
    seconds: float = 0.0
    processor: float = 0.0
    peak_bytes: int = 0
    error: str = ""


def attempt(children: Nursery, spec: Spec, memory_bytes: int, slowest_seconds: float | None) -> Try:
    """Trains at the spec's batch: memmgr in a budget of that memory, others so that their peak does not pass it.

    `slowest_seconds`: a sample may take so long; None: as long as it likes.
    """
    managed = bool(SYSTEMS[spec["system"]].policy)
    cell = once(children, spec | {"what": "attempt", "budget_bytes": memory_bytes if managed else None})
    if cell.error:
        return Try(spec["batch"], error=cell.error)
    seconds, peak = median(cell.told["seconds"]), cell.told["peak_bytes"]
    done = Try(spec["batch"], seconds, median(cell.told["processor"]), peak)
    if peak > memory_bytes:
        return replace(done, error=f"needs {peak / 1e6:,.0f} MB")
    if slowest_seconds is not None and seconds / done.batch > slowest_seconds:
        return replace(done, error=f"{seconds / done.batch / slowest_seconds:.2f} of the time allowed")
    return done


def bisect(tried: Callable[[int], Try], first: int) -> tuple[Try | None, Try | None]:
    """The largest batch that does, to a sixteenth, and the smallest that does not (None: there is none).

    Doubles from `first`, or halves where that does not do, and then bisects. Assumes that a batch does if a larger one does.
    """
    good: Try | None = None
    bad: Try | None = None
    batch = first
    while True:
        found = tried(batch)
        if found.error:
            bad = found
        else:
            good = found
        low, high = good.batch if good else 0, bad.batch if bad else 0
        if (not bad and low >= MOST) or (bad and high - low <= max(1, low // 16)):
            return good, bad
        batch = (low + high) // 2 if bad and good else (2 * low if good else high // 2)


def largest(
    children: Nursery, spec: Spec, memory_bytes: int, slowest_seconds: float | None, first: int, say: Say
) -> dict[str, Any]:
    """Result for one system of one model, as plain data."""
    tries: list[Try] = []

    def tried(batch: int) -> Try:
        say(f"{spec['model']}, {spec['system']}: a batch of {batch}")
        tries.append(attempt(children, spec | {"batch": batch}, memory_bytes, slowest_seconds))
        return tries[-1]

    good, bad = bisect(tried, first)
    found = asdict(good or Try(0, error=tries[-1].error))
    return found | {"ended_by": bad.error if bad else "", "tries": len(tries)}
