"""Processes that run the user's script: one alone, or two that take turns, so that other work of the machine affects both."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from memmgr.tools.tune.job import END, GO, Job, Result


class Child:
    """One process that runs the script. With turns it runs until its first turn is over, then stands still until `go`."""

    def __init__(self, job: Job, name: str, folder: Path, environment: Mapping[str, str], *, turns: bool) -> None:
        self._answer = folder / f"{name}.result.json"
        self.output = folder / f"{name}.output.txt"  # the script's
        order = folder / f"{name}.order.json"
        done, told, go, goes = (*os.pipe(), *os.pipe()) if turns else (-1, -1, -1, -1)
        self._done, self._goes = done, goes
        self._is_over = False
        replace(job, turns=[told, go] if turns else None).write(order)
        with self.output.open("wb") as output:
            # Workers of a DataLoader end with the group: the script's process ends in the middle of the training.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "memmgr.tools.tune.child", str(order), str(self._answer)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True, pass_fds=(told, go) if turns else (),
            )  # fmt: skip
        if turns:
            os.close(told)
            os.close(go)

    def wait_turn(self) -> bool:
        """Waits until the turn is over, and stops the process. False: it has ended, or will without a turn."""
        while not select.select([self._done], [], [], 0.2)[0]:
            if self._process.poll() is not None:
                return False
        if os.read(self._done, 1) != GO:
            return False
        self._signal(signal.SIGSTOP)
        return True

    def go(self, word: bytes = GO) -> None:
        """Lets the process run for another turn, or to its end."""
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            os.write(self._goes, word)

    def result(self) -> Result:
        """Waits for the end."""
        self._process.wait()
        self.end()
        if not self._answer.is_file():
            return Result(error=f"the process ended without a result; its last lines:\n{last_lines(self.output)}")
        return Result.read(self._answer)

    def end(self) -> None:
        """Ends the process and all that it has started, once."""
        if self._is_over:
            return
        self._is_over = True
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._done, self._goes):
            if pipe >= 0:
                os.close(pipe)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def take_turns(first: Child, second: Child) -> None:
    """Lets two processes run in turns until `second` has ended; `first` is then told to end."""
    both = [first.wait_turn(), second.wait_turn()]
    while both[1]:
        for place, child in enumerate((first, second)):
            if both[place]:
                child.go()
                both[place] = child.wait_turn()
    if both[0]:
        first.go(END)


def last_lines(output: Path, count: int = 5) -> str:
    """The last lines of a script's output."""
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines() if output.is_file() else []
    return "\n".join("    " + line for line in lines[-count:])
