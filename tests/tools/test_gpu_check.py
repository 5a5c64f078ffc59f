"""The check of a GPU: its frame, its verdicts, and a rehearsal of some acts on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from driver import build

from memmgr.policies.trace import TierLink
from memmgr.tools import cli
from memmgr.tools.bench import measure
from memmgr.tools.common.rates import Rates, read_rates
from memmgr.tools.gpu import check, figures, measured, plans
from memmgr.tools.gpu.check import Check
from memmgr.tools.gpu.plans import Act, Place
from memmgr.tools.gpu.verdicts import RISKS, Figures, next_steps, summary

TOOL = Path(check.__file__)


def script(name: str, text: str, limit: float = 20, **more: Any) -> Act:
    """An act that runs a few lines of Python."""
    return Act(name, [sys.executable, "-c", text], more.pop("group", name), limit, **more)


def said(out: Path, act: str, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "raw.jsonl").read_text().splitlines()]
    return [line for line in lines if line["act"] == act and line.get("event") == event]


GOOD = """print('{"event": "check", "name": "one", "ok": true}')"""
TWO_THREADS = """
import threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
def waits_for_ever():
    time.sleep(60)
waits_for_ever()
"""


# ---- the frame -------------------------------------------------------------------------------------------------------


def test_a_hanging_act_is_killed_with_stacks_and_a_crashing_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "LEAST_SECONDS", 0.5)
    runner = Check(Place(tmp_path, "cpu"), 60)
    crash = "import os; print('no JSON', flush=True); os.abort()"
    acts = [script("hangs", TWO_THREADS, limit=1.5), script("crashes", crash), script("goes on", GOOD)]
    runner.all([*acts, script("depends", GOOD, needs="hangs")])
    assert said(tmp_path, "hangs", "ended")[0]["code"] == "killed after 2 s"
    assert "waits_for_ever" in said(tmp_path, "hangs", "ended")[0]["stderr"]
    errors = (tmp_path / "errors.txt").read_text()
    assert errors.count("most recent call first") >= 3 and "==== crashes (-6) ====" in errors
    assert said(tmp_path, "crashes", "ended")[0]["code"] == -6
    assert said(tmp_path, "crashes", "text")[0]["text"] == "no JSON"
    assert said(tmp_path, "goes on", "ended")[0]["code"] == 0 and said(tmp_path, "goes on", "check")[0]["ok"]
    assert "hangs" in said(tmp_path, "depends", "skipped")[0]["why"]
    assert not summary(runner.lines)


def test_the_first_crash_runs_again_under_the_tools_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "compute-sanitizer").write_text("#!/bin/sh\necho under $0 $*\n")
    (tools / "compute-sanitizer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    runner = Check(Place(tmp_path / "out", "cpu"), 60)
    told = "import sys; sys.exit('RuntimeError: CUDA error: an illegal memory access was encountered')"
    runner.all(
        [script("wrong", "raise SystemExit(1)"), script("first", told), script("other", "import os; os.abort()")]
    )
    again = said(tmp_path / "out", "compute-sanitizer first", "text")
    assert len(again) == 1 and "--tool memcheck" in again[0]["text"]
    acts = [line["act"] for line in runner.lines if line.get("event") in ("ended", "skipped")]
    assert acts == ["wrong", "first", "compute-sanitizer first", "other"]  # no signal: no backtrace; once in all


@pytest.mark.parametrize("full", [False, True])
def test_a_folder_that_cannot_be_written_to_costs_its_lines_only(
    full: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "file" / "below"
    if full:
        out = tmp_path
        for name in ("raw.jsonl", "errors.txt"):
            (out / name).symlink_to("/dev/full")
    else:
        (tmp_path / "file").write_text("no folder")
    runner = Check(Place(out, "cpu"), 60)
    runner.all([script("good", GOOD), script("bad", "raise SystemExit('no')")])
    assert not summary(runner.lines)
    text = capsys.readouterr().out
    assert "good | one | ok" in text and "good | ended 0" in text and "bad | ended 1" in text
    assert full or "raw.jsonl cannot be written" in text


def test_a_second_start_skips_what_ended_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counted = f"open({str(tmp_path / 'count')!r}, 'a').write('x')\n"
    acts = [
        script("good", counted + GOOD),
        script("bad", counted + "raise SystemExit(3)"),
        script("last", GOOD, needs="good"),
    ]
    Check(Place(tmp_path, "cpu"), 60).all(acts)
    with (tmp_path / "raw.jsonl").open("a") as file:
        file.write('{"act": "last", "eve')  # the machine ended here
    again = Check(Place(tmp_path, "cpu"), 60)
    again.all(acts)
    assert (tmp_path / "count").read_text() == "xxx"
    summary(again.lines)
    assert capsys.readouterr().out.count("good | one | ok") == 1  # known results are part of the summary


def test_what_does_not_fit_into_the_time_is_skipped(tmp_path: Path) -> None:
    runner = Check(Place(tmp_path, "cpu"), 2)
    runner.all([script("late", GOOD)])
    assert said(tmp_path, "late", "skipped")[0]["why"] == "no time left"
    assert [v.real for v in (risk(Figures(runner.lines)) for risk in RISKS) if v.name == "F6"] == [True]


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--device", "cpu", "--only", "bitz"], "no act begins with 'bitz'; there are driver calls, smoke mapped"),
        (["--device", "cpu", "--seconds", "0"], "there is no time"),
        (["first"], "the driver has no GPU"),
        (
            ["--simulated", "/nowhere/card.json"],
            "--simulated: [Errno 2] No such file or directory: '/nowhere/card.json'",
        ),
        (["--simulated", "--only", "bits"], "no act begins with 'bits'; there are timing gpt2, timing resnet50, plain"),
    ],
)
def test_bad_arguments_are_one_line(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMMGR_DRIVER", "/nowhere/libcuda.so.1")
    assert cli.main(["gpu-check", *words, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_both_calls_have_limits_that_fit_and_names_of_their_own(tmp_path: Path) -> None:
    for call, seconds in plans.CALLS.values():
        acts = call(Place(tmp_path))
        assert len({act.name for act in acts}) == len(acts)
        assert all(0 < act.limit_seconds <= 75 for act in acts)
        assert {act.needs for act in acts} - {""} <= {"smoke"} and seconds <= 400


def test_by_its_path_it_rehearses_an_act_without_importing_memmgr(tmp_path: Path) -> None:
    """One LSTM under four policies, as the acts run it on a GPU."""
    command = [sys.executable, "-P", "-X", "importtime", str(TOOL), "first", "--device", "cpu", "--only", "bits lstm"]
    done = subprocess.run([*command, "--out", str(tmp_path), "--seconds", "100"], capture_output=True, text=True)
    assert done.stdout.startswith("A rehearsal on the CPU"), done.stdout + done.stderr[-2000:]
    assert done.returncode == 0, done.stdout
    assert "| memmgr\n" not in done.stderr and "| torch\n" not in done.stderr
    results = {line["run"]: line for line in said(tmp_path, "bits lstm", "result")}
    assert set(results) == {"none", "none again", "measure", "auto", "offload", "evict", "torture"}
    assert len({line["digest"] for line in results.values()}) == 1
    assert results["torture"]["per_step"]["offloads"] > 0
    assert "F10 FALSE" in done.stdout and "OTHER BITS" not in done.stdout


def test_a_simulation_trains_in_virtual_time_and_says_so_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small model through the command, the check's process and train.py."""
    runs = [
        {"name": "none", "warm": 1, "steps": 2},
        {"name": "unlimited", "measure": True, "warm": 1, "steps": 2},
        {"name": "half auto", "of_activations": 0.5, "policy": "offload", "warm": 2, "steps": 2},
    ]

    def acts(place: Place) -> list[Act]:
        return [plans.train(place, "timing unet", "timing unet", 20, {"model": "unet", "runs": runs, "host": "1GiB"})]

    monkeypatch.setitem(plans.CALLS, "first", (acts, 25))
    code = cli.main(["gpu-check", "first", "--simulated", "--out", str(tmp_path)])
    first, *lines = capsys.readouterr().out.splitlines()
    assert code == 0, lines
    assert first.startswith("A SIMULATION with the figures of ") and "no GPU was used" in first
    results = {line["run"]: line for line in said(tmp_path, "timing unet", "result")}
    none, half = results["none"], results["half auto"]
    assert 1e-3 < none["step"] < 20e-3  # of virtual time: this machine takes longer
    assert none["simulated"]["kernels"] <= none["step"] * 1.001 and none["simulated"]["copies"] == 0
    assert half["per_step"]["offload_bytes"] > 0 and half["peak"] <= half["budget"] < results["unlimited"]["peak"]
    assert half["DtoH"]["seconds"] == pytest.approx(half["simulated"]["out_bytes"] / 54.9e9, rel=0.1)
    assert 1e-5 < half["per_step"]["own_seconds"] < 1  # by the machine's clock
    assert any("timing unet, half auto |" in line and " ms, not in the step | ideal" in line for line in lines)
    assert any("timing unet, half auto |" in line and "ideal" in line and "idle ms:" in line for line in lines)
    assert any(line.startswith("F1 ") for line in lines)


@pytest.mark.slow  # GPT-2 124M, whose kernels do nothing: a minute
def test_a_planned_step_of_gpt2_moves_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sites take all pages of the budget, so that a block of the heap passes it by the end of a page."""
    fixed = {"warm": 6, "settle": 60, "settle_seconds": 60, "steps": 4}
    runs = [
        {"name": "unlimited", "measure": True, "warm": 3, "steps": 2, "digest": False},
        {"name": "half auto", "of_activations": 0.5, **fixed},
    ]

    def acts(place: Place) -> list[Act]:
        return [plans.train(place, "timing gpt2", "timing gpt2", 150, {"model": "gpt2", "runs": runs, "host": "16GiB"})]

    monkeypatch.setitem(plans.CALLS, "first", (acts, 200))
    cli.main(["gpu-check", "first", "--simulated", "--out", str(tmp_path)])
    unlimited, half = said(tmp_path, "timing gpt2", "result")
    assert half["simulated"]["maps"] == 0 and half["per_step"]["planned_passes"] == 1
    assert half["step"] < 2 * unlimited["step"]


# ---- verdicts --------------------------------------------------------------------------------------------------------


def timing(run: str, **figures: Any) -> dict[str, Any]:
    line = {"act": "timing gpt2", "event": "result", "run": run, "step": 0.1, "host_step": 0.1, "nvml_before": 10**9}
    return line | {"nvml_peak": 10 * 10**9, "reserved_peak": 8 * 10**9} | figures


def verdicts(*lines: dict[str, Any]) -> dict[str, bool | None]:
    return {verdict.name: verdict.real for verdict in (risk(Figures(lines)) for risk in RISKS)}


def test_without_figures_every_verdict_is_unknown() -> None:
    assert set(verdicts().values()) == {None}
    assert list(verdicts())[:10] == [f"F{number}" for number in range(1, 11)]


def test_verdicts_follow_the_figures() -> None:
    plain = timing("none")
    profiled = {"kernel_seconds": 0.1, "HtoD": {"seconds": 0.2, "under_kernels": 0.095}}
    good = timing("half auto", budget=5 * 10**9, planned={"overhead": 1.2}, step=0.13, **profiled)
    assert [verdicts(plain, good)[name] for name in ("F1", "F2", "F4")] == [False, False, False]
    slow = timing("half auto", step=0.3, planned={"overhead": 1.2}, per_step={"device.map_nanoseconds": 4e6})
    slow |= {"DtoH": {"seconds": 0.1, "under_kernels": 0.02}, "kernel_seconds": 0.1}
    slow |= {"beside_planner": {"steps": 3, "seconds": 0.6}, "committed_peak": 6 * 10**9, "budget": 5 * 10**9}
    found = verdicts(plain, slow)
    assert [found[name] for name in ("F1", "F2", "F4", "F13", "F21")] == [True, True, True, True, True]
    opened = [{"act": "a", "event": "opened", "run": "x", "budget": 9, "seconds": s} for s in (3.0, 0.2, 0.7)]
    assert verdicts(*opened[:2])["F5"] is False and verdicts(*opened)["F5"] is True
    for busy, real in ((0.95, False), (0.85, True)):
        limited = timing(
            "quarter auto", DtoH={"seconds": 0.3 * busy}, HtoD={"seconds": 0.2}, kernel_seconds=0.1, step=0.3
        )
        limited["DtoH"]["under_kernels"] = limited["HtoD"]["under_kernels"] = 0.1
        assert verdicts(plain, limited)["LINK"] is real
        assert verdicts(plain, limited | {"kernel_seconds": 0.29})["LINK"] is None  # the kernels are the limit
    assert verdicts(plain, timing("quarter auto"))["LINK"] is None  # there is no profile
    lost = {"act": "driver calls", "name": "blocks", "detail": {"kernel_wrong_words": 3}}
    assert verdicts(lost)["F16"] is True


def test_nvml_passes_the_budget_only_by_more_than_it_may() -> None:
    """A plain run has 1 GB outside its allocator: 10 over a start of 1, and 8 in it."""
    plain = timing("none")
    within = timing("half auto", budget=5 * 10**9, nvml_peak=7_250_000_000)
    above = timing("half auto", budget=5 * 10**9, nvml_peak=7_400_000_000)
    assert Figures([plain, within]).nvml_over(within) == 0
    assert Figures([plain, above]).nvml_over(above) == 400_000_000
    assert Figures([above]).nvml_over(above) == 0  # nothing to compare with


def test_the_decision_table_names_what_applies(capsys: pytest.CaptureFixture[str]) -> None:
    ends = [{"act": f"smoke {pool}", "event": "ended", "code": code} for pool, code in (("mapped", -11), ("native", 0))]
    digests = [{**timing(run, digest=digest), "act": "bits unet"} for run, digest in (("none", "a"), ("evict", "b"))]
    steps = list(next_steps(Figures([*ends, *digests]), []))
    assert [step.split(":")[0] for step in steps] == [
        "memmgr's allocator crashes, torch's works",
        "bits unet has other bits",
    ]
    assert not summary([*ends, *digests])
    assert "OTHER BITS" in capsys.readouterr().out


# ---- the table of driver calls ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def driver_calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = build.compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    made = tmp_path_factory.mktemp("driver") / "driver_calls"
    source = str(TOOL.with_name("driver_calls.cpp"))
    flags = ["-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror"]
    done = subprocess.run(
        [compiler, *flags, source, "-o", str(made), "-ldl", "-lpthread"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return made


def test_driver_calls_without_a_driver_says_so_in_one_line(driver_calls: Path) -> None:
    env = {**os.environ, "MEMMGR_DRIVER": "/nowhere/libcuda.so.1"}
    done = subprocess.run([driver_calls], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.count("\n") == 1
    assert "/nowhere/libcuda.so.1" in json.loads(done.stdout)["error"]


def test_driver_calls_on_the_double_has_figures(driver_calls: Path) -> None:
    env = {**os.environ, "MEMMGR_DRIVER": str(build.fake_driver())}
    done = subprocess.run([driver_calls, "--seconds=15", "system", "host"], env=env, capture_output=True, text=True)
    lines = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 0, done.stdout[-2000:]
    assert lines["begin.driver"]["value"] == 13000
    assert lines["host.event_record"]["unit"] == "ns" and lines["host.event_record"]["value"] > 0
    assert not {"crash", "watchdog", "context"} & set(lines)


def test_on_a_gpu_doctor_writes_the_table_of_a_simulation_too(
    driver_calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The driver is the double; torch's rates are given, because no torch here has a GPU."""
    (tmp_path / "carry").mkdir()
    (tmp_path / "carry" / "driver_calls").symlink_to(driver_calls)
    monkeypatch.chdir(tmp_path)  # nothing is compiled where it was carried
    rates = Rates("A card", {"float32": 1e12}, 2e12, 1 << 30, TierLink("host", 1e9, 1e9), "measured, torch")
    monkeypatch.setattr(measure, "measure", lambda *args, **kwargs: rates)
    monkeypatch.setattr(measured, "SECTIONS", ("system", "host"))
    monkeypatch.setenv("MEMMGR_DRIVER", str(build.fake_driver()))
    path = tmp_path / "card.json"
    assert cli.main(["doctor", "--measure", str(path)]) == 0
    assert read_rates(path) == rates
    table = json.loads(path.read_text())
    simulated, before = figures.read(path), figures.read(figures.H100)
    assert simulated["memory"] == 2e12 and simulated["flops.float32"] == 1e12
    assert table["figures"]["cuEventRecord"]["source"].startswith("driver_calls on ")
    assert simulated["kernel"] == before["kernel"]  # not measured
    monkeypatch.setenv("MEMMGR_DRIVER", "/nowhere/libcuda.so.1")
    capsys.readouterr()
    assert cli.main(["doctor", "--measure", str(path)]) == 0
    assert "no table of a simulation: /nowhere/libcuda.so.1" in capsys.readouterr().err
    assert read_rates(path) == rates and "figures" not in json.loads(path.read_text())
