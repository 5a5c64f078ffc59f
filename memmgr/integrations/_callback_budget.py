"""The budget of a framework's callback: opened and closed by its hooks, with its messages in between."""

from __future__ import annotations

import atexit
import os
from typing import Any

from memmgr.api.autostart import budget_of_the_script
from memmgr.api.budget import budget
from memmgr.common.say import say
from memmgr.observe.interval import Interval
from memmgr.observe.slowness import more_advice

PREFIX = "memmgr/"


class CallbackBudget:
    """One budget over the trainings of one callback.

    A script that runs under `memmgr run` or `MEMMGR_BUDGET` has a budget already, or will have one at its first module:
    then that one counts, since the command line outranks the script, and ours stays closed.

    Args:
        limit: as in `memmgr.budget`.
        options: its other arguments.
    """

    def __init__(self, limit: int | str | None, options: dict[str, Any]) -> None:
        self._own = budget(limit, **options)  # errors in the options are raised now
        self._limit = limit
        self._quiet = bool(options.get("quiet"))
        self._counts = self._own
        self._interval = Interval()
        self._tried: list[int] = []  # batch sizes, of a framework that looks for the largest
        self._speaks = False
        self._said = False
        self._open = False

    def open(self, *, batch_size: int = 0, speaks: bool = True) -> None:
        """Begins a training. A training that failed without closing its session is closed first.

        Args:
            batch_size: where the framework tries smaller and smaller ones after an out-of-memory error, the one that it
                tries now; 0 elsewhere. All that are tried in a row are one run, with one summary.
            speaks: this process prints the messages; of several ranks one does.
        """
        if self._open and self._tried and batch_size < self._tried[-1]:
            self._end(failed=True, report=False)
        else:
            self.close(failed=True)
            self._tried = []
        if batch_size:
            self._tried.append(batch_size)
        self._interval = Interval()
        self._speaks = speaks and not self._quiet
        scripts = budget_of_the_script()
        self._counts = scripts or self._own
        if scripts is None:
            self._own.__enter__()
            atexit.register(self._at_exit)
        elif not self._said and speaks:
            self._said = True
            asked = os.environ.get("MEMMGR_BUDGET", "none")
            say(f"the budget of memmgr run or MEMMGR_BUDGET counts ({asked}), not the callback's ({self._limit})")
        self._open = True

    def close(self, failed: bool = False) -> None:
        """Ends the training: closes the budget, if it is open and ours, and prints advice."""
        if not self._open:
            return
        ours = self._counts is self._own
        self._end(failed, report=True)
        if not self._speaks:
            return
        if len(self._tried) > 1:
            sizes = ", ".join(map(str, self._tried))
            say(f"batch sizes tried: {sizes}; " + ("the last one failed" if failed else "the last one fitted"))
        if ours and not failed:
            say(*more_advice(self._own.stats(), binary=self._own._config.binary, leaks=self._own.leaks))

    def _end(self, failed: bool, report: bool) -> None:
        self._open = False
        if self._counts is self._own:
            atexit.unregister(self._at_exit)
            self._own._close(failed=failed, report=report)

    def _at_exit(self) -> None:
        self.close(failed=True)

    # -- logged figures --

    def step_begins(self) -> None:
        """From here the time is a step's."""
        if self._open:
            self._interval.begin(self.stats())

    def step_ends(self) -> None:
        """To here."""
        if self._open:
            self._interval.end(self.stats())

    def figures(self) -> dict[str, float]:
        """The three figures of the steps since they were asked for last; empty while no budget is open."""
        now = self.stats() if self._open else {}
        return {PREFIX + name: value for name, value in self._interval.take(now).items()} if now else {}

    def stats(self) -> dict[str, Any]:
        """As `memmgr.stats()`, of the training under way or of the last one."""
        return self._counts.stats()
