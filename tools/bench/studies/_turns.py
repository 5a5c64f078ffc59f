"""Systems that take turns: each in a process of its own, one at work while the others, and their child processes, are
stopped."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol


class Turning(Protocol):
    """A system that is measured."""

    def turn(self) -> dict[str, float]:
        """Runs one turn; returns its seconds, by part."""
        ...


def take_turns(workload: Turning, pipe: Connection) -> int:
    """In a system's process, once it is warm: takes turns when it is told to, until it is told to end. How many."""
    pipe.send(None)
    turns = 0
    while pipe.recv():
        pipe.send(workload.turn())
        turns += 1
    return turns


def in_turns(systems: dict[str, tuple[Callable[..., None], tuple[Any, ...]]], turns: int) -> dict[str, dict[str, Any]]:
    """Starts each `function(*arguments, pipe)`, which warms up, calls `take_turns` and sends a dict at its end.

    Returns that dict by system, with its "turns". Of a system that cannot run: {"error": its last line}.
    """
    context = multiprocessing.get_context("spawn")
    rows: dict[str, dict[str, Any]] = {}
    pipes: dict[str, Connection] = {}
    processes: dict[str, multiprocessing.process.BaseProcess] = {}

    def answer(system: str) -> Any:
        """The system's next message. The process is stopped after it: memmgr's planner works in the background of the
        training, and would work in others' turns.
        """
        found = pipes[system].recv()
        _signal(processes[system], signal.SIGSTOP)
        return found

    def ask(system: str, message: bool) -> Any:
        _signal(processes[system], signal.SIGCONT)
        pipes[system].send(message)
        return answer(system)

    try:
        for system, (function, arguments) in systems.items():
            pipes[system], theirs = context.Pipe()
            processes[system] = context.Process(target=_run, args=(function, arguments, theirs), daemon=True)
            processes[system].start()
            theirs.close()  # else `recv` waits for ever for a process that has died
            wrong = answer(system)
            rows[system] = {"turns": []} if wrong is None else {"error": wrong}
        going = [system for system, row in rows.items() if "error" not in row]
        for turn in range(turns):
            first = turn % max(1, len(going))  # another one begins each time
            for system in (*going[first:], *going[:first]):
                rows[system]["turns"].append(ask(system, True))
        for system in going:
            rows[system] |= ask(system, False)
    finally:
        for process in processes.values():
            _signal(process, signal.SIGCONT)
    return rows


def _signal(process: multiprocessing.process.BaseProcess, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.killpg(process.pid or 0, number)


def _run(function: Callable[..., None], arguments: tuple[Any, ...], pipe: Connection) -> None:
    os.setpgid(0, 0)
    try:
        function(*arguments, pipe)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}".splitlines()[0])
        traceback.print_exc()
