"""`memmgr simulate`: figures, files, and errors in one line."""

import functools
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memmgr.policies.published.milp import LIMIT_SECONDS
from memmgr.policies.published.systems import OFFLOADING, RECOMPUTING
from memmgr.policies.trace import Trace
from memmgr.policies.trace.schedule import Do, Step, replay
from memmgr.telemetry.trace_file import write_trace
from memmgr.tools import cli
from memmgr.tools.common.dtr_log import read_dtr_log
from memmgr.tools.verbs import simulate as verb

from .judge import needs_judge, verdict
from .passes import layers
from .synthetic import network
from .test_paging import Training

HURRY = ("--solver-seconds", 0.2)
FIELDS = {"policy", "ratio", "budget_bytes", "feasible", "overhead", "peak_bytes", "lower_bound", "seconds"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return network(2, depth=7).write(tmp_path / "pass.log")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Few ops, for the integer programs."""
    return network(2, depth=2).write(tmp_path / "small.log")


_simulated_once = functools.cache(verb._simulate)


@pytest.fixture
def simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of different outputs of the same budgets share them."""
    monkeypatch.setattr(verb, "_simulate", _simulated_once)


def simulate(*words: object) -> int:
    return cli.main(["simulate", *(str(word) for word in words)])


def steps_of(path: Path, trace: Trace) -> list[Step]:
    names = {s.name: i for i, s in enumerate(trace.storages)}
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [Step(Do(r["do"]), r["op"] if "op" in r else names[r["storage"]]) for r in records]


@needs_judge
@pytest.mark.parametrize("policy", ["auto", "plan", "dtr_eq", "capuchin"])
def test_json_and_schedule(policy: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "schedule"
    words = (file, "--format", "dtr", "--policy", policy, "--ratio", 0.7, "--schedule-out", out, "--json")
    assert simulate(*words) == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown) >= FIELDS and shown["policy"] == policy and shown["feasible"]
    trace = read_dtr_log(file)
    said = verdict(file, trace, steps_of(out, trace), shown["budget_bytes"])
    assert said["valid"], said
    assert said["time_ns"] / 1e9 / trace.seconds == pytest.approx(shown["overhead"], rel=1e-9)
    assert said["peak_bytes"] == shown["peak_bytes"] <= shown["budget_bytes"]
    assert 1 < shown["lower_bound"] <= shown["overhead"] and shown["seconds"] > 0


def test_a_trace_file_is_recognised(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "pass.trace.gz", read_dtr_log(file))
    shown = []
    for log in (file, tmp_path / "pass.trace.gz"):
        assert simulate(log, "--ratio", 0.6, "--json") == 0
        result = json.loads(capsys.readouterr().out)
        result.pop("seconds")
        shown.append(result)
    assert shown[0] == shown[1]


@pytest.mark.usefixtures("simulated_once")
def test_a_table_of_all(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limit = LIMIT_SECONDS.get()
    assert simulate(small, "--policy", "all", "--ratio", 0.8, *HURRY) == 0
    assert LIMIT_SECONDS.get() == limit, "the solver's limit is the verb's, not the process's"
    shown, said = capsys.readouterr()
    names = ("auto", "plan", "capuchin", "delta_taco", "dtr_eq", "dtr_local", *RECOMPUTING)
    rows = [line.split()[0] for line in shown.splitlines() if line.strip()]
    assert all(rows.count(name) == 1 for name in names)
    assert all(name in said for name in names), "progress, beside the table"


def test_what_moves_states_is_in_the_table_of_a_cycle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Training(8).trace()
    write_trace(tmp_path / "pass.trace", trace)
    assert simulate(tmp_path / "pass.trace", "--policy", "all", "--ratio", 0.4, "--json") == 0
    results = {r["policy"]: r for r in json.loads(capsys.readouterr().out)["results"]}
    assert results["zero_infinity"]["feasible"] and results["l2l"]["feasible"] and results["plan"]["feasible"]
    refused = results["zero_offload"]
    assert not refused["feasible"] and refused["least_bytes"] > refused["budget_bytes"]
    words = (tmp_path / "pass.trace", "--policy", "zero_offload")
    assert simulate(*words, "--budget", f"{refused['least_bytes']}B", "--json") == 0
    assert json.loads(capsys.readouterr().out)["feasible"]
    assert simulate(*words, "--ratio", 0.4) == 0
    assert "does not fit below" in capsys.readouterr().out


def test_where_no_plan_fits_the_smallest_budget_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Training(8).trace()
    write_trace(tmp_path / "pass.trace", trace)
    assert simulate(tmp_path / "pass.trace", "--ratio", "3%") == 0
    named = re.search(r"does not fit below ([\d.]+) ([kMG]?B)", capsys.readouterr().out)
    assert named is not None
    assert simulate(tmp_path / "pass.trace", "--budget", f"{named[1]}{named[2]}", "--json") == 0
    assert json.loads(capsys.readouterr().out)["feasible"]


def test_all_with_a_link_as_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(file, "--policy", "all", "--ratio", 0.5, "--link", 0.05, "--json", *HURRY) == 0
    results = {r["policy"]: r for r in json.loads(capsys.readouterr().out)["results"]}
    assert {"auto", "plan", "offload", "dtr_eq", *OFFLOADING} <= set(results) and all(
        set(r) >= FIELDS for r in results.values()
    )
    feasible = [r["overhead"] for r in results.values() if r["feasible"]]
    assert results["plan"]["lower_bound"] <= results["plan"]["overhead"] == min(feasible)


def test_a_plan_for_a_measured_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pass.trace"
    trace = layers(12)
    write_trace(file, trace)
    words = (file, "--policy", "plan", "--ratio", 0.6, "--schedule-out", tmp_path / "s", "--json")
    assert simulate(*words) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["feasible"] and 1 < shown["lower_bound"] <= shown["overhead"]
    cost = replay(trace, steps_of(tmp_path / "s", trace), shown["budget_bytes"])
    assert cost.valid and cost.seconds / trace.seconds == pytest.approx(shown["overhead"])


def test_where_there_is_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "pass.trace", layers(12))
    words = (tmp_path / "pass.trace", "--policy", "plan", "--budget", "20B", "--json")
    assert simulate(*words) == 0
    shown = json.loads(capsys.readouterr().out)
    assert not shown["feasible"] and "no plan" in shown["why"]


def test_torch_is_not_loaded() -> None:
    """It takes seconds, and a log can be looked at where there is none."""
    code = "import sys, memmgr.tools.verbs.simulate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("policy", ["offload", "plan"])
def test_with_a_link_the_schedule_is_one_too(
    policy: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--policy", policy, "--ratio", 0.7, "--link", 0.05, "--schedule-out", tmp_path / "s", "--json")
    assert simulate(file, *words) == 0
    shown = json.loads(capsys.readouterr().out)
    trace = read_dtr_log(file)
    steps = steps_of(tmp_path / "s", trace)
    cost = replay(trace, steps, shown["budget_bytes"], write_rate=5e7, read_rate=5e7)
    assert cost.valid
    assert policy == "plan" or any(step.do is Do.RELOAD for step in steps)
    assert cost.seconds / trace.seconds == pytest.approx(shown["overhead"])


@pytest.mark.parametrize("words", [("--ratio", "0.6"), ("--sweep",)])
def test_a_missing_package_is_said_and_not_taken_for_a_budget_that_is_too_small(
    words: tuple[str, ...], file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)  # as if scipy were not installed
    assert simulate(file, "--policy", "checkmate", *words) == 0
    shown = capsys.readouterr().out
    assert "does not fit" not in shown
    assert shown.count("checkmate: Checkmate's program needs scipy: pip install scipy") == 1


def test_a_pass_that_does_not_fit_is_an_answer(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(file, "--budget", "1KB", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert not shown["feasible"] and shown["overhead"] is None and shown["why"] and shown["budget_bytes"] == 1000


def test_a_log_that_ends_inside_an_op_is_said(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = file.read_text().splitlines()
    call = next(i for i, line in enumerate(lines) if '"CALL"' in line)
    (tmp_path / "cut.log").write_text("\n".join(lines[: call + 2]))
    assert simulate(tmp_path / "cut.log", "--ratio", 1, "--json") == 0
    assert "ends inside an op" in capsys.readouterr().err


def test_shares_of_the_need(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here it is known."""
    shown = []
    for words in (["--ratio", "60%"], ["--ratio", "0.6"], ["--budget", "need*0.6"], ["--budget", "NEED * 60%"]):
        assert simulate(file, "--policy", "evict", "--json", *words) == 0
        shown.append(json.loads(capsys.readouterr().out)["budget_bytes"])
    assert len(set(shown)) == 1
    assert simulate(file, "--policy", "evict", "--json", "--budget", "none") == 0
    assert json.loads(capsys.readouterr().out)["ratio"] == 1


def test_the_knee_of_a_policy(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The smallest of the budgets that --sweep shows, and those between them, that costs at most a tenth."""

    def shown(*words: str) -> dict[str, Any]:
        assert simulate(file, "--policy", "evict", "--json", *words) == 0
        return dict(json.loads(capsys.readouterr().out))

    found = shown("--budget", "auto")
    assert found["overhead"] <= 1.1 and round(found["ratio"] * 100) % 5 == 0
    below = shown("--ratio", str(round(found["ratio"], 2) - 0.05))
    assert not below["feasible"] or below["overhead"] > 1.1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ratio", "0.5", "--policy", "nonsense"], "unknown policy 'nonsense'"),
        (["--ratio", "-1"], "--ratio"),
        (["--ratio", "nan"], "--ratio"),
        (["--ratio", "much"], "--ratio: 'much' is no share of what the run needs; expected 60% or 0.6"),
        (["--ratio", "60"], "was 60% of it meant?"),
        (["--budget", "lots"], "--budget"),
        (["--budget", "12"], "was 12GB meant"),
        (["--budget", "80%"], "a percentage makes no sense here"),
        (["--budget", "auto", "--policy", "all"], "--budget auto needs one policy"),
        (["--ratio", "0.5", "--link", "-3"], "--link"),
        (["--ratio", "0.5", "--solver-seconds", "-3"], "--solver-seconds"),
        (["--ratio", "0.5", "--policy", "all", "--schedule-out", "x"], "--schedule-out"),
        (["--ratio", "0.5", "--schedule-out", "/dev/null/x"], "/dev/null/x"),
        (["--ratio", "0.5", "--format", "trace"], "not a trace file"),
    ],
)
def test_errors_are_one_line(words: list[str], says: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(file, *words) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_a_trace_of_an_older_version_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "pass.trace", layers(12))
    head, rest = (tmp_path / "pass.trace").read_text().split("\n", 1)
    assert '"memmgr_trace":2' in head
    (tmp_path / "pass.trace").write_text(head.replace('"memmgr_trace":2', '"memmgr_trace":1') + "\n" + rest)
    assert simulate(tmp_path / "pass.trace", "--ratio", 0.5) == 2
    said = capsys.readouterr().err
    assert "pass.trace: trace version 1; this memmgr reads version 2" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b'{"INSTRUCTION":"ANNOTATE","ANNOTATION":"START"}\n', None]
)
def test_bad_files_are_one_line(content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if content is not None:
        (tmp_path / "bad.log").write_bytes(content)
    assert simulate(tmp_path / "bad.log", "--format", "dtr", "--ratio", 0.5) == 2
    said = capsys.readouterr().err
    assert "bad.log" in said and said.count("\n") == 1


def test_a_sweep_is_a_curve_that_its_single_budgets_lie_on(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(file, "--policy", "plan", "--sweep", "--json") == 0
    curve = json.loads(capsys.readouterr().out)["sweep"]
    assert [one["ratio"] for one in curve] == [tenths / 10 for tenths in range(10, 0, -1)]
    assert curve[0]["overhead"] == 1.0 and curve[5]["overhead"] > 1.0 and not curve[-1]["feasible"]
    assert all(one["lower_bound"] <= one["overhead"] for one in curve if one["feasible"])
    assert simulate(file, "--policy", "plan", "--ratio", "60%", "--json") == 0
    alone = json.loads(capsys.readouterr().out)
    assert {**alone, "seconds": 0} == {**curve[4], "seconds": 0}


def test_the_plan_is_no_slower_in_more_memory(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule for a smaller budget is one for a larger. Policies that are compared with it are shown as they are."""
    simulated = verb._simulate

    def unlucky(trace: Trace, name: str, ratio: float, *more: Any) -> tuple[verb.Result, list[Step]]:
        found, steps = simulated(trace, "dtr_eq", ratio, *more)  # which decides sooner than the planner
        return replace(found, policy=name, overhead=99.0 if ratio == 0.6 else found.overhead), steps

    monkeypatch.setattr(verb, "_simulate", unlucky)
    curves = {}
    for policy in ("plan", "dtr_eq"):
        assert simulate(file, "--policy", policy, "--sweep", "--json") == 0
        curves[policy] = json.loads(capsys.readouterr().out)["sweep"]
    better, smaller = curves["plan"][4:6]
    kept = ("ratio", "budget_bytes", "lower_bound", "seconds")
    assert better == {**smaller, **{key: better[key] for key in kept}} and better["ratio"] == 0.6
    assert better["budget_bytes"] > smaller["budget_bytes"] and better["lower_bound"] <= smaller["lower_bound"]
    assert curves["dtr_eq"][4]["overhead"] == 99


def test_a_sweep_in_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(network(2, depth=10).write(tmp_path / "pass.log"), "--sweep") == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 13 and max(map(len, shown)) <= 80
    bars = [line.count("#") for line in shown[3:]]
    assert bars[0] == 0 < bars[5] <= bars[7], "the less memory, the longer"
    assert shown[-1].split()[-2:] == ["-", "-"], "nothing fits into a tenth, and so there is no bound"


@pytest.mark.usefixtures("simulated_once")
def test_a_sweep_of_all_has_a_row_a_system_and_the_bound_below(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(small, "--sweep", "--policy", "all", *HURRY) == 0
    head, *rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:] if line.strip("-─━ ")]
    assert head == [f"{tenths}0%" for tenths in range(10, 0, -1)]
    table = {name: [float(x) if x != "-" else None for x in factors] for name, *factors in rows}
    assert {"auto", "plan", "capuchin", *RECOMPUTING} < set(table) and rows[-1][0] == "bound"
    for factors in table.values():
        assert all(f is None or (b is not None and f >= b - 1e-3) for f, b in zip(factors, table["bound"], strict=True))


@pytest.mark.usefixtures("simulated_once")
@pytest.mark.parametrize(("name", "magic"), [("curve.png", b"\x89PNG"), ("curve.svg", b"<?xml")])
def test_a_sweep_has_a_picture(name: str, magic: bytes, small: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the package matplotlib is not installed (the extra `demo`)")
    out = tmp_path / name
    assert simulate(small, "--sweep", "--policy", "all", "--picture", out, *HURRY) == 0
    assert out.read_bytes().startswith(magic)


def test_where_nothing_fits_the_picture_says_so(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the package matplotlib is not installed (the extra `demo`)")
    out = tmp_path / "curve.svg"
    assert simulate(file, "--sweep", "--picture", out) == 0
    assert "<!-- does not fit -->" in out.read_text()


@pytest.mark.parametrize(("kind", "policy"), [("dtr", "auto"), ("trace", "plan")])
def test_the_default_is_what_a_live_run_does(
    kind: str, policy: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "trace":
        file = tmp_path / "run.trace"
        write_trace(file, layers(12))
    assert simulate(file, "--ratio", "90%", "--json") == 0
    assert json.loads(capsys.readouterr().out)["policy"] == policy


def test_a_system_that_is_almost_named(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(file, "--ratio", "0.6", "--policy", "chekmate") == 2
    assert "did you mean 'checkmate'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--sweep", "--picture", "curve.jpg"), "ends in neither .png nor .svg"),
        (("--sweep", "--schedule-out", "s"), "needs one budget"),
        (("--ratio", "0.5", "--picture", "curve.png"), "drawn of a --sweep"),
        (("--sweep", "--picture", "/no/such/curve.png"), "does not exist"),
        (("--ratio", "0.5", "--schedule-out", "/no/such/steps"), "does not exist"),
        (("--ratio", "0.5", "--schedule-out", "{log}"), "is what is read"),
    ],
)
def test_what_a_sweep_does_not_go_with(
    words: tuple[str, ...], says: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = file.read_bytes()
    assert simulate(file, *(word.format(log=file) for word in words)) == 2
    shown = capsys.readouterr().err
    assert says in shown and len(shown.splitlines()) == 1 and file.read_bytes() == before


@pytest.mark.parametrize(
    ("head", "says"),
    [
        ({"type": "hello"}, "is a run's log, for memmgr report"),
        ({"memmgr_trace": 2, "device": "cpu", "copy_on_write": False}, "line 1: no 'links'"),
        ({"memmgr_trace": 2, "device": "cpu", "copy_on_write": False, "links": ["x"]}, "line 1: "),
    ],
)
def test_a_file_that_is_no_trace(
    head: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").write_text(json.dumps(head, separators=(",", ":")) + '\n{"end":0}\n')
    assert simulate(tmp_path / "x", "--ratio", "0.5") == 2
    shown = capsys.readouterr().err
    assert says in shown and len(shown.splitlines()) == 1


def test_without_matplotlib_the_table_is_there_and_a_picture_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert simulate(file, "--sweep") == 0 and "100%" in capsys.readouterr().out
    assert simulate(file, "--sweep", "--picture", "curve.png") == 2
    assert "pip install 'matplotlib>=3.8'" in capsys.readouterr().err
