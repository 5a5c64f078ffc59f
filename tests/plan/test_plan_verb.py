"""memmgr plan and memmgr doctor --measure, from the command line."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import forkserver
import pytest
import torch

from memmgr.policies.plan import planner
from memmgr.policies.trace import TierLink, Trace
from memmgr.policies.trace.plan import Plan
from memmgr.telemetry.trace_file import read_trace
from memmgr.tools import cli
from memmgr.tools.bench import measure
from memmgr.tools.common import make_step, outlook
from memmgr.tools.common.rates import DEVICES, read_rates, write_rates
from memmgr.tools.common.sweep import cut, no_worse
from memmgr.tools.common.usage_error import UsageError
from memmgr.tools.verbs import plan

from .test_paging import Training

MODEL = """
import torch
from torch import nn
from beside import WIDTH

def make_step():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(5)))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(2048, WIDTH)
    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step

def asks():
    return lambda: torch.ones(3).sum().item() and torch.ones(3).long().sum().item()

def needs(width):
    return print

def breaks():
    def step():
        raise KeyError("a mistake")
    return step

def on_a_gpu():
    torch.ones(3).cuda()

def shapes():
    return lambda: torch.ones(2, 3) @ torch.ones(2, 3)

def numbers():
    return lambda: torch.ones(2).numpy()
"""


@pytest.fixture(scope="module", autouse=True)
def quick_answers() -> Iterator[None]:
    """The planner's search has tests of its own: here it is a tenth as long, and a plan is made once. Products of
    matrices are measured with small ones."""
    known: dict[object, Plan] = {}

    def planned_once(trace: Trace, budget: int, *, link: TierLink | None, effort: int, solve: bool) -> Plan:
        key = trace, budget, link
        if key not in known:
            known[key] = planner.plan(trace, budget, link=link, effort=effort // 10, solve=solve)
        return known[key]

    product = measure._product
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outlook, "plan", planned_once)
        patch.setattr(measure, "_product", lambda device, dtype, side: product(device, dtype, side // 4))
        yield


@pytest.fixture
def what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "model_of_a_test.py").write_text(MODEL)
    (tmp_path / "beside.py").write_text("WIDTH = 512\n")
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    monkeypatch.delitem(__import__("sys").modules, "beside", raising=False)
    return f"{tmp_path / 'model_of_a_test.py'}:make_step"


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    code = cli.main(["plan", "--json", *words])
    found = json.loads(capsys.readouterr().out)
    assert code == (0 if "sweep" in " ".join(words) or found["fits"] else 1)
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["plan", *words]) == 2
    return capsys.readouterr().err


def test_it_answers_for_a_device(what: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    roomy = planned(capsys, "--device", "rtx4090", what)
    assert roomy["fits"] and roomy["overhead"] == 1 and roomy["budget_bytes"] == 24 * 2**30
    words = ("--device", "rtx4090", "--budget", "need*0.4", "--tier", "host:1GB")
    found = planned(capsys, *words, "--trace", str(tmp_path / "x.trace"), what)
    assert found["fits"] and found["budget_bytes"] == int(found["unmanaged_peak_bytes"] * 0.4)
    assert found["seconds"] == pytest.approx(found["overhead"] * found["unmanaged_seconds"])
    assert found["tier_room_bytes"] == 10**9 and 0 < found["tier_bytes"] <= 10**9
    assert read_trace(tmp_path / "x.trace").unmanaged_peak[0] == found["unmanaged_peak_bytes"]
    assert cli.main(["simulate", str(tmp_path / "x.trace"), "--policy", "plan", "--ratio", "0.4"]) == 0


def test_budgets_are_read_as_everywhere(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--device", "t4", "--budget", "auto", what)
    assert found["overhead"] <= 1.1 and round(100 * found["budget_bytes"] / found["unmanaged_peak_bytes"]) % 5 == 0
    share = planned(capsys, "--device", "t4", "--ratio", "60%", what)
    assert share == planned(capsys, "--device", "t4", "--budget", "need*0.6", what)
    assert "leave one out" in refused(capsys, "--device", "t4", "--ratio", "0.6", "--budget", "1GB", what)
    assert "--sweep has budgets of its own" in refused(capsys, "--device", "t4", "--ratio", "0.6", "--sweep", what)
    for text, says in (
        ("atuo", "did you mean 'auto'?"),
        ("12", "was 12GB meant?"),
        ("need*60", "was 60% of it meant?"),
    ):
        assert says in refused(capsys, "--device", "t4", "--budget", text, what)


def test_a_device_that_is_near_one_is_named(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    for near, named in (
        ("h100-pcie5", "did you mean 'h100'?"),
        ("H100SXM", "did you mean 'h100'?"),
        ("a100 80gb", "did you mean 'a100-80'?"),
        ("NVIDIA A100-SXM4", "did you mean 'a100-40' or 'a100-80'?"),
        ("l40s", "l4, t4, cpu\n"),
    ):
        assert refused(capsys, "--device", near, what).endswith(named if "\n" in named else f"{named}\n")


def test_it_says_so_where_it_does_not_fit(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--device", "t4", "--budget", "1MB", what]) == 1
    shown = capsys.readouterr().out
    assert "does not fit; the largest op alone needs" in shown
    (share,) = re.findall(r"\((\d+) % of the need\) would", shown)
    assert not planned(capsys, "--device", "t4", "--budget", f"need*{int(share) - 5}%", what)["fits"]
    assert planned(capsys, "--device", "t4", "--budget", f"need*{share}%", what)["fits"]
    for tier, fits in (("host:100kB", False), ("host:none", True), ("none", False)):
        assert planned(capsys, "--device", "t4", "--budget", "need*0.3", "--tier", tier, what)["fits"] == fits


def test_what_is_known_not_to_fit_is_not_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Training(3).trace()
    need = trace.unmanaged_peak[0]
    tried: list[int] = []

    def planned(trace: Trace, budget: int, **_: Any) -> Plan:
        tried.append(budget)
        return Plan(budget, budget >= need * 9 // 20, (), budget, 1.0, 1.0, 1.0)

    monkeypatch.setattr(outlook, "plan", planned)
    for too_small in (1, need * 2 // 5):
        found = outlook.outlook(trace, too_small, None)[0]
        tried.clear()
        assert outlook.fitting(trace, found, None) == need * 9 // 20
        assert max(too_small, found.least_bytes - 1) < min(tried) and max(tried) < need and len(tried) <= 4


def test_a_sweep_is_no_slower_in_more_memory(
    what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A schedule for a smaller budget is one for a larger, in which the search may find less."""
    pytest.importorskip("matplotlib")

    def unlucky(trace: Trace, budget: int, link: TierLink | None) -> tuple[outlook.Outlook, None]:
        need = trace.unmanaged_peak[0]
        factor = 99.0 if budget == need * 6 // 10 else need / budget
        bound = (1 + need / budget) / 2
        found = outlook.Outlook(
            "t4", budget, budget > need // 4, factor, factor * trace.seconds, bound, trace.seconds, need, 1
        )
        return found if found.fits else replace(found, overhead=None, seconds=None), None

    monkeypatch.setattr(outlook, "outlook", unlucky)
    drawn: list[list[Any]] = []
    monkeypatch.setattr(plan.plot, "slowdown", lambda points, *_: drawn.extend(points))
    rows = planned(capsys, "--device", "t4", "--sweep", "--picture", str(tmp_path / "x.svg"), what)
    there = [row["overhead"] for row in rows if row["fits"]]
    assert len(there) == 8 and there == sorted(there) and there[-1] < 99
    assert rows[4] == {**rows[5], **{key: rows[4][key] for key in ("budget_bytes", "lower_bound")}}
    assert rows[4]["budget_bytes"] > rows[5]["budget_bytes"] and rows[4]["lower_bound"] < rows[5]["lower_bound"]
    assert [point.overhead for (point,) in drawn] == [row["overhead"] for row in rows]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("needs", r"model_of_a_test.py: needs\(\) needs width; a function without parameters makes the step"),
        ("breaks", r"model_of_a_test.py:\d+: KeyError: 'a mistake'$"),
        pytest.param(
            "on_a_gpu",
            r"model_of_a_test.py:\d+: .*planned for cpu, the default; --device names an accelerator\)$",
            marks=pytest.mark.skipif(torch.version.cuda is not None, reason="this torch makes fake tensors on CUDA"),
        ),
    ],
)
def test_a_mistake_of_the_users_file_is_one_line(
    what: str, function: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", what.replace("make_step", function)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(says, last), last


@pytest.mark.parametrize(
    ("function", "error"), [("shapes", "RuntimeError: a and b must have same"), ("numbers", "RuntimeError: .numpy()")]
)
def test_an_op_that_fails_on_fake_tensors_is_told_by_its_line_alone(function: str, error: str, what: str) -> None:
    words = [
        sys.executable,
        "-P",
        "-m",
        "memmgr.tools.cli",
        "plan",
        "--device",
        "t4",
        what.replace("make_step", function),
    ]
    done = forkserver.run(words, capture_output=True, text=True, timeout=600)
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and len(lines) == 2 and lines[0].startswith("memmgr plan: executes "), done.stderr
    assert re.search(rf"model_of_a_test\.py:\d+: {re.escape(error)}", lines[1])


def test_whose_schedule_each_budget_takes() -> None:
    assert no_worse([1.0, 3.0, None, 2.0, 2.5, None]) == [0, 3, 3, 3, 4, 5]
    assert no_worse([1.0, 1.0, 2.0]) == [0, 1, 2] and no_worse([None, None]) == [0, 1] and no_worse([]) == []


SWALLOWED = """
import os, signal

class Left:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100): pass

def finalizer():
    Left()
    return print

def other_error():
    try:
        Left.__del__(None)
    except BaseException:
        raise ImportError("initialization failed") from None
    return print
"""


@pytest.mark.parametrize("place", ["finalizer", "other_error"])
def test_an_interrupt_is_neither_lost_nor_another_error(place: str, tmp_path: Path) -> None:
    """In torch's C++ it ended the process with SIGABRT, now and then."""
    (tmp_path / "swallowed.py").write_text(SWALLOWED)
    command = [sys.executable, "-P", "-m", "memmgr.tools.cli", "plan", "--device", "t4", f"swallowed.py:{place}"]
    done = forkserver.run(command, cwd=tmp_path, capture_output=True, text=True)
    said = (
        f"memmgr plan: executes swallowed.py, then {place}() and one step on fake tensors\nmemmgr plan: interrupted\n"
    )
    assert (done.returncode, done.stderr) == (130, said)


def test_a_picture_says_that_it_is_cut() -> None:
    assert cut([None, 1.0, 2.5], 2.5) == "" == cut([None], 2.5)
    assert cut([1.0, None, 14.62], 2.5) == "; cut at 2.5x, the largest is 14.6x"


def test_the_source_of_a_devices_figures_needs_no_other_line() -> None:
    for rates in DEVICES.values():
        assert "above" not in rates.source, rates.source


def test_a_faster_device_takes_less_time(
    what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plan.plot, "check_picture", lambda path: None)
    monkeypatch.setattr(plan.plot, "slowdown", lambda *given: drawn.append(given))
    rows = planned(capsys, "--device", "t4,h100", "--sweep", "--picture", str(tmp_path / "x.png"), what)
    ((points, _, title),) = drawn
    assert {point.lower_bound for row in points for point in row} == {None}, "whose would it be?"
    largest = max(r["overhead"] for r in rows if r["fits"])
    assert title == what + cut([largest], plan.plot.HIGHEST)
    assert len(rows) == 20 and [r["device"] for r in rows[:2]] == ["t4", "h100"]
    assert rows[0]["unmanaged_seconds"] > 2 * rows[1]["unmanaged_seconds"]
    assert rows[0]["unmanaged_peak_bytes"] == rows[1]["unmanaged_peak_bytes"]
    for one in (rows[0::2], rows[1::2]):
        there = [r["overhead"] for r in one if r["fits"]]
        assert there[0] == 1 and there[-1] > 1


@pytest.mark.parametrize(
    ("words", "code"), [(("--budget", "need*0.4"), 0), (("--sweep",), 0), (("--budget", "1MB"), 1)]
)
def test_it_draws(
    words: tuple[str, ...], code: int, what: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    for name in ("x.png", "x.svg"):
        assert cli.main(["plan", "--device", "t4", *words, "--picture", str(tmp_path / name), what]) == code
        assert capsys.readouterr().out.splitlines()[-1].endswith(name)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "x.svg").read_text()


def test_what_makes_no_sense_is_said_in_a_line(what: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "neither FILE.py:FUNCTION nor a folder" in refused(capsys, "--device", "t4", str(tmp_path))
    assert "no function 'missing'" in refused(capsys, "--device", "t4", what.replace("make_step", "missing"))
    assert "cannot read nowhere.py: No such file" in refused(capsys, "--device", "t4", "nowhere.py:f")
    text = tmp_path / "text.py"
    text.write_text("raise SystemExit('it was executed')\ndef make_step(): pass\n")
    assert refused(capsys, f"{text}:mak_step").endswith("has no function 'mak_step'; did you mean 'make_step'?\n")
    text.write_text("def broken(:\n")
    assert "text.py, line 1: not Python that can be read" in refused(capsys, f"{text}:broken")
    assert "neither a table.json nor one of rtx3090" in refused(capsys, "--device", "gtx", what)
    assert "compared with --sweep" in refused(capsys, "--device", "t4,l4", what)
    assert "host:SIZE" in refused(capsys, "--device", "t4", "--tier", "moon:1GB", what)
    assert "model_of_a_test.py:17: " in refused(capsys, "--device", "t4", what.replace("make_step", "asks"))
    assert "neither .png nor .svg" in refused(capsys, "--device", "t4", "--picture", "x.gif", what)


def test_a_number_that_a_step_asks_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A loss that is printed, Adafactor's norms: neither could be planned. AdamW's count of steps is none of the step's."""
    path = tmp_path / "prints.py"
    text = MODEL.replace("from beside import WIDTH", "WIDTH = 64")
    path.write_text(text)
    for device in (["--device", "t4"], []):
        assert cli.main(["plan", *device, f"{path}:make_step"]) == 0
        assert "is taken as 1" not in capsys.readouterr().err
    asked = "loss = model(x).square().mean()\n        loss.backward()\n        print('%.1f' % loss.item())"
    path.write_text(text.replace("model(x).square().mean().backward()", asked))
    assert cli.main(["plan", "--device", "t4", f"{path}:make_step"]) == 0
    assert "a number that the step asks for is taken as 1" in capsys.readouterr().err


@pytest.mark.parametrize("config", ["", "{", "[]", "{}", '{"model_type": "?"}', '{"model_type": "vit"}'])
def test_a_folder_that_has_no_language_model(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(config)
    assert cli.main(["plan", "--device", "l4", str(tmp_path)]) == 2
    assert "has no language model's config: " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--batch", "0"), "--batch"),
        (("--sequence", "-5"), "--sequence"),
        (("--budget", "abc"), "--budget"),
        (("--batch", "1"), "--batch is of a folder with a config, and "),
        (("--sequence", "9"), "--sequence is of a folder with a config, and "),
        (("--optimizer", "adamw"), "--optimizer is of a folder with a config, and "),
        (("--dtype", "float16"), "--dtype is of a folder with a config, and "),
        (("--checkpointing",), "--checkpointing is of a folder with a config, and "),
        (("--sweep", "--budget", "1GB"), "--sweep has budgets of its own: leave --budget and --ratio out"),
        (("--sweep", "--device", "t4,l4", "--trace", "x"), "--trace is of one device"),
        (("--tier", "moon:1GB"), "--tier: 'moon:1GB' is neither host:SIZE"),
        (("--tier", "host:much"), "--tier: cannot read 'much' as a size"),
        (("--device", "missing.json"), "missing.json: No such file"),
    ],
)
def test_what_makes_no_sense_is_said_before_the_work(
    words: tuple[str, ...], says: str, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(make_step, "maker", lambda *_: pytest.fail("the user's file has run"))
    said = refused(capsys, "--device", "t4", *words, what)
    assert says in said and len(said.splitlines()) == 1


def test_a_folder_with_a_config_is_planned_without_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 1000,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = {}
    for batch, optimizer in (("2", "adamw"), ("4", "adamw"), ("4", "sgd")):
        words = ("--device", "l4", "--batch", batch, "--sequence", "256", "--optimizer", optimizer)
        found[batch, optimizer] = planned(capsys, *words, str(tmp_path))
    assert found["2", "adamw"]["unmanaged_peak_bytes"] < found["4", "adamw"]["unmanaged_peak_bytes"]
    assert found["4", "adamw"]["held_bytes"]["optimizer state"] > 4 * 10**6
    assert "optimizer state" not in found["4", "sgd"]["held_bytes"]


def test_sequences_are_no_longer_than_a_model_that_learned_its_positions(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A step that would fail was planned, also by default."""
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    peaks = [
        planned(capsys, "--device", "l4", *words, str(tmp_path))["unmanaged_peak_bytes"]
        for words in ((), ("--sequence", "128"))
    ]
    assert peaks[0] == peaks[1]
    assert cli.main(["plan", "--device", "l4", "--sequence", "129", str(tmp_path)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]  # transformers says something of its own
    assert last == f"memmgr plan: --sequence: 129 tokens, and the model of {tmp_path} has 128 positions"


def test_what_is_written_can_be(what: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nowhere = str(tmp_path / "no" / "x")
    for option in ("--trace", "--picture"):
        assert f"{option}: the folder of '{nowhere}.svg' does not exist" in refused(
            capsys, "--device", "t4", option, nowhere + ".svg", what
        )
    assert cli.main(["plan", "--device", "t4", "--trace", "/dev/full", what]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "memmgr plan: --trace: /dev/full: No space left on device"


@pytest.mark.parametrize(
    "words", [["--step", "x.py:f"], ["--measure", "a.json", "--json"], ["--disk", ""], ["--measure", "a.py"]]
)
def test_options_of_doctor_that_say_nothing(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *words]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "damage",
    [
        {"call_seconds": "x"},
        {"memory_bytes": [1]},
        {"bytes_per_second": 0},
        {"flops": {"float32": "fast"}},
        {"flops": 3},
    ],
)
def test_a_damaged_table_is_said_in_a_line(damage: dict[str, Any], tmp_path: Path) -> None:
    write_rates(tmp_path / "r.json", DEVICES["t4"])
    (tmp_path / "r.json").write_text(json.dumps(json.loads((tmp_path / "r.json").read_text()) | damage))
    with pytest.raises(UsageError, match="is no table of memmgr doctor"):
        read_rates(tmp_path / "r.json")


def test_a_table_of_rates_is_read_as_it_was_written(tmp_path: Path) -> None:
    rates = replace(DEVICES["t4"], name="here", calls={"aten.mm x": (0.25, 17)}, call_seconds=1e-6)
    write_rates(tmp_path / "r.json", rates)
    assert read_rates(tmp_path / "r.json") == rates
    (tmp_path / "old.json").write_text('{"memmgr_rates": 0}')
    (tmp_path / "other.json").write_text("[1]")
    for name, says in (("old", "another version"), ("other", "no table"), ("missing", "No such file")):
        with pytest.raises(UsageError, match=says):
            read_rates(tmp_path / f"{name}.json")


def test_the_options_are_what_there_is() -> None:
    assert set(plan._OPTIMIZERS) == set(make_step.OPTIMIZERS) and set(plan._DTYPES) == set(make_step.DTYPES)


def test_every_device_has_a_source_and_sane_rates() -> None:
    for name, rates in DEVICES.items():
        assert rates.name == name and rates.source and rates.link is not None
        assert 1e12 < rates.flops["float32"] <= rates.flops["tf32"] <= rates.flops["float16"] < 1e16
        assert 8 * 2**30 < rates.memory_bytes < 200e9 and 1e11 < rates.bytes_per_second < 1e13


def test_a_measured_table_times_the_ops_of_a_step(
    what: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_MOST_RUNS", 4)
    table = tmp_path / "here.json"
    words = ["doctor", "--quick", "--disk", str(tmp_path), "--measure", str(table), "--step", what]
    assert cli.main(words) == 0
    assert "memmgr plan --device" in capsys.readouterr().out
    rates = read_rates(table)
    assert rates.flops["float32"] > 1e8 and rates.call_seconds > 0 and not rates.accelerator
    products = [seconds for signature, (seconds, _) in rates.calls.items() if signature.startswith("aten.addmm")]
    assert len(products) == 1 and products[0] > 2 * 2048 * 512 * 512 / 1e13
    found = planned(capsys, "--device", str(table), what)
    assert found["unmanaged_seconds"] > 5 * products[0]
    assert cli.main(["plan", "--device", str(table), "--budget", "1GB", what]) == 0
    assert "not in the table" not in capsys.readouterr().err


def test_what_an_op_needs_for_itself_is_measured() -> None:
    from memmgr.tools.common.fake_trace import Call, TensorSpec

    spec = TensorSpec((256, 1024), (1024, 1), torch.float32)
    assert measure.scratch_bytes(Call(torch.ops.aten.exp.default, (spec,), {})) == 0
    twice = Call(lambda x: (x.exp() + 1).sum(), (spec,), {})
    assert measure.scratch_bytes(twice) == pytest.approx(2 * 2**20, rel=0.01)
