"""Runs in processes of their own: their results, also when they fail."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import forkserver
import pytest

from memmgr.tools.bench import runs
from memmgr.tools.bench.runs import RunResult, RunSpec, measured, run, with_need
from memmgr.tools.gpu import simulated

WORKER = Path(runs.__file__).with_name("worker.py")
TINY = RunSpec("tiny", steps=2, sizes={"layers": 1, "heads": 2, "width": 32, "context": 16}, batch=2)


@pytest.fixture(autouse=True)
def quick_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are forked."""
    monkeypatch.setattr(runs, "subprocess", forkserver)


@pytest.fixture(scope="module")
def worker() -> dict[str, Any]:
    return runpy.run_path(str(WORKER), run_name="worker under test")


def test_an_unmanaged_run_has_no_memmgr_in_it() -> None:
    """memmgr is compared with its figures, so they must not contain memmgr."""
    program = (
        "import json, runpy, sys\n"
        f"worker = runpy.run_path({str(WORKER)!r}, run_name='worker')\n"
        f"worker['work'](json.loads({_json(TINY)!r}))\n"
        "sys.exit([name for name in sys.modules if name.split('.')[0] == 'memmgr'] or 0)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEMMGR_")}
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    done = forkserver.run([sys.executable, "-P", "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _json(spec: RunSpec) -> str:
    import json
    from dataclasses import asdict

    return json.dumps(asdict(spec))


def test_the_environment_cannot_put_an_unmanaged_run_under_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMMGR_BUDGET", "1KB")
    result = run(TINY)
    assert not result.failure
    assert not result.stats


def test_the_same_spec_gives_the_same_bits_and_another_seed_does_not() -> None:
    events: list[runs.Event] = []
    first, second = run(TINY, events.append), run(TINY)
    other = run(replace(TINY, seed=7))
    assert not first.failure
    assert first.same_bits(second)
    assert not first.same_bits(other)
    assert [event["index"] for event in events if event["event"] == "step"] == [0, 1]
    assert len(first.step_seconds) == len(first.losses) == TINY.steps
    assert first.rss_bytes > 0
    seconds = [second for second, _, _ in first.timeline]
    assert seconds == sorted(seconds)
    assert all(second >= 0 for second in seconds)


def test_in_turns_one_step_at_a_time_and_no_clock_runs_on() -> None:
    specs = [TINY, replace(TINY, label="other", steps=3), replace(TINY, label="bad", sizes={"heads": 3, "width": 32})]
    said: list[tuple[str, float]] = []
    results = runs.in_turns(specs, lambda spec, event: said.append((spec.label, time.perf_counter())))
    assert [label for label, _ in said if label != "bad"][:2] == ["tiny", "other"]  # they wait, the model made
    alone = run(TINY)
    assert results[0].same_bits(alone) and len(results[1].losses) == 3 and "Error" in results[2].failure
    steps = [label for label, _ in said][2:]
    assert steps.index("other") < len(steps) - 1 - steps[::-1].index("tiny"), "one after the other: nobody took turns"
    for result in results[:2]:
        seconds = (
            result.timeline[-1][0] if result.timeline else 0.0
        )  # a sampler that was not woken in time has no sample
        assert seconds < 0.9 * (said[-1][1] - said[0][1]), "the time of others is in it"


def test_a_run_that_hangs_in_its_turn_is_stopped() -> None:
    (result,) = runs.in_turns([replace(TINY, steps=2)], lambda spec, event: None, timeout_seconds=0.01)
    assert "stopped after" in result.failure


def test_a_crash_is_told() -> None:
    result = run(replace(TINY, sizes={"layers": 1, "heads": 3, "width": 32}))
    assert "Error" in result.failure
    assert not result.same_bits(result)


def test_a_run_that_is_killed_says_why_that_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    start = forkserver.Popen

    def popen(*args: Any, **named: Any) -> Any:
        started.append(start(*args, **named))
        return started[-1]

    monkeypatch.setattr(forkserver, "Popen", popen)
    result = run(replace(TINY, steps=1_000_000), lambda event: started[0].kill())
    assert "memory" in result.failure and "killed" in result.failure


def test_a_run_that_takes_too_long_is_stopped() -> None:
    result = run(replace(TINY, steps=1_000_000), timeout_seconds=1)
    assert result.failure == "stopped after 1 s"


def test_other_peoples_prints_are_not_events() -> None:
    result = RunResult(TINY)
    runs._take("hello\n", result, lambda event: pytest.fail("not an event"))
    assert result == RunResult(TINY)


@pytest.mark.parametrize(("seconds", "median"), [([9.0, 1.0, 3.0], 2.0), ([9.0, 1.0, 2.0, 5.0], 2.0), ([4.0], 4.0)])
def test_the_first_step_does_not_count(seconds: list[float], median: float) -> None:
    assert RunResult(TINY, step_seconds=seconds).seconds_a_step == median


def test_the_need_is_what_is_live_at_the_worst_moment() -> None:
    """120 MB live at once, while blocks of many sizes come and go, in a process whose malloc keeps nothing back."""
    program = (
        "import runpy, torch\n"
        f"worker = runpy.run_path({str(WORKER)!r}, run_name='worker')\n"
        "torch.ones(1000).sum()\n"
        "assert worker['keep_nothing_back']()\n"
        "start = worker['Sampler'](0.002)\n"
        "for _ in range(2):\n"
        "    holes = [torch.ones(n) for n in range(100_000, 2_000_000, 300_000) for _ in range(2)]\n"
        "    del holes[::2]\n"
        "    del holes\n"
        "    kept = [torch.ones(5_000_000) for _ in range(4)]\n"
        "    more = [torch.ones(2_500_000) for _ in range(4)]\n"
        "    del kept\n"
        "    kept = [torch.ones(5_000_000) for _ in range(3)]\n"
        "    del kept, more\n"
        "print(start.peak_rss)\n"
        "start.stop()\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) == pytest.approx(120e6, rel=0.03)


def test_a_reading_that_waits_for_the_interpreter_is_followed_by_others(worker: dict[str, Any]) -> None:
    """On a busy machine each reading of the bytes waits; the demo's picture had one in some seconds, drawn as blocks."""
    readings: list[int] = []
    three = threading.Event()

    def resident() -> int:
        time.sleep(0.5)
        until = time.thread_time() + (0.3 if len(readings) == 1 else 0.0)  # one of them has a search in it
        while time.thread_time() < until:
            pass
        readings.append(len(readings))
        if len(readings) == 3:
            three.set()
        return readings[-1]

    sampler = worker["Sampler"](0.002)
    sampler.resident = resident
    assert three.wait(30), "a hundred times as long as the wait went by after each"
    sampler.stop()


def test_an_unmanaged_run_learns_its_need() -> None:
    spec = replace(TINY, steps=3, sizes={"layers": 2, "heads": 2, "width": 64, "context": 64}, batch=16)
    result = with_need(run(spec), measured(spec))
    assert not result.failure
    assert len(result.losses) == 3
    assert result.same_bits(run(spec))
    assert result.need_bytes > 0
    assert any(held > 0 for _, _, held in result.timeline)


def test_thinning_keeps_the_peaks(worker: dict[str, Any]) -> None:
    points = [(float(i), 1000 if i == 777 else i % 10, -1) for i in range(10_000)]
    thin = worker["_thin"](points, most=100)
    assert len(thin) <= 100
    assert (777.0, 1000, -1) in thin
    assert worker["_thin"]([]) == []


def test_overlap_arithmetic() -> None:
    spans = simulated.union([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0)])
    assert spans == [(0.0, 2.0), (3.0, 4.0)]
    assert simulated.length(spans) == 3.0
    assert simulated.both(spans, [(1.5, 3.5)]) == 1.0


def test_strips() -> None:
    lines = simulated.strips({"kernels": [(0.0, 2.0)], "copies": [(2.0, 3.0), (3.0, 4.0)]}, columns=4)
    assert lines == ["kernels |##  |", "copies  |  ##|", "         4000.0 ms"]
    assert simulated.strips({"kernels": []}) == []
