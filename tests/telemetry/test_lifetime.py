"""The socket and the log: made and removed when they should be, private, and never in the run's way."""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forkserver
import pytest
import torch
from exactness.harness import Record, assert_left_clean, assert_same, global_state, reference, unmanaged

import memmgr
from memmgr.api import budget as budgets
from memmgr.telemetry import stream
from memmgr.telemetry.consumers import Level, Log, log_path
from memmgr.tools.view.last_error import explain
from memmgr.tools.view.run_state import read_log

from .reading import LIMIT, Net, Watching, manager, training, unpaced, wait_until

CHILD = """
import sys, time, torch, memmgr
with memmgr.budget("64MB", quiet=True):
    print("open", flush=True)
    {}
"""


def child(body: str, **environment: str) -> subprocess.Popen[str]:
    """A process that opens a budget, says so and goes on with `body`."""
    process = forkserver.Popen(
        [sys.executable, "-P", "-c", CHILD.format(body)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


def test_the_address_is_private_and_goes_with_the_budget(runtime: Path) -> None:
    before = global_state()
    with memmgr.budget(LIMIT, quiet=True):
        path = stream.socket_of(os.getpid())
        assert path.parent == runtime / "memmgr" and stat.S_ISSOCK(path.stat().st_mode)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stream.processes() == [os.getpid()]
        training()()
    assert list(runtime.iterdir()) == [] and stream.processes() == []
    assert_left_clean(before)


def no_hooks() -> None:
    modules = torch.nn.modules.module
    assert not modules._global_forward_hooks and not modules._global_forward_pre_hooks
    assert not sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks


def test_leaving_with_readers_and_a_log_leaves_nothing(runtime: Path, tmp_path: Path) -> None:
    before = global_state()
    with pytest.raises(KeyError), memmgr.budget(LIMIT, quiet=True, log=tmp_path / "run.jsonl"):
        watching = Watching(interval_seconds=0.02)
        training()()
        watching.next("sample")
        raise KeyError
    assert [(line["failed"], line["error"]) for line in watching.lines() if line["type"] == "end"] == [
        (True, "KeyError")
    ]
    watching.close()
    assert list(runtime.iterdir()) == []
    assert_left_clean(before)
    no_hooks()
    assert not [line for line in os.listdir("/proc/self/fd") if _target(line).endswith("run.jsonl")]


@pytest.mark.parametrize("telemetry", ["1", "0"])
@pytest.mark.parametrize("end", ["lines", "inside a recorded pass", "by an exception"])
def test_hooks_that_name_modules_end_with_the_budget(
    end: str, telemetry: str, runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are installed for all lines, and for a pass that is recorded; the budget may end before such a pass does."""
    monkeypatch.setenv("MEMMGR_TELEMETRY", telemetry)
    modules = torch.nn.modules.module
    options: dict[str, Any] = {"lines": True} if end == "lines" else {"trace": tmp_path / "x.trace", "trace_pass": 1}
    try:
        with memmgr.budget(LIMIT, quiet=True, **options):
            torch.nn.Linear(8, 8)(torch.ones(8))
            assert modules._global_forward_hooks and modules._global_forward_pre_hooks
            if end == "by an exception":
                raise KeyError
    except KeyError:
        pass
    no_hooks()


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


@pytest.mark.parametrize("make", ["wide open", "a file", "somebody's link"])
def test_a_folder_that_is_not_private_is_not_used(runtime: Path, make: str, tmp_path: Path) -> None:
    folder = runtime / "memmgr"
    if make == "wide open":
        folder.mkdir()
        folder.chmod(0o755)
    elif make == "a file":
        folder.touch()
    else:
        folder.symlink_to(tmp_path)
    with memmgr.budget(LIMIT, quiet=True):
        assert manager().telemetry.no_socket
        assert not any(t.name == "memmgr-telemetry" for t in threading.enumerate())
        training()()
    assert sorted(runtime.iterdir()) == [folder] and list(tmp_path.iterdir()) == []


def test_it_can_be_switched_off(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMMGR_TELEMETRY", "0")
    with memmgr.budget(LIMIT, quiet=True):
        assert list(runtime.iterdir()) == []
        assert not any(t.name == "memmgr-telemetry" for t in threading.enumerate())


def test_without_a_runtime_folder_the_temporary_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 60) / ("y" * 60)  # longer than a socket's address may be
    deep.mkdir(parents=True)
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with memmgr.budget(LIMIT, quiet=True, disk=False):
        assert stream.socket_of(os.getpid()).parent == deep / f"memmgr-{os.getuid()}"
        assert stream.processes() == [os.getpid()]
        with Watching() as watching:
            assert watching.next("hello")["pid"] == os.getpid()
    assert list(deep.iterdir()) == []


def killed(*more: str) -> Path:
    """The folder, with sockets of a process that has ended, and more."""
    folder, gone = stream.private_folder(), subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for name in (f"{gone.pid}.sock", f"{gone.pid}.new", *more):
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(folder / name))
    return folder


def test_stale_sockets_are_removed_and_busy_ones_are_not(runtime: Path) -> None:
    folder = killed(f"{os.getpid()}.sock")  # of an earlier process
    (folder / "notes.txt").touch()
    busy = socket.socket(socket.AF_UNIX)
    busy.bind(str(folder / "77.sock"))
    busy.listen(0)
    fillers = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for filler in fillers:
        filler.setblocking(False)
        try:
            filler.connect(str(folder / "77.sock"))
        except BlockingIOError:
            break
    assert stream.processes() == [77]
    assert sorted(path.name for path in folder.iterdir()) == ["77.sock", "notes.txt"]
    for each in (busy, *fillers):
        each.close()


def test_the_next_budget_removes_what_a_killed_process_left(runtime: Path) -> None:
    folder = killed()
    with socket.socket(socket.AF_UNIX) as elsewhere:  # a process that is not seen from here, in another container
        elsewhere.bind(str(folder / f"{2**22 + 1}.sock"))
        elsewhere.listen()
        with memmgr.budget(LIMIT, quiet=True):
            assert sorted(p.name for p in folder.iterdir()) == sorted([f"{os.getpid()}.sock", f"{2**22 + 1}.sock"])


def test_a_killed_process_leaves_an_address_that_the_next_look_removes(runtime: Path) -> None:
    process = child("time.sleep(60)")
    assert stream.processes() == [process.pid]
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert (runtime / "memmgr" / f"{process.pid}.sock").exists()
    with pytest.raises(stream.Unreachable, match="there is no process"):
        stream.connect(process.pid)
    assert stream.processes() == []
    assert not (runtime / "memmgr" / f"{process.pid}.sock").exists()


def test_a_process_that_exits_with_its_budget_open_takes_its_address_away(runtime: Path) -> None:
    process = forkserver.run(
        [sys.executable, "-P", "-c", "import memmgr; b = memmgr.budget('64MB'); b.__enter__(); raise SystemExit(3)"],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 3 and list(runtime.iterdir()) == [], process.stderr


def test_who_cannot_be_reached_is_told_why() -> None:
    with pytest.raises(stream.Unreachable, match="there is no process"):
        stream.connect(2**22 + 1)
    with pytest.raises(stream.Unreachable, match="no open memmgr budget"):
        stream.connect(os.getpid())


def test_a_forked_child_neither_serves_nor_unlinks(runtime: Path, tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    with memmgr.budget(LIMIT, quiet=True, log=log), Watching(interval_seconds=0.02) as watching:
        step = training()
        step()
        watching.next("sample")
        mine = len(os.listdir("/proc/self/fd"))
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                sockets = [
                    fd for fd in os.listdir("/proc/self/fd") if _target(fd).startswith(("socket:", "anon_inode:"))
                ]
                reader = f"{watching.socket.fileno()}"
                logs = [fd for fd in os.listdir("/proc/self/fd") if _target(fd).endswith("run.jsonl")]
                telemetry = [t.name for t in threading.enumerate() if t.name == "memmgr-telemetry"]
                hooks = torch.nn.modules.module._global_forward_hooks
                ours = budgets.current() is None and not logs and not telemetry and not hooks
                code = 0 if ours and len(sockets) < mine and reader in sockets else 2
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        step()
        assert watching.next("sample", after=manager().telemetry._now())["type"] == "sample"
        assert stream.processes() == [os.getpid()]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines[-1]["type"] == "end" and [line["type"] for line in lines].count("hello") == 1


def test_a_forked_child_that_exits_in_the_ordinary_way(runtime: Path) -> None:
    """Its atexit handlers run: the parent's address must stay."""
    body = "import os; pid = os.fork(); pid or sys.exit(0); os.waitpid(pid, 0); print('forked', flush=True); input()"
    process = child(body)
    assert process.stdout is not None
    assert process.stdout.readline() == "forked\n"
    assert stream.processes() == [process.pid]
    with Watching(process.pid) as watching:
        assert watching.next("hello")["pid"] == process.pid
    process.communicate("\n", timeout=60)
    assert process.returncode == 0 and list(runtime.iterdir()) == []


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_log_is_the_same_stream(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    with memmgr.budget(LIMIT, quiet=True, log=log) as mm:
        step = training()
        for _ in range(10):
            step()
    lines = _lines(log)
    assert lines[0]["type"] == "hello" and lines[-1] == {
        **lines[-1],
        "type": "end",
        "failed": False,
        "error": "",
        "stats": mm.stats(),
    }
    assert sum(line["count"] for line in lines if line["type"] == "passes") == 10 == mm.stats()["passes"]
    evicted = sum(
        i["bytes"] for line in lines if line["type"] == "events" for i in line["items"] if i["what"] == "evict"
    )
    assert evicted == mm.stats()["evicted_bytes"]
    spent = [i for line in lines if line["type"] == "events" for i in line["items"] if i["what"] in ("stall", "reload")]
    assert sum(i["seconds"] for i in spent) == pytest.approx(mm.stats()["stall_seconds"], abs=1e-6)
    modules = {i["module"] for line in lines if line["type"] == "events" for i in line["items"]}
    assert "Net.first.1" in modules or "Net.second.1" in modules, modules


def test_the_log_has_the_cells_of_its_highest_moment(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    with memmgr.budget(LIMIT, quiet=True, log=log):
        step = training()
        step()
        telemetry = manager().telemetry
        model = step.model  # type: ignore[attr-defined]
        loss = model(step.x).square().mean()  # everything is saved now

        unpaced(telemetry)
        wait_until(lambda: any(line["type"] == "cells" for line in _lines(log)))
        wait_until(lambda: "cells" not in telemetry._log.wants)
        time.sleep(5 * telemetry._log.interval_seconds)
        del loss
    found = [line for line in _lines(log) if line["type"] == "cells"]
    assert 1 <= len(found) <= 3  # while nothing grows no more are written
    cells = found[-1]["cells"]
    assert 5 <= len(cells) <= 20 and len(found[-1]["modules"]) <= 20
    assert {cell["op"] for cell in cells} & {"aten.gelu.default", "aten.addmm.default"}


def level(held: int, seconds: float = 10.0, passes: int = 1) -> Level:
    return seconds, held, held, 0, 0, passes


def test_a_run_that_grows_for_ever_writes_so_many_cells(tmp_path: Path) -> None:
    log = Log(tmp_path / "run.jsonl")
    written = 0
    for i in range(10_000):
        log.take_level(level(1000 * i * i), 0.1 * i)
        if "cells" in log.wants:
            log.had("cells")
            written += 1
    log.close()
    assert written == Log.MOST_CELL_LINES


def test_a_log_looks_at_new_highs_and_at_leaks(tmp_path: Path) -> None:
    log = Log(tmp_path / "run.jsonl")

    def wanted(of: Level) -> str:
        log.take_level(of, 0.0)
        found = "urgent" if log.urgent else "wanted" if log.wants else ""
        if found:
            log.had("cells")
        return found

    assert wanted(level(100, seconds=0.2, passes=0)) == "", "in the first pass every moment is a high"
    assert wanted(level(50)) == "", "far below the highest moment"
    assert wanted(level(95)) == "urgent" and wanted(level(96)) == ""
    assert wanted(level(106)) == "wanted" and wanted(level(300)) == "urgent"
    log.collect([], 0, [(0, 1000, 0.1, 0.1, 1.0)])
    assert wanted(level(800)) == "", "a pass had a peak that no level met"
    assert wanted(level(950)) == "urgent"
    log.look({"leaks": ["a leak"]})
    assert wanted(level(10)) == "urgent" and wanted(level(10)) == ""
    log.look({"leaks": ["a leak"]})
    assert wanted(level(10)) == ""
    log.close()


def test_the_log_names_the_holders_of_a_leak_at_a_late_moment(tmp_path: Path) -> None:
    """It had the parameters of the first moments alone, since the share of the time had no room for another look."""
    log, held = tmp_path / "run.jsonl", []
    with memmgr.budget("64MB", quiet=True, log=log):
        model, x = Net(), torch.randn(1024, 64)
        manager()._look_for_leaks = manager()._leaks.look
        for _ in range(9):
            held.append(model(x).square())
            held[-1].mean().backward(retain_graph=True)
        manager().telemetry._not_before["cells"] = time.perf_counter() + 1000.0
        wait_until(lambda: any(line["type"] == "explained" and line["leaks"] for line in _lines(log)))
        needed = memmgr.stats()["unmanaged_peak_bytes"]
    last = read_log(log)[0][0].explained
    with_leaks = [line for line in _lines(log) if line["type"] == "explained" and line["leaks"]]
    assert last in with_leaks and last["bytes"] == max(line["bytes"] for line in with_leaks)
    leaked = [row for row in last["holders"] if row["leak"]]
    assert last["holders"][: len(leaked)] == leaked, "they come first"
    assert {row["name"] for row in leaked} >= {"addmm", "gelu"} and not last["at_peak"]
    assert sum(row["bytes"] for row in leaked) > 0.5 * last["bytes"] and last["bytes"] > 0.8 * needed


def test_the_log_of_passes_that_all_differ_says_why_they_have_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memmgr.observe.slowness.is_slow", lambda stats: True)
    log = tmp_path / "run.jsonl"
    with memmgr.budget(LIMIT, quiet=True, log=log):
        model = Net()
        for rows in range(1024, 1040):
            model(torch.randn(rows, 64)).square().mean().backward()
    why = [line["text"] for line in _lines(log) if line["type"] == "event" and line["what"] == "no_plan"]
    assert why and re.fullmatch(r"1\d were unlike all earlier ones \(pad changing shapes to a few sizes\)", why[-1]), (
        why
    )


def test_a_log_has_the_levels_between_its_samples(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    with memmgr.budget(LIMIT, quiet=True, log=log):
        step = training()
        for _ in range(30):
            step()
    found = _lines(log)
    samples = [line for line in found if line["type"] == "sample"]
    levels = [level for line in found if line["type"] == "levels" for level in line["each"]]
    assert len(levels) > 2 * len(samples) and all(len(level) == 6 for level in levels)
    points = read_log(log)[0][0].points
    assert len(points) == len(samples) + len(levels)
    assert [point.seconds for point in points] == sorted(point.seconds for point in points)
    assert [point.passes for point in points] == sorted(point.passes for point in points) and points[-1].passes == 30
    assert max(point.evictable_bytes for point in points) > 4_000_000


def test_the_first_levels_of_a_log_come_at_any_cost(tmp_path: Path) -> None:
    log = Log(tmp_path / "run.jsonl")
    intervals = []
    for i in range(Log.HURRIED + 2):
        log.take_level(level(0), float(i))
        intervals.append(log.level_due - i)
    log.close()
    assert intervals == pytest.approx([Log.LEAST_SECONDS] * (Log.HURRIED - 1) + [Log.LEVEL_SECONDS] * 3)
    assert not log.hurries


def test_a_plan_is_in_the_log_with_the_time_at_which_it_was_there(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    with memmgr.budget(LIMIT, quiet=True, log=log, policy="offload") as mm:
        step = training()
        deadline = time.monotonic() + 30
        while not mm.stats()["plans"]:
            step()
            assert time.monotonic() < deadline
        wall = mm.stats()["wall_seconds"]
    plans = [line for line in _lines(log) if line["type"] == "event" and line["what"] == "plan"]
    assert len(plans) == mm.stats()["plans"] >= 1 and all(plan["ops"] > plan["offload"] > 0 for plan in plans)
    assert sum(plan["took_seconds"] for plan in plans) == pytest.approx(mm.stats()["plan_seconds"], abs=2e-3)
    assert plans[0]["took_seconds"] < plans[0]["seconds"] <= wall  # a pass is measured before


def test_budgets_of_one_process_follow_each_other_in_one_log(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    log.write_text("left over from an earlier run\n")
    for _ in range(2):
        with memmgr.budget(LIMIT, quiet=True, log=str(log)):
            training()()
    kinds = [line["type"] for line in _lines(log)]
    assert kinds.count("hello") == kinds.count("end") == 2


def test_a_budget_error_is_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    with pytest.raises(memmgr.BudgetError) as raised, memmgr.budget(LIMIT // 4, quiet=True, log=log):
        step = training()
        step()
    events = [line for line in _lines(log) if line["type"] == "event"]
    assert [event["what"] for event in events] == ["budget_error"]
    assert events[0]["floor_bytes"] == raised.value.floor_bytes and events[0]["resident"]["parameters"] > 0
    said = explain(log)
    assert said.startswith(str(raised.value)) and all(reason in said for reason in raised.value.details)
    assert re.search(r"Resident, by kind:\n(.*\n)*? +[\d.]+ \w?B  parameters\n", said), said
    assert _lines(log)[-1]["failed"] is True


def test_ranks_have_logs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert log_path("a/run.jsonl") == Path("a/run.jsonl")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert log_path("a/run.jsonl") == Path("a/run.rank3.jsonl")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert log_path("a/run.jsonl") == Path("a/run.jsonl")


@pytest.mark.parametrize("log", ["", "no/such/folder/run.jsonl", "/"])
def test_a_log_that_cannot_be_is_refused_at_once(log: str) -> None:
    with pytest.raises(ValueError, match=r"log: .* (is empty|does not exist|is a folder; name a file in it)"):
        memmgr.budget(LIMIT, log=log)


def test_a_full_disk_ends_the_log_and_not_the_run() -> None:
    with (
        pytest.warns(RuntimeWarning, match="not complete: No space left"),
        memmgr.budget(LIMIT, log="/dev/full", quiet=True),
    ):
        step = training()
        for _ in range(3):
            step()


def test_an_error_in_the_telemetry_is_seen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(telemetry: Any, wanting: Any) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("memmgr.telemetry.publisher.Telemetry._map", fail)
    with (
        pytest.warns(RuntimeWarning, match="the telemetry failed") as warned,
        memmgr.budget(LIMIT, quiet=True),
        Watching(interval_seconds=0.02, want=["map"]) as watching,
    ):
        watching.next("sample")
        wait_until(lambda: bool(manager().telemetry.errors))
        training()()
    assert len(warned) == 1


def test_what_is_told_at_the_end_may_be_an_error_there(runtime: Path) -> None:
    """Under `-W error` the warning is an exception: nothing may be left open by it."""
    before = global_state()
    with pytest.raises(RuntimeWarning, match="not complete"), warnings.catch_warnings():
        warnings.simplefilter("error")
        with memmgr.budget(LIMIT, log="/dev/full", quiet=True):
            training()()
    assert list(runtime.iterdir()) == [] and budgets.current() is None
    assert_left_clean(before)
    with memmgr.budget(LIMIT, quiet=True) as mm:
        training()()
    assert mm.stats()["passes"] == 1


def test_it_is_sampled_less_often_the_longer_it_runs(tmp_path: Path) -> None:
    log = Log(tmp_path / "run.jsonl")
    hours = 24 * 3600.0
    samples, elapsed = 0, 0.0
    while elapsed < hours:
        log.send(b"{}\n", sample=True)
        samples += 1
        elapsed += log.interval_seconds
    levels, elapsed = 0, 0.0
    while elapsed < hours:
        log.take_level(level(0), elapsed)
        levels, elapsed = levels + 1, log.level_due
    log.close()
    assert 5_000 < samples < 20_000 and 10_000 < levels < 40_000


def _switches(name: str) -> int:
    """How often a thread of this process has waited: it waits again each time that it wakes."""
    thread = next(t for t in threading.enumerate() if t.name == name)
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(status.split("voluntary_ctxt_switches:")[1].split()[0])


def test_without_a_reader_no_thread_wakes() -> None:
    with memmgr.budget(LIMIT, quiet=True):
        step = training()
        step()
        telemetry = manager().telemetry
        time.sleep(0.05)
        before = _switches("memmgr-telemetry")
        for _ in range(5):
            step()
        time.sleep(0.3)
        assert _switches("memmgr-telemetry") == before
        assert not telemetry.detail and not telemetry.modules.watching


def test_its_own_time_stays_under_its_share() -> None:
    """However often a reader asks, the thread pays for its processor time by waiting."""
    with memmgr.budget(LIMIT, quiet=True):
        step = training()
        with Watching(interval_seconds=0.02, want=["cells", "map", "holders"], cells=500, columns=4096) as watching:
            watching.next("sample")
            for _ in range(5):
                step()
            watching.next("cells")  # the first looks for names, once: the more modules the process has, the longer
            thread = next(t for t in threading.enumerate() if t.name == "memmgr-telemetry")
            assert thread.native_id is not None
            clock = (~thread.native_id << 3) | 6
            used, began = time.clock_gettime(clock), time.perf_counter()
            while time.perf_counter() - began < 2.0:
                step()
            share = (time.clock_gettime(clock) - used) / (time.perf_counter() - began)
    # Its shares sum to 0.28 %; a first line of each kind, which nothing is known about, comes on top.
    assert share < 0.01


def _plain(seed: int, scope: Callable[[], Any]) -> Record:
    return _train(seed, scope, lambda step: None)


def _attached(seed: int, scope: Callable[[], Any]) -> Record:
    def look(step: int) -> None:
        unpaced(manager().telemetry)
        with Watching(interval_seconds=0.02, want=["cells", "map", "holders"]) as watching:
            watching.next("sample")
            if step % 2:
                watching.next("map")

    return _train(seed, scope, look)


def _train(seed: int, scope: Callable[[], Any], between: Callable[[int], None]) -> Record:
    record = Record()
    with scope():
        step = training(seed)
        for number in range(10):
            record.losses(step())
            between(number)
        record.model(step.model)  # type: ignore[attr-defined]
        record.rng()
    return record


@pytest.mark.parametrize("policy", ["auto", pytest.param("torture", marks=pytest.mark.slow)])  # readers only look
def test_attaching_ten_times_changes_no_bit(policy: str) -> None:
    want = reference(_plain)
    with_readers = unmanaged(lambda seed, _: _attached(seed, lambda: memmgr.budget(LIMIT, policy=policy, quiet=True)))
    assert_same(want, with_readers, f"{policy} with readers coming and going")
    wait_until(lambda: not any(t.name == "memmgr-telemetry" for t in threading.enumerate()))


SPAWNED = """
import multiprocessing, os, sys
import torch, memmgr

def train(kept):
    with memmgr.budget("1GB", log="run.jsonl", quiet=True):
        torch.ones(10**6).sum()
        if kept:
            child = multiprocessing.get_context("spawn").Process(target=train, args=(False,))
            child.start()
            child.join()
            assert child.exitcode == 0
    print(os.getpid())

if __name__ == "__main__":
    train(True)
    train(False)
"""


def test_a_child_has_a_log_of_its_own(tmp_path: Path) -> None:
    """It opened its parent's anew: lines were lost, and there was a hole in the file."""
    script = tmp_path / "spawns.py"
    script.write_text(SPAWNED)
    done = forkserver.run([sys.executable, "-P", str(script)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    spawned, parent, again = done.stdout.split()
    assert parent == again
    logs = {path.name: path.read_text().splitlines() for path in tmp_path.glob("*.jsonl")}
    assert sorted(logs) == sorted(["run.jsonl", f"run.{spawned}.jsonl"])
    kinds = {name: [json.loads(line)["type"] for line in lines] for name, lines in logs.items()}
    assert kinds["run.jsonl"].count("hello") == kinds["run.jsonl"].count("end") == 2
    assert kinds[f"run.{spawned}.jsonl"].count("end") == 1
    with memmgr.budget(LIMIT, log=str(tmp_path / "run.jsonl"), quiet=True):  # it has no owner: it is begun anew
        pass
    assert (tmp_path / "run.jsonl").read_text().count('"hello"') == 1
