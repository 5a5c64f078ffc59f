"""A computation in a thread of memmgr ends when another thread stops it: at once, in its own frames, and in no others."""

import functools
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from memmgr.common import threads
from memmgr.native import binding

pytestmark = pytest.mark.timeout(60)  # a computation that does not end waits for ever


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads take turns often, so that one is told in any of another's moments."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_stopped_ends_in_its_own_frames(fails: bool, quick_switches: None) -> None:
    """Whenever it is told, also in its last moments: the exception comes before `run` is left, or never."""
    outcomes: set[str] = set()
    for k in range(400):
        computation = threads.Computation(binding.load(), __name__)

        def compute(turns: int = k * 20) -> int:
            for _ in range(turns):
                pass
            if fails:
                raise ValueError
            return turns

        def run(computation: threads.Computation = computation, compute: Callable[[], int] = compute) -> None:
            try:
                computation.run(compute)
                said = "done"
            except threads.Stopped:
                said = "stopped"
            except ValueError:
                said = "failed"
            for _ in range(1000):
                pass
            outcomes.add(said)

        thread = threading.Thread(target=run)
        thread.start()
        computation.end(thread)
    assert outcomes == {"stopped", "failed" if fails else "done"}


def test_what_is_stopped_in_a_finalizer_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python throws the exception away there, and the thread that closed the budget waited for ever."""
    printed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    computation = threads.Computation(binding.load(), __name__)
    inside = threading.Event()
    outcomes: list[str] = []

    class Slow:
        def __del__(self) -> None:
            inside.set()
            while True:
                pass

    def run() -> None:
        try:
            computation.run(lambda: Slow() and None)
        except threads.Stopped:
            outcomes.append("stopped")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert inside.wait(10)
    computation.end(thread)
    assert outcomes == ["stopped"] and printed


def begun(
    computation: threads.Computation, compute: Callable[[], None]
) -> tuple[threading.Thread, list[type[BaseException]]]:
    """Its thread, and the exception that ended it."""
    told: list[type[BaseException]] = []

    def run() -> None:
        try:
            computation.run(compute)
        except threads.Stopped as stopped:
            told.append(type(stopped))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, told


OF_A_USER = """
class Holder:
    begun = ended = 0

    def __init__(self):
        self.me = self

    def __del__(self):
        Holder.begun += 1
        for _ in range(2_000):
            pass
        Holder.ended += 1
"""


def test_finalizers_of_others_are_not_cut_short(quick_switches: None) -> None:
    """The collector runs them in any thread, also in one whose computation is being stopped."""
    user: dict[str, Any] = {"__name__": "user"}
    exec(OF_A_USER, user)

    def compute() -> None:
        while True:
            user["Holder"]()
            gc.collect(0)
            for _ in range(2000):
                pass

    for _ in range(100):
        computation = threads.Computation(binding.load(), __name__)
        thread, told = begun(computation, compute)
        time.sleep(0.002)
        computation.end(thread)
        assert told == [threads.Stopped]
    holder = user["Holder"]
    gc.collect()
    assert holder.begun == holder.ended > 100


def test_nor_is_the_rest_of_a_collection(quick_switches: None) -> None:
    """One of its finalizers waits without the interpreter's lock, and has no frame: the computation's own is where its thread is."""
    user: dict[str, Any] = {"__name__": "user"}
    exec(OF_A_USER, user)
    holder = user["Holder"]
    asleep = threading.Event()

    class Sleeper(holder):  # type: ignore[misc, valid-type]
        __del__ = staticmethod(functools.partial(time.sleep, 0.05))

    def compute() -> None:
        Sleeper()  # it goes first
        holder()
        asleep.set()
        gc.collect(0)
        while True:
            pass

    gc.collect()
    computation = threads.Computation(binding.load(), __name__)
    thread, told = begun(computation, compute)
    assert asleep.wait(10)
    time.sleep(0.02)
    computation.end(thread)
    assert told == [threads.Stopped]
    gc.collect()
    assert holder.begun == holder.ended > 0


def test_none_is_begun_while_the_exception_is_on_its_way(quick_switches: None) -> None:
    """Python 3.13 raises it a turn later, after a collection that is due. The program's thresholds are back afterwards, also in a fork."""
    before, meanwhile, child = gc.get_threshold(), [], []
    computation = threads.Computation(binding.load(), __name__)
    begun = threading.Event()

    def forks() -> None:
        read, write = os.pipe()
        if not os.fork():
            os.write(write, str(gc.get_threshold()).encode())
            os._exit(0)
        os.wait()
        child.append(os.read(read, 99).decode())
        os.close(read)
        os.close(write)

    def run() -> None:
        def compute() -> None:
            begun.set()
            while True:
                pass

        try:
            computation.run(compute)
        except threads.Stopped:
            meanwhile.append(gc.get_threshold())
            forks()

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(10)
    computation.end(thread)
    assert gc.get_threshold() == before and child == [str(before)]
    assert meanwhile == [(2**31 - 1,) * 3]
