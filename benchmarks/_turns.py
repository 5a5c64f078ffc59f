"""Systems that take turns: each in a process of its own, one at work while the others wait."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol


class Turning(Protocol):
    """What is measured."""

    def turn(self) -> dict[str, float]:
        """One turn; its seconds, by what they went into."""
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

    Returns:
        That dict by system, with its "turns". Of a system that cannot run: {"error": its last line}.
    """
    context = multiprocessing.get_context("spawn")
    rows: dict[str, dict[str, Any]] = {}
    pipes: dict[str, Connection] = {}
    for system, (function, arguments) in systems.items():
        ours, theirs = context.Pipe()
        context.Process(target=_run, args=(function, arguments, theirs), daemon=True).start()
        theirs.close()  # else `recv` waits for ever for a process that has died
        wrong = ours.recv()
        rows[system] = {"turns": []} if wrong is None else {"error": wrong}
        if wrong is None:
            pipes[system] = ours
    for _ in range(turns):
        for system, pipe in pipes.items():
            pipe.send(True)
            rows[system]["turns"].append(pipe.recv())
    for system, pipe in pipes.items():
        pipe.send(False)
        rows[system] |= pipe.recv()
    return rows


def _run(function: Callable[..., None], arguments: tuple[Any, ...], pipe: Connection) -> None:
    try:
        function(*arguments, pipe)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}".splitlines()[0])
        traceback.print_exc()
