"""Training runs in processes of their own: their specification, their result, and how to start one.

A run has its own process so that its RSS is its own and no run warms caches or fragments the heap for the next. The
process executes `worker.py` by its path: an unmanaged run then never imports memmgr. Only the standard library is
imported here, since the worker loads this file too.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

Event = dict[str, Any]
_SECONDS_TO_TELL = 5
_LINES, _STACK_LINES = 12, 120


@dataclass(frozen=True)
class RunSpec:
    """One training run."""

    label: str  # how it is called in tables
    steps: int  # optimizer steps
    sizes: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the model's config
    batch: int = 12  # sequences or images per step
    budget_bytes: int | None = None  # None runs without memmgr
    policy: str = "auto"  # the policy's name; ignored without a budget
    # finds out how much memory the run needs: its resident set is made to tell (see `worker.keep_nothing_back`), which
    # makes it slower: time another run
    measure_need: bool = False
    seed: int = 1234  # of parameters, dropout and batches


@dataclass
class RunResult:
    """The report of a run. Bytes and seconds throughout."""

    spec: RunSpec  # the specification of the run
    losses: list[str] = field(default_factory=list)  # one per step, as `float.hex`, so that equal means equal bits
    digest: str = ""  # SHA-256 over parameters, buffers, optimizer state, RNG streams and losses
    parameters: int = 0  # trained scalars
    step_seconds: list[float] = field(default_factory=list)  # every step's time
    # the process's resident set at its highest, over its start (torch imported, one tiny step taken, the model not yet
    # built)
    rss_bytes: int = 0
    need_bytes: int = 0  # the run's need (unmanaged runs that measure it), else 0
    stats: dict[str, float] = field(default_factory=dict)  # `mm.stats()` when the context ended; empty without memmgr
    # (seconds since the first step began, RSS over the start, `resident_bytes.current` or -1 without a budget)
    timeline: list[tuple[float, int, int]] = field(default_factory=list)
    failure: str = ""  # empty, or the last lines of the error

    @property
    def seconds_a_step(self) -> float:
        """The median, the first step left out: it warms caches, and under a budget it is the one that is measured."""
        later = sorted(self.step_seconds[1:] or self.step_seconds)
        middle = len(later) // 2
        if not later:
            return float("nan")
        return later[middle] if len(later) % 2 else (later[middle - 1] + later[middle]) / 2

    @property
    def peak_bytes(self) -> int:
        """The run's peak: by memmgr's count under a budget, else its need."""
        return int(self.stats["resident_bytes.peak"]) if self.stats else self.need_bytes

    def same_bits(self, other: RunResult) -> bool:
        """Both ended, with equal losses and equal state, bit for bit."""
        return bool(self.digest) and self.digest == other.digest and self.losses == other.losses

    def to_json(self) -> dict[str, Any]:
        """Plain data, the timeline left out."""
        plain = asdict(self)
        del plain["timeline"]
        return plain | {"seconds_a_step": self.seconds_a_step, "peak_bytes": self.peak_bytes}


def ignore(event: Event) -> None:
    """Does nothing with it."""


def measured(spec: RunSpec, timeout_seconds: float = 600) -> RunResult:
    """Two steps on the CPU without memmgr, under an allocator that keeps nothing back: the resident set is the sum of the live
    tensors, `need_bytes`, and the time means nothing."""
    return run(replace(spec, measure_need=True, steps=2), timeout_seconds=timeout_seconds)


def with_need(result: RunResult, need: RunResult) -> RunResult:
    """An unmanaged run with its need, which was measured in another run; their losses have to be the same.

    Its timeline is the timed run's; behind it stand the two measured steps, whose resident set is also entered as the bytes held.
    """
    result.need_bytes = need.need_bytes
    if not result.failure and result.losses[:2] != need.losses[: len(result.losses)]:
        result.failure = "two unmanaged runs gave different losses: the machine or its torch is not reproducible"
    end = result.timeline[-1][0] if result.timeline else 0.0
    result.timeline += [(end + second, rss, rss) for second, rss, _ in need.timeline]
    return result


def run(spec: RunSpec, on_event: Callable[[Event], None] = ignore, timeout_seconds: float = 600) -> RunResult:
    """Runs `spec` in a new process.

    Returns the result; a crash, an error or a timeout is in its `failure`, not raised. `on_event`: called with each
    event as it comes: {"event": "step", "index", "loss", "seconds"}. `timeout_seconds`: the process is killed after
    that.
    """
    with _Process(spec, on_event, timeout_seconds) as process:
        process.listen()
    return process.result


def in_turns(
    specs: Sequence[RunSpec], on_event: Callable[[RunSpec, Event], None], timeout_seconds: float = 600
) -> list[RunResult]:
    """Runs each in a process of its own, a step at a time, one at work while the others are stopped, so that other work
    of the machine affects all of them. In every round another one begins. `timeout_seconds` is for each step."""
    with contextlib.ExitStack() as stack:
        processes = []
        for spec in specs:
            process = _Process(spec, functools.partial(on_event, spec), timeout_seconds, turns=True)
            processes.append(stack.enter_context(process))
            process.listen()
        rounds = 0
        while going := [process for process in processes if not process.ended]:
            first = rounds % len(going)
            for process in going[first:] + going[:first]:
                process.take_turn()
            rounds += 1
    return [process.result for process in processes]


class _Process:
    """The process of one run, and its output so far. A context manager.

    `on_event`: as for `run`. `timeout_seconds`: it is killed when it prints no line for that long, or does not end.
    `turns`: it waits before every step.
    """

    def __init__(
        self, spec: RunSpec, on_event: Callable[[Event], None], timeout_seconds: float, *, turns: bool = False
    ) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("MEMMGR_")}
        # How memmgr is set up, not whether it is on.
        kept = (
            "MEMMGR_INSTALL",
            "MEMMGR_CACHE",
            "MEMMGR_CORE_LIB",
            "MEMMGR_DISK",
            "MEMMGR_DEBUG",
        )
        if spec.budget_bytes is None:
            environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # not even our entry point runs
        else:
            environment |= {key: os.environ[key] for key in kept if key in os.environ}
        worker = str(Path(__file__).with_name("worker.py"))
        self.result = RunResult(spec)
        self.ended = False
        self._on_event = on_event
        self._timeout = timeout_seconds
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed at the end
        self._process = subprocess.Popen(
            [sys.executable, "-P", worker, json.dumps(asdict(spec)), *(["turns"] if turns else [])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment,
        )  # fmt: skip

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.ended:
            self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.__exit__(None, None, None)
        self._errors.close()

    def take_turn(self) -> None:
        """It goes on until it waits again, or ends; a planner of memmgr's, which works beside it, is stopped with it."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        self.listen()

    def listen(self) -> None:
        """Reads its output until it waits for its turn, or has ended."""
        late = threading.Event()

        def stop() -> None:
            late.set()
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(signal.SIGABRT)  # with PYTHONFAULTHANDLER its output has the place
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_SECONDS_TO_TELL)
            self._process.kill()

        timer = threading.Timer(self._timeout, stop)
        timer.start()
        try:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                if _take(line, self.result, self._on_event) == "waits":
                    self._process.send_signal(signal.SIGSTOP)
                    return
            code = self._process.wait()
        finally:
            timer.cancel()
        self.ended = True
        self._errors.seek(0)
        most = _STACK_LINES if os.environ.get("PYTHONFAULTHANDLER") else _LINES
        tail = [line for line in self._errors.read().splitlines() if line.strip()][-most:]
        if late.is_set():
            where = tail if os.environ.get("PYTHONFAULTHANDLER") else []
            self.result.failure = "\n".join([*where, f"stopped after {self._timeout:.0f} s"])
        elif code == -signal.SIGKILL:  # it could not report that itself
            self.result.failure = "killed, as processes are where the memory of the machine or its container is used up"
        elif code != 0 or not self.result.digest:
            self.result.failure = "\n".join(tail) or f"ended with code {code}"


def _take(line: str, result: RunResult, on_event: Callable[[Event], None]) -> str:
    """Enters one line of the worker's output, and returns the event's name; empty for a line that is no event."""
    if not line.startswith("{"):
        return ""
    event: Event = json.loads(line)
    if event["event"] == "step":
        result.losses.append(event["loss"])
        result.step_seconds.append(event["seconds"])
    elif event["event"] == "result":
        for name, value in event.items():
            if name != "event":
                setattr(result, name, [tuple(point) for point in value] if name == "timeline" else value)
    on_event(event)
    return str(event["event"])
