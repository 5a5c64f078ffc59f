"""Starts the user's script again and again, each time in a process that ends after some passes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from memmgr.config.sizes import show_seconds
from memmgr.policies.trace import TierLink, Trace, TraceError
from memmgr.telemetry.trace_file import read_trace
from memmgr.tools.common.usage_error import UsageError
from memmgr.tools.tune.job import Batch, Job, Result

FEWEST = 3
"""Passes that two runs must have in common for a ratio of their times."""

_LINES = 5


@dataclass(frozen=True)
class Measured:
    """Times of a run beside those of the run without memmgr."""

    # time of the same passes of both, one over the other; None: too few were there, or the budget was too small
    slowdown: float | None
    passes: int = 0  # passes that were compared
    seconds: float = 0.0  # of one of them, with the budget
    why: str = ""  # there is no figure
    # processor time of the same passes, one over the other; None: not known. Waiting is not in it, and neither is the
    # work of other programs.
    processor: float | None = None
    link: TierLink | None = None  # the tier below, as the run under the budget measured it; None: there is none
    own_seconds: float = 0.0  # of a pass under the budget, for the pager's own work


class Runner:
    """Runs one script.

    `job`: the part that all runs have in common. `folder`: for orders, results and the script's output; it exists.
    `say`: gets a line before each run.
    """

    def __init__(self, job: Job, folder: Path, say: Callable[[str], None]) -> None:
        self._job = job
        self._folder = folder
        self._say = say
        self._runs = 0
        self._plain_seconds = 0.0  # of the last run without memmgr
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def trace(self) -> Trace:
        """Records one pass. Raises `UsageError`: the script failed, or was too short."""
        file = self._folder / "run.trace"
        self._say("records a pass")
        result = self._run(replace(self._job, budget="none", trace=str(file)))
        if not file.is_file():
            raise UsageError(self._why_none(result))
        try:
            return read_trace(file)
        except TraceError as error:
            raise UsageError(str(error)) from None

    def plain(self, batch: Batch | None = None, passes: int = 0) -> Result:
        """Runs the script without memmgr.

        Raises `UsageError`: the script failed, or was too short. `passes`: at least so many.
        """
        self._say("runs without a budget")
        begun = time.monotonic()
        result = self._run(replace(self._job, batch=batch, passes=max(passes, self._job.passes)))
        if len(result.seconds) < FEWEST:
            raise UsageError(self._why_none(result))
        self._plain_seconds = time.monotonic() - begun
        return result

    def managed(self, budget: str, batch: Batch | None = None) -> Result:
        """Runs the script under a budget."""
        return self._run(replace(self._job, budget=budget, batch=batch))

    def measure(self, budget: str, plain: list[Result], name: str) -> Measured:
        """Runs the script under a budget, then without one, which is appended to `plain`. The run is compared with the runs
        without memmgr before it and after it, since a machine is not always as fast.
        """
        self._say(f"runs in {name}, and then without one: about {show_seconds(round(2 * self._plain_seconds) or 1)}")
        managed = self.managed(budget)
        if not managed.error:
            plain.append(self.plain(passes=len(managed.ends)))
        return compare(plain[-2:], managed)

    # -- processes --

    def _run(self, job: Job) -> Result:
        self._runs += 1
        order, answer = (self._folder / f"{self._runs}.{kind}.json" for kind in ("order", "result"))
        job.write(order)
        environment = dict(os.environ)
        for name in ("MEMMGR_BUDGET", "MEMMGR_CONF"):
            environment.pop(name, None)
        if job.budget is None:
            environment["MEMMGR_INSTALL"] = "0"  # on CUDA torch's own allocator
        with self.output.open("wb") as output:
            # Workers of a DataLoader end with the group: the script's process ends in the middle of the training.
            self._child = subprocess.Popen(
                [sys.executable, "-m", "memmgr.tools.tune.child", str(order), str(answer)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,
            )  # fmt: skip
            self._child.wait()
        self._end()
        if not answer.is_file():
            return Result(error=f"the process ended without a result; its last lines:\n{self.last_lines()}")
        return Result.read(answer)

    def _end(self) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
            self._child = None

    @property
    def output(self) -> Path:
        """The script's output of the last run."""
        return self._folder / "output.txt"

    def last_lines(self) -> str:
        """The last lines of the script's output."""
        lines = self.output.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join("    " + line for line in lines[-_LINES:])

    def _why_none(self, result: Result) -> str:
        if result.error:
            return f"{self._job.script} failed: {result.error}\n{self.last_lines()}"
        made = f"{self._job.script} made {len(result.ends)} passes (a pass is a forward and its backward)"
        return f"{made}, and {FEWEST + 2} or more are needed; its last lines:\n{self.last_lines()}"


def compare(plain: list[Result], managed: Result) -> Measured:
    """Time of the passes that follow a plan, once none is searched for, over the time of the same passes without memmgr, of some
    runs on average.

    Where no pass follows a plan, the second half counts: in the first one policies and determinism checks begin. A run
    without memmgr that is too short does not count, unless there is no longer one.
    """
    if managed.error:
        return Measured(None, why="the budget is too small" if managed.floor_error else managed.error)
    there = min(max(len(run.seconds) for run in plain), len(managed.seconds))
    plain = [run for run in plain if len(run.seconds) >= there]
    steady = managed.steady_from
    first = steady if steady is not None and steady <= there - FEWEST else there // 2
    if there - first < FEWEST:
        return Measured(None, why=f"only {there} passes could be compared")
    seconds = sum(managed.seconds[first:there])
    usual = sum(sum(run.seconds[first:there]) for run in plain) / len(plain)
    used = [run.processor[there] - run.processor[first] for run in (*plain, managed) if run.processor]
    usually = sum(used[:-1])
    processor = used[-1] * len(plain) / usually if len(used) == len(plain) + 1 and usually > 0 else None
    link = TierLink(**managed.link) if managed.link is not None else None
    return Measured(seconds / usual, there - first, seconds / (there - first), "", processor, link, managed.own_seconds)


def usual_seconds(run: Result) -> float:
    """Seconds of a pass of the second half."""
    half = run.seconds[len(run.seconds) // 2 :]
    return sum(half) / len(half)
