"""The demo: its verdict, its output with and without the optional packages, and one quick run for real."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import forkserver
import pytest

from memmgr.tools import cli
from memmgr.tools.bench import runs
from memmgr.tools.bench.runs import Event, RunResult, RunSpec
from memmgr.tools.common import console, other_work
from memmgr.tools.verbs import demo
from memmgr.tools.view import plot

MB = 1_000_000


def _fake(spec: RunSpec, on_event: Callable[[Event], None]) -> RunResult:
    """A run that went as promised."""
    for index in range(spec.steps):
        on_event({"event": "step", "index": index, "loss": (5.0 - index).hex(), "seconds": 0.1})
    result = RunResult(spec, ["0x1.0p+2"], "abc", 10_900_000, [0.2, 0.1, 0.1], 110 * MB, timeline=[(0.0, MB, -1)])
    if spec.budget_bytes is None:
        result.need_bytes = 100 * MB
        return result
    result.rss_bytes = spec.budget_bytes + 10 * MB
    result.stats = {"resident_bytes.peak": spec.budget_bytes, "evictions": 3, "evicted_bytes": 4 * MB, "offloads": 5}
    result.stats |= {"offload_bytes": 6 * MB, "recomputes": 7, "recompute_seconds": 0.25}
    result.timeline = [(0.0, MB, MB), (1.0, 2 * MB, 2 * MB)]
    return result


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Runs the demo over made-up results; `change` may spoil those under a budget."""

    def call(*words: str, change: Callable[[RunResult], object] = lambda result: None) -> int:
        def in_turns(specs: Sequence[RunSpec], on_event: Callable[[RunSpec, Event], None]) -> list[RunResult]:
            results = [_fake(spec, partial(on_event, spec)) for spec in specs]
            for result in results:
                if result.spec.budget_bytes is not None:
                    change(result)
            return results

        monkeypatch.setattr(demo, "in_turns", in_turns)
        monkeypatch.setattr(demo, "measured", lambda spec: _fake(spec, lambda event: None))
        return cli.main(["demo", "--out", str(tmp_path / "x.png"), *words])

    return call


def test_all_as_promised(fake: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert fake() == 0
    shown = capsys.readouterr()
    assert "same bits: yes" in shown.out
    assert "75 %" in shown.out and "35 MB" in shown.out and "3 (4.0 MB)" in shown.out and "7 (0.2 s)" in shown.out
    assert "[40/40]" in shown.err
    if plot.available():
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("seconds", "busy"), [(0.4, False), (8.0, True)])
def test_other_programs_at_work_are_reported_with_their_effect(
    fake: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    busy: bool,
) -> None:
    """The cores have 20 seconds: two of them, ten each."""
    monkeypatch.setattr(other_work.os, "sched_getaffinity", lambda pid: {0, 1})
    others, clock = iter([100.0, 100.0 + seconds]), iter([5.0, 15.0])
    monkeypatch.setattr(other_work, "_seconds_of_others", lambda: next(others))
    monkeypatch.setattr(other_work, "perf_counter", lambda: next(clock))
    assert fake() == 0
    told = "the machine was busy: other programs took 40% of its cores' time, so times are too long"
    assert (told in capsys.readouterr().err) is busy


def test_own_work_is_not_that_of_other_programs() -> None:
    begun = other_work._own_seconds()
    spins = "import sys, time\nwhile time.process_time() < 1: pass\nprint(flush=True)\nsys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", spins], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    alive = other_work._own_seconds() - begun
    child.communicate()
    ended = other_work._own_seconds() - begun
    assert alive > 0.9 and ended > 0.9


def test_the_time_left_is_that_of_the_steps_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter([0.0, 100.0, 103.0, 109.0, 400.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(now))
    bar = console.ProgressBar(5)
    bar.say("starts")
    for done in range(1, 5):
        bar.say(f"step {done}", advance=1)
    said = capsys.readouterr().err.splitlines()
    assert said[:4] == ["[0/5] starts", "[1/5] step 1", "[2/5, 9 s left] step 2", "[3/5, 9 s left] step 3"]
    assert said[4] == "[4/5, 1 min 40 s left] step 4"


def test_a_picture_that_cannot_be_drawn_is_told_before_the_training(
    fake: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    if plot.available():
        assert fake("--out", "x.txt") == 2
        assert "ends in none of .png" in capsys.readouterr().err


def test_other_bits_fail(fake: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert fake(change=lambda result: setattr(result, "digest", "abd")) == 1
    assert "same bits: NO" in capsys.readouterr().out


def test_another_loss_fails(fake: Callable[..., int]) -> None:
    assert fake(change=lambda result: result.losses.append("0x0p+0")) == 1


def test_a_passed_budget_fails(fake: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    def pass_it(result: RunResult) -> None:
        result.stats["resident_bytes.peak"] += 512

    assert fake(change=pass_it) == 1
    assert "the budget was passed" in capsys.readouterr().out


def test_a_process_that_grows_beside_its_budget_fails(fake: Callable[..., int]) -> None:
    assert fake(change=lambda result: setattr(result, "rss_bytes", result.rss_bytes + 60 * MB)) == 1


def test_a_failed_run_fails_and_says_why(fake: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert fake(change=lambda result: setattr(result, "failure", "BudgetError: 1 GB")) == 1
    shown = capsys.readouterr().out
    assert "BudgetError: 1 GB" in shown and "same bits: not of all, because a run failed" in shown and "NO" not in shown


def test_without_an_unmanaged_run_no_bits_are_called_other(
    fake: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a container: the largest process is the one that the kernel kills."""
    call = demo._judge
    monkeypatch.setattr(
        demo, "_judge", lambda result, first: (setattr(first, "failure", "killed"), call(result, first))[1]
    )
    assert fake() == 1
    shown = capsys.readouterr().out
    assert "same bits: not compared" in shown and "NO" not in shown and "nan" not in shown and "killed" in shown


def test_more_than_the_container_has_is_said_before_it_is_taken(
    fake: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "memory_bytes", lambda: 200 * MB)
    assert fake() == 2  # 100 + 75 + 50 + 35 MB
    assert "hold 260 MB together, more than the 200 MB" in capsys.readouterr().err
    assert fake("--budgets", "75") == 0


def test_options(fake: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert fake("--policy", "evcit") == 2 and "unknown policy" in capsys.readouterr().err  # before anything is started
    assert fake("--budgets", "60%, 40", "--policy", "lru+offload", "--steps", "4", "--json") == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["spec"]["budget_bytes"] for run in runs] == [None, 60 * MB, 40 * MB]
    assert {run["spec"]["policy"] for run in runs[1:]} == {"lru+offload"}
    assert {run["spec"]["steps"] for run in runs} == {4}


@pytest.mark.parametrize("out", ["/proc/x.png", "file/x.png"])
def test_a_picture_that_cannot_be_written_is_said_first(
    out: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a container whose folder is another user's, or read-only: the training takes minutes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr(plot, "available", lambda: True)
    monkeypatch.setattr(demo, "measured", lambda spec: pytest.fail("it trains"))
    assert cli.main(["demo", "--out", out]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(f"memmgr demo: cannot write {out}: .+; name another place with --out\n", said)


@pytest.mark.parametrize("words", [("--budgets", "0"), ("--budgets", "half"), ("--budgets", ""), ("--steps", "0")])
def test_bad_options_are_refused(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["demo", *words])
    assert end.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_without_rich_and_matplotlib(
    fake: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_rich", lambda: False)
    monkeypatch.setattr(plot, "available", lambda: False)
    assert fake() == 0
    assert "pip install 'matplotlib>=3.8'" in capsys.readouterr().out


def test_the_budgets_are_shares_of_the_need(fake: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    fake("--json")
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["spec"]["budget_bytes"] for run in runs[1:]] == [75 * MB, 50 * MB, 35 * MB]


def test_a_failed_unmanaged_run_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def measured(spec: RunSpec) -> RunResult:
        asked.append(spec)
        return RunResult(spec, failure="no")

    monkeypatch.setattr(demo, "measured", measured)
    assert cli.main(["demo", "--out", str(tmp_path / "x.png")]) == 1
    assert len(asked) == 1


def test_for_real_with_a_small_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way: an unmanaged process, a managed one in 60 % of its memory, the same bits."""
    monkeypatch.setattr(runs, "subprocess", forkserver)
    code = cli.main(["demo", "--quick", "--steps", "2", "--budgets", "60", "--json", "--out", str(tmp_path / "x.png")])
    shown = json.loads(capsys.readouterr().out)
    unmanaged, managed = shown["runs"]
    assert code == 0, shown
    assert managed["same_bits"] and managed["within"]
    assert managed["digest"] == unmanaged["digest"]
    # Without this the case would prove nothing.
    assert unmanaged["rss_bytes"] > 1.3 * managed["spec"]["budget_bytes"]
    assert managed["stats"]["evictions"] + managed["stats"]["offloads"] > 0


def test_the_picture_survives_a_failed_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    good = _fake(replace(demo.QUICK, budget_bytes=2 * MB), lambda event: None)
    plot.memory_over_time([good, RunResult(demo.QUICK, failure="no")], tmp_path / "y.png", "two")
    assert (tmp_path / "y.png").stat().st_size > 1000


def test_make_demo_installs_what_it_needs_and_says_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools" / "house"))
    make_demo = importlib.import_module("demo")
    names = {re.split("[<>=]", package)[0] for package in make_demo.packages()}
    assert names == {"torch", "psutil", "numpy", "matplotlib", "rich", "scikit-build-core", "cmake", "ninja"}
    line = "  [9/27] Building CXX object CMakeFiles/memmgr_core.dir/core/device_lent.cpp.o"
    assert make_demo.file_of(line) == "compiling the core: file 9 of 27, device_lent.cpp"
    with pytest.raises(SystemExit, match="compiling failed; the lines above are the end of: sh -c"):
        make_demo.done("compiling", ["sh", "-c", "echo no such header >&2; exit 3"], make_demo.file_of)
    assert capsys.readouterr().err == "\nno such header\n"
