"""The order to a child process of `memmgr tune`, and its result. Both are files, since the script owns the child's output."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from memmgr.tools.common.outputs import write_whole

GO, END = b"g", b"e"
"""A child that takes turns writes `GO` at the end of each; it is sent `GO` for another, or `END`."""


@dataclass(frozen=True)
class Batch:
    """The way in which a script gets another batch size."""

    how: str = "auto"  # "auto" (the Trainer's or the DataLoader's), "option", "call", or "name"
    name: str = ""  # the option, `FILE:FUNCTION`, or the name
    size: int | None = None  # samples; None: the script's own size, which is reported
    before: int | None = None  # the script's own size where it is known, of "auto"


@dataclass(frozen=True)
class Job:
    """One run of the script."""

    script: str  # the file, or the module where `module` is set
    arguments: list[str]  # of the script
    module: bool = False
    # the process ends after so many; under a budget later, where a plan was made near their end (`STEADY`)
    passes: int = 0
    budget: str | None = None  # as of `memmgr run`; None: memmgr is not there at all
    trace: str | None = None  # the file for a recorded pass; None: no pass is recorded
    options: dict[str, str] = field(default_factory=dict)  # `policy`, `disk` and `device` of `memmgr run`
    batch: Batch | None = None  # another batch size
    # the descriptors to which a turn's end is written, and from which the next is read; None: there are no turns
    turns: list[int] | None = None
    turn_passes: int = 1  # of each turn

    def write(self, path: Path) -> None:
        """Writes the order."""
        write_whole(path, json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> Job:
        """Reads an order."""
        found = json.loads(path.read_text(encoding="utf-8"))
        batch = found.pop("batch")
        return Job(**found, batch=Batch(**batch) if batch else None)


@dataclass
class Result:
    """The outcome of one run."""

    # seconds at which each pass ended, of a clock that stands still while a plan is made and while another process has the turn
    ends: list[float] = field(default_factory=list)
    begun: float = 0.0  # when the process was there, of the same clock
    # for each of them, seconds of processor time of the process so far, all threads together
    processor: list[float] = field(default_factory=list)
    # for each of them, the plans that were made until the next one began
    plans: list[int] = field(default_factory=list)
    # the tier below as it was measured beside the passes, the fields of a `TierLink`; None: there is none
    link: dict[str, Any] | None = None
    need_bytes: int = 0  # the most that the passes would have held without a budget; 0: not known
    peak_bytes: int = 0  # the most that they held; without memmgr the process's memory, 0 on an accelerator
    floor_error: bool = False  # the budget was too small
    error: str = ""  # the exception that ended the script, in one line
    code: int = 0  # the exit code of the script; 0 where it was ended after its passes
    batches: dict[str, int] = field(default_factory=dict)  # batch sizes that the script has asked for, by their source
    samples: int | None = None  # length of the data set, where a DataLoader has shown it
    applied: list[str] = field(default_factory=list)  # the places where the batch size was set

    @property
    def last_plan(self) -> int:
        """Passes until the last plan was made; 0: there is none."""
        return self.plans.index(self.plans[-1]) + 1 if self.plans and self.plans[-1] else 0

    @property
    def settled_from(self) -> int:
        """The number in `seconds` of the first pass that counts: half of those after the last plan was made. In the first half
        kinds of ops are tried, and the residency of another order is still there.
        """
        return (self.last_plan + len(self.seconds)) // 2

    @property
    def seconds(self) -> list[float]:
        """Seconds of each pass but the first, from the end of the one before."""
        return [after - before for before, after in zip(self.ends, self.ends[1:], strict=False)]

    @staticmethod
    def read(path: Path) -> Result:
        """Reads a result."""
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Result(**found)
