"""The planner's process: its inputs, how it ends, and the fallback without one."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forkserver
import psutil
import pytest

from memmgr.common.threads import Stopped
from memmgr.native import binding
from memmgr.runtime import planner_process, planning
from memmgr.runtime.planner_process import Failed, InProcess, PlannerProcess

from . import endless
from .own_process import SOON, process

__all__ = ["process"]  # a fixture

pytestmark = pytest.mark.timeout(120)


def executor() -> InProcess:
    return InProcess(binding.load())


class Asks:
    """A thread that requests a computation, and its result."""

    def __init__(self, of: InProcess, function: Callable[..., Any], *arguments: Any) -> None:
        self.outcome: Any = None

        def run() -> None:
            try:
                self.outcome = of.run(function, *arguments)[0]
            except (Failed, Stopped) as error:
                self.outcome = error

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def is_under_way(self, process: PlannerProcess) -> int:
        """Waits until the process computes; its pid."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            pid, child = process.pid, process._child
            begun = child is not None and child.ready and process._asker is not None
            if pid is not None and begun and psutil.Process(pid).cpu_times().user > 0.3:
                return pid
            time.sleep(0.01)
        raise AssertionError("it does not begin")

    def result(self) -> Any:
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.outcome


def is_gone(pid: int, seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE and psutil.Process(pid).ppid() != os.getpid():
                return True  # whose parent was killed: the process that inherits it may take its time
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def test_it_has_no_torch_and_nothing_else_of_the_training(
    monkeypatch: pytest.MonkeyPatch, process: PlannerProcess
) -> None:
    monkeypatch.setenv("MEMMGR_BUDGET", "1GB")
    held, other = os.pipe()
    os.set_inheritable(held, True)
    asks = executor()
    loaded = asks.run(planning.modules)[0]
    assert "memmgr.policies.plan.planner" in loaded and "numpy" in loaded
    assert not [name for name in loaded if name.split(".")[0] in ("torch", "psutil", "scipy")]
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    assert asks.run(os.getpriority, os.PRIO_PROCESS, 0)[0] == mine  # a plan does not wait for an idle core
    assert asks.run(os.getenv, "MEMMGR_BUDGET")[0] is None and asks.run(os.getenv, "OMP_NUM_THREADS")[0] == "1"
    file = os.readlink(f"/proc/self/fd/{held}")
    theirs = [f"/proc/{process.pid}/fd/{fd}" for fd in os.listdir(f"/proc/{process.pid}/fd")]
    assert file not in [os.readlink(path) for path in theirs] and len(theirs) <= 6
    os.close(held), os.close(other)


def test_there_is_one_for_all_budgets(process: PlannerProcess) -> None:
    executor().prepare()
    first = process.pid
    one = executor()
    assert one.run(os.getpid)[0] == one.run(os.getpid)[0] == first
    one.end(None)
    assert executor().run(os.getpid)[0] == first
    with pytest.raises(Stopped):
        one.run(os.getpid)


def test_what_fails_there_says_why(process: PlannerProcess) -> None:
    with pytest.raises(Failed, match="ValueError: no"):
        executor().run(endless.fails, "no")
    assert executor().run(os.getpid)[0] == process.pid


def test_one_that_is_killed_is_started_once_more(process: PlannerProcess) -> None:
    for works in (True, False):
        asks = executor()
        asked = Asks(asks, endless.forever)
        os.kill(asked.is_under_way(process), signal.SIGKILL)
        assert "was ended by signal 9" in str(asked.result())
        assert asks.works is works
    with pytest.raises(Failed, match="too often"):
        asks.run(os.getpid)


def test_one_that_was_killed_while_it_had_nothing_to_do_is_started_again(process: PlannerProcess) -> None:
    first = executor().run(os.getpid)[0]
    os.kill(first, signal.SIGKILL)
    while process.pid is not None:
        time.sleep(0.01)
    assert executor().run(os.getpid)[0] not in (first, os.getpid())


def test_what_it_has_printed_is_in_the_error(process: PlannerProcess) -> None:
    with pytest.raises(Failed, match=r"has ended with code 3: .*sorry"):
        executor().run(os.system, "echo sorry") and None
        executor().run(os._exit, 3)


def test_what_is_stopped_is_given_up_at_once(process: PlannerProcess) -> None:
    took = []
    for _ in range(3):
        asks = executor()
        asked = Asks(asks, endless.forever)
        pid = asked.is_under_way(process)
        begun = time.perf_counter()
        asks.end(asked.thread)
        took.append(time.perf_counter() - begun)
        assert isinstance(asked.outcome, Stopped) and is_gone(pid)
    assert min(took) < SOON, took
    assert process.works, "that was no crash"
    assert executor().run(os.getpid)[0] == process.pid


def test_a_stop_behind_the_answer_is_no_crash(process: PlannerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget closes when the reply is there and its thread has not gone on yet: later budgets have plans all the same."""
    ask = planner_process._Child.ask
    with monkeypatch.context() as patch:
        for _ in range(planner_process.MOST_CRASHES + 1):
            asker = executor()

            def ask_and_stop(child: Any, question: bytes, asker: InProcess = asker) -> Any:
                reply = ask(child, question)
                process.stop(asker)
                return reply

            patch.setattr(planner_process._Child, "ask", ask_and_stop)
            asker.run(os.getpid)
    assert process.works
    assert executor().run(os.getpid)[0] == process.pid


def test_another_budgets_computation_goes_on(process: PlannerProcess) -> None:
    asks, other = executor(), executor()
    asked = Asks(asks, time.sleep, 1.0)
    while process._asker is not asks:
        time.sleep(0.01)
    waits = Asks(other, os.getpid)
    other.end(None)
    assert asked.result() is None and isinstance(waits.result(), Stopped)


@pytest.mark.parametrize("executable", [None, "", "/usr/sbin/uwsgi", "/nowhere/python3", "python3 that ends"])
def test_where_none_can_be_started_a_thread_computes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, process: PlannerProcess, executable: str | None
) -> None:
    if executable == "python3 that ends":
        (tmp_path / "python3").symlink_to("/bin/false")
        executable = str(tmp_path / "python3")
    monkeypatch.setattr(sys, "executable", executable)
    asks = executor()
    asks.prepare()
    assert asks.run(os.getpid)[0] == os.getpid() and asks.works
    with pytest.raises(Failed, match="ValueError: no"):
        asks.run(endless.fails, "no")
    asks.end(None)


def test_a_default_broken_pipe_ends_no_training(process: PlannerProcess) -> None:
    """Programs that write to pipes take Python's handling of SIGPIPE back."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        asks = executor()
        os.kill(asks.run(os.getpid)[0], signal.SIGKILL)
        with contextlib.suppress(Failed):
            asks.run(len, bytes(1 << 22))
    finally:
        signal.signal(signal.SIGPIPE, before)


def test_a_forked_child_leaves_it_alone(process: PlannerProcess) -> None:
    asks = executor()
    asked = Asks(asks, time.sleep, 1.0)
    while process._asker is not asks:
        time.sleep(0.01)
    asked_of = process.pid
    child = os.fork()
    if not child:
        code = 1
        try:
            known = process.pid
            own = executor().run(os.getppid)[0]
            process.close()
            code = 0 if known is None and own == os.getpid() else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert asked.result() is None and asks.run(os.getpid)[0] == asked_of


PROGRAM = f"""
import os, sys, threading, time
sys.path.append({str(Path(__file__).parent.parent)!r})
from memmgr.common.threads import Stopped
from memmgr.native import binding
from memmgr.runtime import planner_process
from plan import endless
def plans():
    try:
        planner_process.InProcess(binding.load()).run(endless.forever)
    except Stopped:
        pass
threading.Thread(target=plans, daemon=True).start()
while planner_process.PLANNER._asker is None:
    time.sleep(0.01)
time.sleep(0.5)
print(planner_process.PLANNER.pid, flush=True)
"""


def program(then: str, start: Any = forkserver.Popen, **options: Any) -> tuple[subprocess.Popen[str], int]:
    """A process that plans for good, and its planner's pid."""
    started: subprocess.Popen[str] = start(
        [sys.executable, "-c", PROGRAM + then], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
    assert started.stdout is not None
    line = started.stdout.readline()
    assert line, started.communicate()[1]
    return started, int(line)


def test_it_ends_with_a_parent_that_is_killed() -> None:
    """Also where a forked child holds all that its parent had open."""
    started, pid = program("fork = os.fork()\ntime.sleep(60 if fork else 20)")
    started.kill()
    assert is_gone(pid)
    started.communicate()


@pytest.mark.parametrize("end", ["", "os._exit(0)", "sys.exit()"])
def test_it_ends_with_its_parent(end: str) -> None:
    started, pid = program(
        end, start=forkserver.Popen if end else subprocess.Popen
    )  # the end of torch's libraries, too
    assert started.communicate(timeout=60) == ("", "") and started.returncode == 0
    assert is_gone(pid)


def test_ctrl_c_is_the_trainings() -> None:
    started, pid = program("time.sleep(60)", start_new_session=True)
    os.killpg(started.pid, signal.SIGINT)
    _, error = started.communicate(timeout=60)
    assert error.count("Traceback") == 1 and error.strip().endswith("KeyboardInterrupt") and "planner" not in error
    assert is_gone(pid)
