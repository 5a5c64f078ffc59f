"""Runs the user's script and compares a run under a budget with one without memmgr."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from memmgr.config.machine import free_bytes
from memmgr.config.sizes import show_seconds
from memmgr.policies.trace import TierLink, Trace, TraceError
from memmgr.telemetry.trace_file import read_trace
from memmgr.tools.common.usage_error import UsageError
from memmgr.tools.tune.job import Batch, Job, Result
from memmgr.tools.tune.turns import Child, last_lines, take_turns

FEWEST = 3
"""Passes that two runs must have in common for a ratio of their times."""
PROBED = FEWEST + 2
"""Passes of the first run, which measures the script's memory."""
TURN_SECONDS = 0.08
"""A turn is so many passes as take this long: caches are warm for most of it, and a load that lasts longer is on both runs."""
MEASURED_SECONDS, MOST_MEASURED = 8.0, 10
"""A run makes so many passes as take this long without memmgr: as many as were asked for at least, and at most so many times
as many."""
SPARE = 1.25
"""Two runs take turns where so many times their memory is free."""
NOISY = 1.1
"""A run under a budget can hardly be so many times faster than one without."""
DOUBTFUL = 0.05
"""A slowdown with a larger doubt says little."""
_FOREVER = 1 << 30


@dataclass(frozen=True)
class Measured:
    """Times of a run under a budget beside those of one without memmgr."""

    # time of the same passes of both, one over the other; None: too few were there, or the budget was too small
    slowdown: float | None
    passes: int = 0  # passes that were compared
    after: int = 0  # passes before those: a plan was made in them, so they are slower
    seconds: float = 0.0  # of one of them, with the budget
    plain_seconds: float = 0.0  # of one of them, without memmgr
    doubt: float = (
        0.0  # `slowdown` may be off by so much: the spread of the passes' ratios over the root of their number
    )
    why: str = ""  # there is no figure
    # processor time of the same passes, one over the other; None: not known. Waiting is not in it, and neither is the
    # work of other programs.
    processor: float | None = None
    link: TierLink | None = None  # the tier below, as the run under the budget measured it; None: there is none
    peak_bytes: int = 0  # the most that the run under the budget held

    @property
    def is_doubtful(self) -> bool:
        """Other programs were at work: equal passes differ, or the run is faster than one without memmgr can be."""
        return self.slowdown is not None and (self.doubt > DOUBTFUL or self.slowdown * NOISY < 1)

    @property
    def factor(self) -> float | None:
        """The slowdown that a limit is compared with. For a run in doubt it is the processor time's, if that is larger."""
        if self.slowdown is None or self.processor is None or not self.is_doubtful:
            return self.slowdown
        return max(self.slowdown, self.processor)


class Runner:
    """Runs one script.

    `job`: the part that all runs have in common. `folder`: for orders, results and the script's output; it exists.
    `say`: gets a line before each run.
    """

    def __init__(self, job: Job, folder: Path, say: Callable[[str], None]) -> None:
        self.job = job
        self._folder = folder
        self._say = say
        self._runs = 0
        self._probed = Result()
        self._children: list[Child] = []
        self.in_turns = False  # the last comparison was made in turns

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def probe(self, batch: Batch | None = None) -> Result:
        """Runs a few passes without memmgr: their time, and the script's memory.

        Raises `UsageError`: the script failed, or was too short.
        """
        self._say("runs a few passes without a budget")
        self._probed = self._alone(replace(self.job, batch=batch, passes=PROBED))
        if len(self._probed.seconds) < FEWEST:
            raise UsageError(self._why_none(self._probed))
        enough = math.ceil(MEASURED_SECONDS / usual_seconds(self._probed))
        self.job = replace(self.job, passes=min(max(self.job.passes, enough), MOST_MEASURED * self.job.passes))
        return self._probed

    def trace(self) -> tuple[Trace, Measured]:
        """Records a pass of a run without a limit, and compares that run.

        Raises `UsageError`: the script failed, or was too short.
        """
        file = self._folder / "run.trace"
        self._say(f"records a pass, and measures without a limit: about {self.expected()}")
        managed, plain = self._compared(replace(self.job, budget="none", trace=str(file)), self._probed.peak_bytes)
        if not file.is_file():
            raise UsageError(self._why_none(managed))
        try:
            return read_trace(file), compare(plain, managed)
        except TraceError as error:
            raise UsageError(str(error)) from None

    def measure(self, budget_bytes: int, name: str) -> Measured:
        """Compares a run under a budget with one without memmgr."""
        self._say(f"runs in {name}: about {self.expected()}")
        managed, plain = self._compared(replace(self.job, budget=str(budget_bytes)), self._probed.peak_bytes)
        found = compare(plain, managed)
        self._say(f"{name}: {found.why or f'{found.factor:.2f}x'}")
        return found

    def batch(self, budget: str, budget_bytes: int | None, batch: Batch) -> tuple[Result, Result]:
        """A run under a budget with another batch, and a run without memmgr with the script's own.

        `budget_bytes`: None: the budget depends on the memory that is free, so no other run may be there.
        """
        own = replace(batch, size=None)
        return self._compared(replace(self.job, budget=budget, batch=batch), budget_bytes, own)

    # -- processes --

    def _compared(self, job: Job, takes_bytes: int | None, own: Batch | None = None) -> tuple[Result, Result]:
        """The run, and one without memmgr: in turns where memory for both is free, else one after the other.

        `takes_bytes`: memory of the run; None: it has to be alone.
        """
        usual = replace(self.job, batch=own)
        plain_bytes = self._probed.peak_bytes  # 0: an accelerator's memory is not known
        both_bytes = SPARE * (plain_bytes + takes_bytes) if plain_bytes and takes_bytes is not None else math.inf
        self.in_turns = both_bytes < free_bytes()
        if not self.in_turns:
            managed = self._alone(job)
            if managed.error:
                return managed, Result()
            return managed, self._alone(replace(usual, passes=len(managed.ends)))
        turn = max(1, math.ceil(TURN_SECONDS / usual_seconds(self._probed)))
        plain = self._start(replace(usual, passes=_FOREVER, turn_passes=turn), turns=True)
        child = self._start(replace(job, turn_passes=turn), turns=True)
        take_turns(plain, child)
        return child.result(), plain.result()

    def _alone(self, job: Job) -> Result:
        return self._start(job, turns=False).result()

    def _start(self, job: Job, *, turns: bool) -> Child:
        self._runs += 1
        environment = dict(os.environ)
        for name in ("MEMMGR_BUDGET", "MEMMGR_CONF"):
            environment.pop(name, None)
        if job.budget is None:
            environment["MEMMGR_INSTALL"] = "0"  # on CUDA torch's own allocator
        child = Child(job, str(self._runs), self._folder, environment, turns=turns)
        self._children.append(child)
        return child

    def _end(self) -> None:
        while self._children:
            self._children.pop().end()

    def expected(self, samples: float = 1.0) -> str:
        """The time of a comparison, in words. `samples`: of a pass of the run, over those of one of the script's own."""
        passes = usual_seconds(self._probed) * self.job.passes
        start = self._probed.ends[0] - self._probed.begun
        return show_seconds(round(2 * start + (1 + samples) * passes) or 1)

    def last_lines(self) -> str:
        """The last lines of the script's output, of the last run."""
        return last_lines(self._children[-1].output) if self._children else ""

    def _why_none(self, result: Result) -> str:
        if result.error:
            return f"{self.job.script} failed: {result.error}\n{self.last_lines()}"
        count, code, said = len(result.ends), result.code, self.last_lines()
        made = f"{self.job.script} made {count} {'pass' if count == 1 else 'passes'} (a pass is a forward and its backward)"
        ended = f" and ended with code {code}" * bool(code)
        printed = f"; its last lines:\n{said}" if said else "; it printed nothing"
        return f"{made}{ended}, and {PROBED} passes or more are needed{printed}"


def compare(plain: Result, managed: Result, samples: float = 1.0) -> Measured:
    """Time of the passes that have settled over the time of the same passes without memmgr.

    The quarter of the passes with the largest ratio and that with the smallest do not count. `samples`: of a pass of
    `managed`, over those of one of `plain`; the slowdown is of a sample.
    """
    if managed.error:
        return Measured(None, why="the budget is too small" if managed.floor_error else managed.error)
    there = min(len(plain.seconds), len(managed.seconds))
    first = managed.settled_from if managed.settled_from <= there - FEWEST else there // 2
    if there - first < FEWEST:
        return Measured(None, why=f"only {there} passes could be compared")
    pairs = sorted(
        zip(managed.seconds[first:there], plain.seconds[first:there], strict=True), key=lambda pair: pair[0] / pair[1]
    )
    cut = len(pairs) // 4
    middle = pairs[cut : len(pairs) - cut]
    took, usual = (sum(pair[k] for pair in middle) / len(middle) for k in (0, 1))
    spread = middle[-1][0] / middle[-1][1] - middle[0][0] / middle[0][1]
    used = [run.processor[there] - run.processor[first] for run in (managed, plain) if run.processor]
    return Measured(
        took / usual / samples,
        there - first,
        first,
        took,
        usual,
        spread / math.sqrt(len(pairs)) / samples,
        processor=used[0] / used[1] / samples if len(used) == 2 and used[1] > 0 else None,
        link=TierLink(**managed.link) if managed.link is not None else None,
        peak_bytes=managed.peak_bytes,
    )


def usual_seconds(run: Result) -> float:
    """Seconds of a pass of the second half."""
    half = run.seconds[len(run.seconds) // 2 :]
    return sum(half) / len(half)
