"""`memmgr tune`: the curve, the choice of budgets and batches, and one script from end to end. No test depends on a time."""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forkserver
import pytest
import torch
from test_run_script import TRAIN

from memmgr.policies.trace import TierLink
from memmgr.telemetry.trace_file import read_trace
from memmgr.tools.common.fake_step import record
from memmgr.tools.common.rates import DEVICES, Rates
from memmgr.tools.common.usage_error import UsageError
from memmgr.tools.tune import batch_search, child, search
from memmgr.tools.tune.batch_size import BatchSetter, assigned, option_of, with_option
from memmgr.tools.tune.child import Clock
from memmgr.tools.tune.job import Batch, Job, Result
from memmgr.tools.tune.runner import Measured, compare
from memmgr.tools.verbs import tune
from memmgr.tools.view import plot


def memmgr(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command; it starts several processes that import torch."""
    start = "import sys; from memmgr.tools.cli import main; sys.exit(main())"
    done: subprocess.CompletedProcess[str] = forkserver.run(
        [sys.executable, "-c", start, *words], cwd=cwd, capture_output=True, text=True, timeout=600
    )
    return done


LONG = TRAIN.replace("range(4)]\n", "range(4)]\nBATCH = 1024\n").replace("torch.randn(1024", "torch.randn(BATCH")
LONG = LONG.replace("for _ in range(4):\n", "for _ in range(30):\n")


class FakeCurve:
    """Twice the time at a tenth of the need, by a straight line; steeper once a run has measured its own work."""

    need_bytes = 100_000_000

    def __init__(self) -> None:
        self.steep = 1.0

    def knee(self, most: float) -> int:
        return next(share for share in range(5, 101, 5) if self.factor(share) <= most)

    def learn(self, link: Any, own_seconds: float) -> None:
        self.steep = 1 + own_seconds

    def factor(self, share: int) -> float:
        return 1 + self.steep * (100 - share) / 90

    def points(self, more: Any) -> list[search.At]:
        shares = sorted({*range(10, 101, 10), *more}, reverse=True)
        return [search.At(share, self.need_bytes * share // 100, self.factor(share), 1.0) for share in shares]


def test_the_knee_is_run_and_the_next_larger_budget_where_it_is_slower() -> None:
    asked: list[int] = []

    def run(budget_bytes: int, name: str) -> Measured:
        asked.append(budget_bytes)
        return Measured(1.3 - len(asked) / 10, passes=9)

    curve, made, knee = search.propose(FakeCurve(), 1.1, run)  # type: ignore[arg-type]
    assert knee == 95 and asked == [95_000_000] and made is None, "of the next one nothing leaves"
    asked.clear()
    curve, made, knee = search.propose(FakeCurve(), 1.15, run)  # type: ignore[arg-type]
    assert knee == 90 and asked == [90_000_000, 95_000_000]
    assert made is not None and made.share == 95 and made.measured == pytest.approx(1.1) and made.passes == 9
    assert [at.share for at in curve if at.measured is not None] == [95, 90]


def test_the_knee_is_looked_for_again_with_the_costs_of_a_run() -> None:
    asked: list[int] = []

    def run(budget_bytes: int, name: str) -> Measured:
        asked.append(budget_bytes // 1_000_000)
        return Measured(1 + 2 * (100 - asked[-1]) / 90, passes=9, own_seconds=1.0)

    curve, made, knee = search.propose(FakeCurve(), 1.5, run)  # type: ignore[arg-type]
    assert asked == [55, 80] and knee == 80, "the second knee is of the costs that were measured at the first"
    assert made is not None and made.share == 80 and made.measured == made.predicted == made.simulated
    first = next(at for at in curve if at.share == 55)
    assert first.predicted == pytest.approx(1.5) and first.simulated == first.measured == pytest.approx(2)


def _training() -> Callable[[], object]:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    x = torch.randn(4096, 256)
    return lambda: model(x).square().mean().backward()


def test_a_curve_learns_the_link_and_the_own_work_of_a_run() -> None:
    rates = Rates("bare", {"float32": 1e12}, 1e11, 2**34, DEVICES["rtx4090"].link, "made up", accelerator=False)
    trace = record(_training, accelerator=False).trace(rates)
    curve = search.Curve(trace, lambda text: None)
    before = curve.factor(70)
    assert before is not None and curve.factor(100) == 1
    curve.learn(None, 0.25 * trace.seconds)
    assert curve.factor(70) == pytest.approx(before + 0.25) and curve.factor(100) == 1
    curve.learn(TierLink("host", 1e11, 1e11), 0.0)
    quicker = curve.factor(70)
    curve.learn(TierLink("disk", 1e3, 1e3), 0.0)
    slower = curve.factor(70)
    assert quicker is not None and slower is not None and quicker < 1.01 < 1.1 < slower


def test_nothing_is_proposed_where_nothing_holds() -> None:
    curve, made, knee = search.propose(FakeCurve(), 1.5, lambda size, name: Measured(None, why="too small"))  # type: ignore[arg-type]
    assert made is None and knee == 55
    assert [at.share for at in curve if at.why] == [95, 90, 70, 60, 55], (
        "the knee and four more, each twice as far away"
    )


def _result(seconds: list[float], planned: int = 0, **more: Any) -> Result:
    ends = [float(sum(seconds[:k])) for k in range(len(seconds) + 1)]
    return Result(ends, planned=[max(0, k - planned) if planned else 0 for k in range(len(ends))], **more)


def test_passes_count_once_the_last_plan_is_followed() -> None:
    plain = _result([5, 1, 1, 1, 1, 1, 1, 1])
    managed = _result([50, 9, 9, 4, 4, 2, 2, 2], planned=3, plans=[0, 1, 1, 1, 2, 2, 2, 2, 2])
    assert managed.last_plan == 5 and managed.steady_from == 5
    found = compare([plain, _result([5, 1, 1])], managed)
    assert found.slowdown == 2 and found.passes == 3, "a shorter run without memmgr does not count"
    managed.plans = [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert managed.steady_from is None and compare([plain], managed).passes == 4, "the second half"


@pytest.mark.parametrize(("last_plan", "passes"), [(0, 8), (4, 8), (5, 9), (6, 10), (99, 32)])
def test_a_run_goes_on_where_a_plan_was_made_near_its_end(last_plan: int, passes: int) -> None:
    clock = Clock(Job("train.py", [], passes=8), result := Result(), Path("unused"))
    while not result.ends or not clock._is_enough():
        result.ends.append(float(len(result.ends)))
        result.plans.append(min(len(result.ends), last_plan))
    assert len(result.ends) == passes


def test_the_clock_stands_still_while_a_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(child.time, "monotonic", lambda: now[0])
    clock = Clock(Job("train.py", [], passes=8), result := Result(), Path("unused"))

    class FakePlans:
        made = 0

        def wait(self) -> None:
            now[0] += 7.0
            self.made += 1

    runtime = SimpleNamespace(native=SimpleNamespace(stats=lambda: {"planned_periods": 0}), plans=FakePlans())
    monkeypatch.setattr(child, "_runtime", lambda: runtime)
    monkeypatch.setattr(clock, "_is_enough", lambda: False)

    def backward() -> None:
        now[0] += 1.0

    for _ in range(3):
        clock._timed(backward)()
    assert result.seconds == [1.0, 1.0] and result.plans == [1, 2, 3]


def test_the_same_passes_are_compared_once_a_plan_is_followed() -> None:
    plain = _result([5, 1, 1, 1, 1, 1, 1, 1])
    found = compare([plain], _result([50, 9, 9, 2, 2, 2, 2, 2], planned=3))
    assert found.slowdown is not None and found.passes == 4 and found.slowdown == 2 and found.seconds == 2
    without = compare([plain], _result([50, 9, 9, 9, 3, 3, 3, 3]))
    assert without.slowdown == 3 and without.passes == 4, "the second half"
    slower = _result([5, 1, 1, 1, 3, 3, 3, 3])
    assert compare([plain, slower], _result([50, 9, 9, 9, 3, 3, 3, 3])).slowdown == 1.5, "of both runs without memmgr"
    assert compare([plain], _result([1, 1])).slowdown is None
    plain.processor, slower.processor = [0.1 * k for k in range(9)], [0.1 * k for k in range(9)]
    used = compare([plain, slower], _result([50, 9, 9, 9, 3, 3, 3, 3], processor=[0.2 * k for k in range(9)])).processor
    assert used == pytest.approx(2)
    assert compare([plain], Result(error="BudgetError: x", floor_error=True)).why == "the budget is too small"


class FakeRunner:
    """A batch fits up to `fits`, and a sample takes 1 s, from 100 samples on 2 s."""

    def __init__(self, fits: int) -> None:
        self.fits = fits

    def managed(self, budget: str, batch: Batch) -> Result:
        assert batch.size is not None
        if batch.size > self.fits:
            return Result(error="BudgetError: no", floor_error=True)
        return _result(
            [batch.size * (2.0 if batch.size >= 100 else 1.0)] * 8, applied=["option"], peak_bytes=batch.size
        )


@pytest.mark.parametrize(
    ("fits", "samples", "most", "largest"),
    [(1000, None, None, (938, 1000)), (1000, None, 1.5, (94, 99)), (1000, 70, None, (66, 70)), (3, None, None, (3, 3))],
)
def test_the_largest_batch(fits: int, samples: int | None, most: float | None, largest: tuple[int, int]) -> None:
    said: list[str] = []
    plain = _result([8.0] * 8, samples=samples)
    runner: Any = FakeRunner(fits)
    rows, best = batch_search.search(runner, Batch("option", "--b"), 8, plain, "1GB", most, said.append)
    assert best is not None and largest[0] <= best.batch <= largest[1] and not best.error
    assert all(row.error for row in rows if row.batch > best.batch), "and the next that was tried does not hold"
    assert best.slowdown == 1 or most is None


def test_a_batch_that_nothing_reads_is_an_error() -> None:
    runner: Any = FakeRunner(1000)
    runner.managed = lambda budget, batch: _result([1.0] * 8)
    with pytest.raises(UsageError, match="nothing in the script takes its batch size from there"):
        batch_search.search(runner, Batch("name", "B"), 8, _result([8.0] * 8), "1GB", None, lambda text: None)


@pytest.mark.parametrize(
    ("words", "size", "after"),
    [
        (["--b", "8", "--lr", "1"], 8, ["--b", "9", "--lr", "1"]),
        (["--lr", "1", "--b=8"], 8, ["--lr", "1", "--b=9"]),
        (["--lr", "1"], None, ["--lr", "1", "--b", "9"]),
        (["--bb", "8"], None, ["--bb", "8", "--b", "9"]),
    ],
)
def test_an_option_is_replaced_or_added(words: list[str], size: int | None, after: list[str]) -> None:
    assert option_of(words, "--b") == size and with_option(words, "--b", 9) == after


def test_a_name_that_the_script_assigns() -> None:
    source = "import os\nif True:\n    BATCH: int = 4\nBATCH_2 = 5\nother = BATCH\nBATCH = 6.0\n"
    assert assigned(source, "BATCH") == 4 and assigned(source, "other") is None
    result = Result()
    tree = BatchSetter(Batch("name", "BATCH", 32), result, source).edit(source, "x.py")
    space: dict[str, Any] = {}
    exec(compile(ast.Module(tree.body[:-1], []), "x.py", "exec"), space)
    assert space["other"] == 32 and space["BATCH_2"] == 5 and result.applied == ["assignment"]


def test_a_variable_that_the_script_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNED_BATCH", "1")
    result = Result()
    BatchSetter(Batch("name", "TUNED_BATCH", 32), result, 'n = int(os.environ["TUNED_BATCH"])').install()
    assert os.environ["TUNED_BATCH"] == "32" and result.applied == ["variable"]


def test_the_loader_with_the_first_size_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    setter = BatchSetter(Batch("auto", size=32), result := Result(), "")
    setter._in_loader(torch.utils.data.dataloader)
    try:
        loaders = [torch.utils.data.DataLoader(range(100), batch_size=size) for size in (8, 64, 8)]  # type: ignore[arg-type]
    finally:
        setter._patches.undo()
    assert [loader.batch_size for loader in loaders] == [32, 64, 32]
    assert result.batches == {"loader": 8} and result.samples == 100 and "loader" in result.applied


def test_the_trainers_size_is_changed_before_the_loader_sees_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
    setter = BatchSetter(Batch("auto", size=32), result := Result(), "")
    setter._in_arguments(transformers.training_args)
    setter._in_loader(torch.utils.data.dataloader)
    try:
        args = transformers.TrainingArguments(output_dir=str(tmp_path), per_device_train_batch_size=4, use_cpu=True)
        loader = torch.utils.data.DataLoader(range(100), batch_size=args.train_batch_size)  # type: ignore[arg-type]
    finally:
        setter._patches.undo()
    assert loader.batch_size == 32 and result.batches == {"trainer": 4} and result.samples == 100


def test_lightnings_size_is_changed_by_its_name() -> None:
    trainers = pytest.importorskip("lightning.pytorch.trainer.trainer", reason="the package lightning is not installed")
    seen: list[int] = []

    class Trainer:
        def fit(self, model: Any, datamodule: Any = None) -> None:
            seen.append(model.batch_size)

    from lightning.pytorch import LightningModule

    model = LightningModule()
    model.batch_size = 4  # type: ignore[assignment]
    module: Any = argparse.Namespace(Trainer=Trainer, __name__=trainers.__name__)
    result = Result()
    BatchSetter(Batch("name", "batch_size", 32), result, "")._in_lightning(module)
    Trainer().fit(model)
    assert seen == [32] and result.batches == {"lightning": 4} and result.applied == ["lightning"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--slowdown", "0.9", "train.py"], r"expected a factor over 1"),
        (["--slowdown", "fast", "train.py"], "neither a factor"),
        (["--batch", "call:nowhere.py:f", "train.py"], "does not name a function"),
        (["--batch", "a b", "train.py"], "is none of auto, VARIABLE"),
        (["--batch", "auto", "--budget", "auto", "train.py"], "a share of the need grows with the batch"),
        (["--budget", "1GB", "train.py"], "belong to --batch"),
        (["--passes", "2", "train.py"], "too few"),
        (["gone.py"], "cannot read gone.py: no such file"),
        (["--batch", "auto", "--picture", "x.png", "train.py"], "not of --batch"),
    ],
)
def test_options_that_make_no_sense(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)
    with pytest.raises(UsageError, match=says):
        tune.run(parser.parse_args(words))


@pytest.mark.skipif(not plot.available(), reason="the package matplotlib is not installed")
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture(suffix: str, tmp_path: Path) -> None:
    curve, made, knee = search.propose(FakeCurve(), 1.5, lambda size, name: Measured(1.4, 9))  # type: ignore[arg-type]
    tuned = search.Tuned(24 * 2**30, 1.0, 1.5, curve, made, knee)
    path = tmp_path / f"x.{suffix}"
    tune._draw(tuned, argparse.Namespace(picture=path, script="train.py", module=False))
    assert path.stat().st_size > 5000
    if suffix == "svg":
        text = path.read_text()
        for said in (
            "train.py",
            "predicted",
            "below the bound",
            "measured",
            "proposal",
            "knee (predicted)",
            "equal runs differ by",
            "24 GiB: rtx3090, rtx4090, l4",
        ):
            assert said in text, said


def test_a_busy_machine_is_said_before_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)
    args = parser.parse_args(["train.py"])
    for noise, busy in ((1.0, False), (2.3, True)):
        curve, made, knee = search.propose(FakeCurve(), 1.5, lambda size, name: Measured(1.9, 9, processor=1.2))  # type: ignore[arg-type]
        tune._show_proposal(search.Tuned(10**8, 1.0, 1.5, curve, made, knee, noise=noise), args, "cpu")
        first, *_ = said = capsys.readouterr().out.splitlines()
        assert first.startswith("the machine was busy" if busy else "no proposal"), said
        assert any("Run this again on an idle machine" in line for line in said) == busy
        assert ("55 %: 1.20x" in first) == busy
        curve, made, knee = search.propose(FakeCurve(), 1.5, lambda size, name: Measured(1.4, 9))  # type: ignore[arg-type]
        tune._show_proposal(search.Tuned(10**8, 1.0, 1.5, curve, made, knee, noise=noise), args, "cpu")
        said = capsys.readouterr().out
        assert ("proposal (run this again on an idle machine to confirm it): " in said) == busy and "proposal" in said


def test_the_proposal_has_the_prediction_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """The one before its run, with other costs, is in --json alone."""
    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)
    args = parser.parse_args(["train.py"])
    curve, made, knee = search.propose(FakeCurve(), 1.5, lambda size, name: Measured(1.4, 9, own_seconds=0.4))  # type: ignore[arg-type]
    assert made is not None and made.simulated is not None and made.simulated > (made.predicted or 0)
    tune._show(search.Tuned(10**8, 1.0, 1.5, curve, made, knee), args, "cpu")
    said = capsys.readouterr().out
    assert said.count(f"{made.simulated:.2f}x") == 2 and "measured 1.40x over 9 passes, predicted 1.70x" in said, said


def test_predictions_that_a_run_has_refuted_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of smaller budgets, too; and no knee is among them."""
    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)
    args = parser.parse_args(["train.py"])
    curve, made, knee = search.propose(FakeCurve(), 1.5, lambda size, name: Measured(2.5, 9))  # type: ignore[arg-type]
    tuned = search.Tuned(10**8, 1.0, 1.5, curve, made, knee)
    largest = max(at.share for at in curve if at.measured is not None)
    tune._show(tuned, args, "cpu")
    said = capsys.readouterr().out
    table, _, rest = said.partition("?: ")
    rows = [line for line in table.splitlines() if " %" in line and "x" in line]
    assert rest.startswith(f"the run in {largest} % took longer than predicted")
    assert all(("x?" in row) == (int(row.split()[0]) <= largest) for row in rows) and "knee" not in table, said


def test_a_run_in_a_budget_that_is_faster_than_those_without_is_not_confirmed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)
    args = parser.parse_args(["train.py"])
    curve, made, knee = search.propose(FakeCurve(), 1.5, lambda size, name: Measured(0.6, 9))  # type: ignore[arg-type]
    tune._show_proposal(search.Tuned(10**8, 1.0, 1.5, curve, made, knee), args, "cpu")
    said = capsys.readouterr().out
    assert "a run in a budget took less time than those without one" in said and "to confirm it" in said


def test_devices_within_the_need_are_named() -> None:
    assert search.device_sizes(10**6) == []
    assert [size for size, _ in search.device_sizes(30 * 2**30)] == [16 * 2**30, 24 * 2**30]


def test_one_command_from_the_script_to_the_proposal(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LONG)
    done = memmgr(
        "tune", "--slowdown", "99", "--passes", "10", "--json", "--picture", "x.svg", "train.py", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "bits" not in done.stdout and done.stdout.count("\n") == 1, (
        "the script's output is not ours, and it is ended"
    )
    found = json.loads(done.stdout)
    made = found["proposal"]
    assert made["share"] == found["knee_share"] and made["passes"] >= 3 and made["measured"] > 0
    assert made["simulated"] >= made["lower_bound"] >= 1 and made["predicted"] >= 1
    assert (tmp_path / "x.svg").stat().st_size > 5000 and found["need_bytes"] > 10_000_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py", "x.svg"]


def test_one_command_to_the_largest_batch(tmp_path: Path) -> None:
    loader = "loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=1000)\n"
    script = LONG.replace("for _ in range(30):\n", f"{loader}for _ in range(30):\n    x, = next(iter(loader))\n")
    (tmp_path / "train.py").write_text(script)
    done = memmgr("tune", "--batch", "auto", "--budget", "17MB", "--passes", "6", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the largest batch in 17MB: 1000 (now 1000)" in done.stdout, done.stdout
    assert "the data set has 1024 samples" in done.stdout and "memmgr run --budget 17MB train.py" in done.stdout


def test_a_script_that_fails_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nraise ValueError('no data')\n")
    done = memmgr("tune", "train.py", cwd=tmp_path)
    assert done.returncode == 2 and "train.py failed: ValueError: no data" in done.stderr, done.stderr


def test_a_trace_of_an_equal_pass_knows_what_lives_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    for number, known in ((1, False), (3, True)):
        done = memmgr("trace", "--out", "x.trace", "--pass", str(number), "train.py", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert bool(read_trace(tmp_path / "x.trace").cycle) == known


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    job = Job("train.py", ["--x", "1"], passes=3, budget="1GB", options={"disk": "none"}, batch=Batch("name", "B", 4))
    job.write(tmp_path / "job")
    assert Job.read(tmp_path / "job") == job
