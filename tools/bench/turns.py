"""Cells that take turns: each in a process of its own, one at work while the others wait."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from memmgr.tools.common.scratch import scratch_folder
from memmgr.tools.common.usage_error import UsageError

from .systems import SYSTEMS

Spec = dict[str, Any]
Say = Callable[[str], object]


@dataclass
class Cell:
    """Result of one cell."""

    spec: Spec
    turns: list[dict[str, Any]] = field(default_factory=list)  # of each turn: seconds, processor, steps so far
    told: dict[str, Any] = field(default_factory=dict)  # the figures that the cell sent at its end
    error: str = ""  # why there are none


class Nursery:
    """The processes that have torch, and fork one for every cell. A context manager.

    `device`: "cpu" or "cuda". `limit_seconds`: a cell that takes longer for one answer is ended.
    """

    def __init__(self, device: str, limit_seconds: float = 300.0) -> None:
        self._limit = limit_seconds
        self._made = contextlib.ExitStack()
        self._folder = self._made.enter_context(scratch_folder("bench"))
        self._listener = Listener(str(self._folder / "cells"), "AF_UNIX")
        environment = {key: value for key, value in os.environ.items() if not key.startswith("MEMMGR_")}
        # A process that waits for a turn must not spin on a core that another one uses.
        environment |= {"OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        self._environment = environment
        self._parents: dict[str, subprocess.Popen[str]] = {}
        self._cells: dict[str, tuple[Connection, int]] = {}

    def __enter__(self) -> Nursery:
        return self

    def _parent(self, what: str) -> subprocess.Popen[str]:
        """The process that forks: "bare" has torch, "managed" memmgr as well, which an unmanaged training shall not have."""
        if what not in self._parents:
            command = [
                sys.executable,
                "-P",
                str(Path(__file__).with_name("child.py")),
                str(self._listener.address),
                what,
            ]
            said = self._folder / what
            with said.open("w") as errors:
                self._parents[what] = made = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                    env=self._environment,
                )  # fmt: skip
            assert made.stdout is not None
            if made.stdout.readline() != "ready\n":
                raise UsageError(f"no cell can be started: {said.read_text().strip().rpartition(chr(10))[2]}")
        return self._parents[what]

    def __exit__(self, *_: object) -> None:
        for parent in self._parents.values():
            assert parent.stdin is not None and parent.stdout is not None
            parent.kill()  # imports, and an exit with torch loaded, take seconds; its forked children end with it
            with contextlib.suppress(OSError):
                parent.stdin.close()
            parent.stdout.close()
            parent.wait()
        for pipe, _pid in self._cells.values():
            _gone(pipe)
        self._listener.close()
        self._made.close()

    def start(self, spec: Spec) -> None:
        """Forks a process for the cell; it begins at once."""
        parent = self._parent("managed" if SYSTEMS[spec["system"]].policy and spec["device"] == "cpu" else "bare")
        assert parent.stdin is not None
        parent.stdin.write(json.dumps(spec) + "\n")
        parent.stdin.flush()
        pipe = self._listener.accept()
        self._cells[spec["key"]] = pipe, pipe.recv()["pid"]

    def ask(self, key: str, message: object = None, *, send: bool = True) -> dict[str, Any]:
        """Sends the message and waits for the answer; {"error": why} of a cell that has none.

        Between its answers the cell is stopped: memmgr's planner runs beside the training, and would run in others' turns.
        """
        pipe, pid = self._cells[key]
        try:
            if send and not pipe.poll(
                0
            ):  # its output so far has the reason why it has ended, and its number may belong to another process
                os.kill(pid, signal.SIGCONT)
                pipe.send(message)
            if not pipe.poll(self._limit):
                return {"error": f"took longer than {self._limit:.0f} s"}
            answer: dict[str, Any] = pipe.recv()
            if "error" not in answer:
                with contextlib.suppress(ProcessLookupError):  # after its last answer it ends by itself
                    os.kill(pid, signal.SIGSTOP)
            return answer
        except (EOFError, OSError):
            return {"error": "its process has ended"}

    def end(self, key: str) -> None:
        """The cell's process has ended."""
        pipe, pid = self._cells.pop(key)
        ended = False
        with contextlib.suppress(EOFError, OSError):
            while pipe.poll(0):
                ended = "error" in pipe.recv() or ended
        if not ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while True:  # its keeper ends after the process: a number that is free again must not be killed
            try:
                pipe.recv()
            except (EOFError, OSError):
                break
        pipe.close()


def _gone(pipe: Connection) -> None:
    """Waits until no process has the other end: an interrupt may have left half of an answer in it."""
    with contextlib.suppress(OSError):
        while os.read(pipe.fileno(), 1 << 16):
            pass
    pipe.close()


def once(children: Nursery, spec: Spec) -> Cell:
    """A cell without turns."""
    cell = Cell(spec)
    children.start(spec)
    cell.told = children.ask(spec["key"], send=False)
    cell.error = cell.told.pop("error", "")
    children.end(spec["key"])
    return cell


def together(children: Nursery, specs: Sequence[Spec], turns: int, say: Say) -> list[Cell]:
    """Runs all cells of a group, the reference first: each warms up alone, then they take turns.

    In every round another one begins. A cell that ends early has its reason, and the others go on. At its end the reference
    goes on until it has taken as many steps as any other cell, so that all bits can be compared with its bits.
    """
    cells = [Cell(spec) for spec in specs]
    begun: list[Cell] = []
    for cell in cells:
        say(f"{_name(cell.spec)}: warming up")
        children.start(cell.spec)
        answer = children.ask(cell.spec["key"], send=False)
        if _lives(children, cell, answer):
            begun.append(cell)
            cell.told["warm"] = answer
    for turn in range(turns):
        say(f"{cells[0].spec['model']}, {cells[0].spec['group']}: turn {turn + 1} of {turns}")
        for cell in begun[turn % len(begun) :] + begun[: turn % len(begun)] if begun else []:
            if not cell.error:
                answer = children.ask(cell.spec["key"], True)
                if _lives(children, cell, answer):
                    cell.turns.append(answer)
    most = max((_steps(cell) for cell in begun), default=0)
    reference = cells[0]
    while not reference.error and reference in begun and _steps(reference) < most:
        answer = children.ask(reference.spec["key"], True)
        if _lives(children, reference, answer):
            reference.turns.append(answer)
    for cell in begun:
        if not cell.error:
            say(f"{_name(cell.spec)}: its figures")
            answer = children.ask(cell.spec["key"], None)
            if _lives(children, cell, answer):
                cell.told |= answer
                children.end(cell.spec["key"])
    return cells


def _steps(cell: Cell) -> int:
    last: dict[str, Any] = cell.turns[-1] if cell.turns else cell.told["warm"]
    return int(last["steps"])


def _name(spec: Spec) -> str:
    return f"{spec['model']}, {spec['group']}, {spec['system']}"


def _lives(children: Nursery, cell: Cell, answer: dict[str, Any]) -> bool:
    if "error" not in answer:
        return True
    cell.error = answer["error"]
    children.end(cell.spec["key"])
    return False
