"""`memmgr tune`: the curve, the choice of budgets and batches, and one script from end to end. No test depends on a time."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
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
from memmgr.tools.tune.job import END, GO, Batch, Job, Result
from memmgr.tools.tune.runner import Measured, compare
from memmgr.tools.tune.turns import Child, take_turns
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
    """Twice the time at a tenth of the need, by a straight line, and the difference to the last run."""

    need_bytes = 100_000_000

    def __init__(self) -> None:
        self.plus = 0.0

    def knee(self, most: float) -> int:
        return next(share for share in range(5, 101, 5) if self.factor(share) <= most)

    def learn(self, share: int, found: Measured) -> None:
        self.plus = (found.slowdown or 1.0) - 1 - (100 - share) / 90

    def factor(self, share: int) -> float:
        return 1 + (share < 100) * self.plus + (100 - share) / 90

    def points(self, more: Any) -> list[search.At]:
        shares = sorted({*range(10, 101, 10), *more}, reverse=True)
        return [search.At(share, self.need_bytes * share // 100, self.factor(share), 1.0) for share in shares]


def _proposed(
    most: float, slowdown: Callable[[int], float | None]
) -> tuple[list[int], list[search.At], search.At | None]:
    """Returns the shares that are run, the curve and the proposal. `slowdown`: of a run, by its share; None: it fails."""
    asked: list[int] = []

    def run(budget_bytes: int, name: str) -> Measured:
        asked.append(budget_bytes // 1_000_000)
        made = slowdown(asked[-1])
        return Measured(made, passes=9, why="" if made else "too small")

    curve, made = search.propose(FakeCurve(), most, run)  # type: ignore[arg-type]
    return asked, curve, made


def test_half_of_the_need_is_run_first_and_then_the_corrected_knee() -> None:
    asked, curve, made = _proposed(1.65, lambda share: 1 + (100 - share) / 100)
    assert asked == [50, 40], "a knee within 5 % of the need of a run that held ends the search"
    assert made is not None and made.share == 40 and made.measured == pytest.approx(1.6)
    assert made.before == pytest.approx(1 + 0.5 - 50 / 90 + 60 / 90), "corrected by the first"
    assert made.predicted == made.measured, "corrected by its own"
    assert [at.share for at in curve if at.run] == [50, 40]


def test_the_knee_is_run_where_it_is_more_than_half() -> None:
    asked, _, made = _proposed(1.1, lambda share: 1 + (100 - share) / 90)
    assert asked == [95] and made is not None and made.share == 95
    asked, _, made = _proposed(1.4, lambda share: 1 + (100 - share) / 90)
    assert asked == [65] and made is not None and made.measured == made.predicted == made.before


def test_the_knee_is_looked_for_above_a_run_that_is_too_slow_and_below_one_that_holds() -> None:
    asked, _, made = _proposed(1.5, lambda share: 1.7 if share < 60 else 1.2)
    assert asked == [55, 75, 60] and made is not None and made.share == 60


def test_no_budget_is_run_twice_nor_beyond_a_run_that_failed() -> None:
    for limit in range(5, 100, 5):
        for most in (1.05, 1.3, 1.6, 3.0):
            asked, _, made = _proposed(most, lambda share, limit=limit: 1.01 if share >= limit else None)
            assert len(asked) == len(set(asked)) <= search.MOST_RUNS
            assert made is None or made.share >= limit
            assert made is not None or max(asked, default=95) == 95 or len(asked) == search.MOST_RUNS


def _training() -> Callable[[], object]:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    x = torch.randn(4096, 256)
    return lambda: model(x).square().mean().backward()


def _curve(base: float = 1.0) -> search.Curve:
    rates = Rates("bare", {"float32": 1e12}, 1e11, 2**34, DEVICES["rtx4090"].link, "made up", accelerator=False)
    return search.Curve(record(_training, accelerator=False).trace(rates), base, lambda text: None)


def _known(factor: float | None) -> float:
    assert factor is not None
    return factor


def test_a_curve_agrees_with_its_runs() -> None:
    curve = _curve(base=1.02)
    before = _known(curve.factor(70))
    assert curve.factor(100) == 1.02 and before > 1.02
    curve.learn(70, Measured(before + 0.2))
    assert _known(curve.factor(70)) == pytest.approx(before + 0.2) and curve.factor(100) == 1.02
    assert _known(curve.factor(85)) < before + 0.2, "less of what the simulator does not see"
    curve.learn(85, Measured(1.3))
    assert _known(curve.factor(85)) == pytest.approx(1.3) and _known(curve.factor(70)) == pytest.approx(before + 0.2)


def test_a_run_that_is_faster_than_simulated_takes_a_share_of_the_simulated_time() -> None:
    curve = _curve()
    curve.learn(70, Measured(1.0, link=TierLink("disk", 1e5, 1e5)))
    assert _known(curve.factor(70)) == pytest.approx(1) and _known(curve.factor(60)) >= 1
    slow = _curve()
    slow.learn(70, Measured(1.001, link=TierLink("disk", 1e5, 1e5)))
    assert 1 <= _known(slow.factor(60)) < 1.1


def test_a_curve_has_the_link_of_the_last_run() -> None:
    curve, other = _curve(), _curve()
    curve.learn(95, Measured(1.0, link=TierLink("host", 1e11, 1e11)))
    other.learn(95, Measured(1.0, link=TierLink("disk", 1e3, 1e3)))
    assert _known(curve.at(70).overhead) < 1.01 < 1.1 < _known(other.at(70).overhead)


def test_nothing_is_proposed_where_nothing_holds() -> None:
    asked, curve, made = _proposed(1.5, lambda share: None)
    assert made is None and asked == [55, 60, 70, 90, 95], "the knee, and then each twice as far away"
    assert [at.share for at in curve if at.run and at.run.why] == sorted(asked, reverse=True)


def _result(seconds: list[float], **more: Any) -> Result:
    return Result([float(sum(seconds[:k])) for k in range(len(seconds) + 1)], **more)


def test_passes_count_once_they_have_settled() -> None:
    plain = _result([5, 1, 1, 1, 1, 1, 1, 1, 1])
    managed = _result([50, 9, 9, 4, 4, 8, 2, 2, 2], plans=[0, 1, 1, 1, 2, 2, 2, 2, 2, 2])
    assert managed.last_plan == 5 and managed.settled_from == 7
    assert compare(plain, managed).why == "" and compare(plain, managed).passes == 5, "too few have: the second half"
    managed.ends += [managed.ends[-1] + 2 * k for k in range(1, 5)]
    plain.ends += [plain.ends[-1] + k for k in range(1, 9)]
    managed.plans += [2, 2, 2, 2]
    found = compare(plain, managed)
    assert managed.settled_from == 9 and found.slowdown == 2 and found.passes == 4
    assert found.seconds == 2 and found.plain_seconds == 1 and found.doubt == 0 and found.after == 9


def test_passes_that_something_else_has_disturbed_do_not_count() -> None:
    plain, managed = _result([1.0] * 16), _result([2.0] * 15 + [40.0])
    assert compare(plain, managed).slowdown == 2
    plain, managed = _result([1.0, 3.0] * 8), _result([2.0, 6.0] * 8)
    assert compare(plain, managed).slowdown == pytest.approx(2), "a load on both runs"


def test_a_slowdown_is_of_a_sample() -> None:
    assert compare(_result([1.0] * 8), _result([3.0] * 8), samples=2).slowdown == 1.5
    assert (
        compare(_result([1.0] * 8), Result(error="BudgetError: x", floor_error=True)).why == "the budget is too small"
    )
    used = _result([1.0] * 8, processor=[0.1 * k for k in range(9)])
    assert compare(used, _result([3.0] * 8, processor=[0.4 * k for k in range(9)])).processor == pytest.approx(4)
    assert compare(_result([1.0] * 8), _result([1.0, 1.0])).slowdown is None


@pytest.mark.parametrize(("last_plan", "passes"), [(0, 8), (2, 8), (3, 9), (4, 10), (99, 32)])
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

    runtime = SimpleNamespace(plans=FakePlans())
    monkeypatch.setattr(child, "_runtime", lambda: runtime)
    monkeypatch.setattr(clock, "_is_enough", lambda: False)

    def backward() -> None:
        now[0] += 1.0

    for _ in range(3):
        clock._timed(backward)()
    assert result.seconds == [1.0, 1.0] and result.plans == [1, 2, 3]


def test_the_clock_stands_still_while_another_process_has_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(child.time, "monotonic", lambda: now[0])
    clock = Clock(Job("train.py", [], passes=8, turns=[1, 2], turn_passes=2), result := Result(), Path("unused"))
    answers = [GO, END]

    def read(pipe: int, size: int) -> bytes:
        now[0] += 100.0
        return answers.pop(0)

    monkeypatch.setattr(child.os, "write", lambda pipe, word: len(word))
    monkeypatch.setattr(child.os, "read", read)
    ended: list[int] = []
    monkeypatch.setattr(clock, "finish", lambda: ended.append(len(result.ends)))

    def backward() -> None:
        now[0] += 1.0

    while not ended:
        clock._timed(backward)()
    assert ended == [4] and result.seconds == [1.0, 1.0, 1.0], "it is told to end at the end of the second turn"


SLOW = """
import sys, time
import torch
x = torch.ones(8, requires_grad=True)
for k in range(int(sys.argv[2])):
    x.sum().backward()
    with open("order", "a") as order:
        print(sys.argv[1], file=order)
"""


@pytest.mark.parametrize(("first", "second"), [(1000, 1000), (3, 1000)])
def test_two_processes_take_turns(first: int, second: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second goes on by itself once the first has ended."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SLOW)
    children = [
        Child(
            Job(str(tmp_path / "train.py"), [name, str(count)], passes=passes, turn_passes=2),
            name,
            tmp_path,
            os.environ,
            turns=True,
        )
        for name, count, passes in (("a", first, 1 << 30), ("b", second, 9))
    ]
    take_turns(*children)
    results = [one.result() for one in reversed(children)]
    assert len(results[0].ends) == 9 and not results[0].error, results[0].error
    order = Path("order").read_text().split()
    if first > 9:
        assert sorted(order[:2]) == ["a", "b"], "both begin at once"
        assert "".join(order[2:]).startswith("aabb" * 3), order
        assert 8 <= len(results[1].ends) <= 10
    else:
        assert order.count("a") == 3 and order.count("b") == 8, order


class FakeRunner:
    """A batch fits up to `fits`, and a sample takes 1 s, from 100 samples on 2 s."""

    job = Job("train.py", [], module=True)

    def __init__(self, fits: int) -> None:
        self.fits = fits
        self.runs = 0
        self.most_runs = 1000

    def expected(self, samples: float) -> str:
        return f"{samples:g} passes"

    def batch(self, budget: str, budget_bytes: int | None, batch: Batch) -> tuple[Result, Result]:
        assert batch.size is not None
        self.runs += 1
        if self.runs > self.most_runs:
            raise SystemExit(143)  # as at SIGTERM
        if batch.size > self.fits:
            return Result(error="BudgetError: no", floor_error=True), Result()
        each = 2.0 if batch.size >= 100 else 1.0
        return _result([batch.size * each] * 8, applied=["option"], need_bytes=batch.size), _result([8.0] * 8)


@pytest.mark.parametrize(
    ("fits", "samples", "most", "largest"),
    [(1000, None, 2.0, (938, 1000)), (1000, None, 1.5, (94, 99)), (1000, 70, 1.1, (66, 70)), (3, None, 1.1, (3, 3))],
)
def test_the_largest_batch(fits: int, samples: int | None, most: float, largest: tuple[int, int]) -> None:
    said: list[str] = []
    runner: Any = FakeRunner(fits)
    found = batch_search.Search("1GB", 8, most)
    batch_search.search(runner, Batch("option", "--b"), found, samples, None, said.append)
    best = found.largest
    assert found.complete and best is not None and largest[0] <= best.batch <= largest[1] and not best.error
    assert any(row.error for row in found.tried if row.batch > best.batch), "and the next that was tried does not hold"
    assert best.slowdown is not None and best.slowdown <= most


def test_each_batch_is_announced_and_has_its_verdict() -> None:
    said: list[str] = []
    runner: Any = FakeRunner(20)
    found = batch_search.Search("1GB", 8, 1.1)
    batch_search.search(runner, Batch("option", "--b"), found, 12, None, said.append)
    assert said == [
        "batch 8: runs, about 1 passes",
        "batch 8: fits, 1.00x a sample, needs 8 B",
        "batch 16: the data set has 12 samples",
        "batch 12: runs, about 1.5 passes",
        "batch 12: fits, 1.00x a sample, needs 12 B",
        "batch 14: the data set has 12 samples",
        "batch 13: the data set has 12 samples",
    ]


def test_a_batch_whose_passes_differ_is_in_doubt(capsys: pytest.CaptureFixture[str]) -> None:
    """Other programs took their time from some of the passes."""

    class Disturbed(FakeRunner):
        def batch(self, budget: str, budget_bytes: int | None, batch: Batch) -> tuple[Result, Result]:
            assert batch.size is not None
            each = [batch.size * factor for factor in (1.0, 3.0, 1.0, 1.0, 3.0, 1.0, 1.0, 3.0)]
            return _result(each, applied=["option"], need_bytes=batch.size), _result([8.0] * 8)

    runner: Any = Disturbed(1000)
    runner.probe = lambda batch: Result()
    args = _arguments(batch="--b", budget="1GB", batch_now=8)
    assert tune._largest_batch(args, runner, Batch("option", "--b"), 1.1) == 1
    shown = capsys.readouterr().out
    assert re.search(r"±\d\.\d\d\* ", shown) and "in doubt: more than 1.10x a sample, or not" in shown
    assert "no batch holds for sure in 1GB" in shown and "Run this again on an idle machine" in shown


@pytest.mark.parametrize("as_json", [False, True])
def test_batches_that_were_tried_are_shown_where_the_search_is_ended(
    as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    runner: Any = FakeRunner(1000)
    runner.probe = lambda batch: Result()
    runner.most_runs = 2
    args = _arguments(batch="--b", budget="1GB", batch_now=8, json=as_json)
    with pytest.raises(SystemExit, match="143"):
        tune._largest_batch(args, runner, Batch("option", "--b"), 1.1)
    shown = capsys.readouterr().out
    if as_json:
        found = json.loads(shown)
        assert [row["batch"] for row in found["tried"]] == [8, 16]
        assert found["largest"]["batch"] == 16 and not found["complete"]
    else:
        assert "the largest batch so far in 1GB: 16 (now 8)" in shown and "memmgr run --budget 1GB" in shown


def test_a_batch_that_nothing_reads_is_an_error_with_a_near_name(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os\nBATCH_SIZE = 8\nn = os.environ['ROWS']\nparser.add('--batch-size')\n"
    )
    runner: Any = FakeRunner(1000)
    runner.job = Job(str(tmp_path / "train.py"), [])
    runner.batch = lambda budget, budget_bytes, batch: (_result([1.0] * 8), _result([1.0] * 8))
    for how, name, near in (
        ("name", "BATCHSIZE", "BATCH_SIZE"),
        ("name", "ROW", "ROWS"),
        ("option", "--batchsize", "--batch-size"),
    ):
        with pytest.raises(UsageError, match=f"takes its batch size from there; did you mean '{near}'") as raised:
            found = batch_search.Search("1GB", 8, 1.1)
            batch_search.search(runner, Batch(how, name), found, None, None, lambda text: None)
        assert "\n" not in str(raised.value)
        with pytest.raises(UsageError, match=f"{name}': .*did you mean '{near}'"):
            batch_search.own_size(Batch(how, name), runner.job, Result())
    with pytest.raises(UsageError, match="--batch-now N says it"):
        batch_search.own_size(Batch("name", "entirely_else"), runner.job, Result())


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
        (["gone.py"], "cannot read gone.py: No such file or directory"),
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


def _tuned(most: float, found: Measured, need_bytes: int = 10**8, **more: Any) -> search.Tuned:
    curve, made = search.propose(FakeCurve(), most, lambda size, name: found)  # type: ignore[arg-type]
    return search.Tuned(need_bytes, 1.0, most, curve, made, **more)


def _arguments(**options: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)
    args = parser.parse_args(["train.py"])
    for name, value in options.items():
        setattr(args, name, value)
    return args


@pytest.mark.skipif(not plot.available(), reason="the package matplotlib is not installed")
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{suffix}"
    found = Measured(1.4, 9, doubt=0.05)
    tune._draw(_tuned(1.5, found, 24 * 2**30), argparse.Namespace(picture=path, script="train.py", module=False))
    assert path.stat().st_size > 5000
    if suffix == "svg":
        text = path.read_text()
        for said in (
            "train.py",
            "predicted",
            "below the bound",
            "measured",
            "proposal",
            "24 GiB: rtx3090, rtx4090, l4",
        ):
            assert said in text, said


def test_a_busy_machine_is_said_before_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    for doubt, busy in ((0.01, False), (0.3, True)):
        tune._show_proposal(_tuned(1.5, Measured(1.9, 9, processor=1.2, doubt=doubt)), _arguments(), "cpu")
        first, *_ = said = capsys.readouterr().out.splitlines()
        assert first.startswith("* the machine was busy" if busy else "no proposal"), said
        assert any("Run this again on an idle machine" in line for line in said) == busy
        tune._show_proposal(_tuned(1.5, Measured(1.4, 9, doubt=doubt)), _arguments(), "cpu")
        text = capsys.readouterr().out
        assert ("proposal (run this again on an idle machine to confirm it): " in text) == busy and "proposal" in text


def test_the_figure_that_is_shown_is_the_one_that_the_limit_was_compared_with(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Processor time counts for a run in doubt, where it is larger. It is not shown for any other."""
    for doubt, counts in ((0.02, "1.04x ±0.02"), (0.07, "1.30x ±0.07*")):
        found = Measured(1.04, 9, 15, processor=1.3, doubt=doubt)
        tuned = _tuned(1.1, found)
        tune._show(tuned, _arguments(), "cpu")
        said = capsys.readouterr().out
        assert counts in said and ("busy" in said) == counts.endswith("*"), said
        assert all(at.measured is not None and at.measured > tuned.most for at in tuned.curve if at.run) == (
            tuned.proposal is None
        )
        if tuned.proposal is not None:
            assert "1.30" not in said and "say little" not in said
            assert "over 9 passes, after the first 15, which are slower" in said


def test_all_predictions_of_the_table_and_of_the_picture_are_corrected_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A smaller budget is never predicted to be faster, whether it was run or not."""
    curve = _curve(base=1.02)
    factors = {50: 1.07, 40: 1.02, 30: 1.04}
    points, made = search.propose(curve, 1.1, lambda size, name: Measured(_near(factors, curve, size), 9, doubt=0.01))
    predicted = [_known(at.predicted) for at in points if at.predicted is not None]
    assert predicted == sorted(predicted), predicted
    assert made is not None and made.predicted == pytest.approx(_known(made.measured))
    drawn: list[Any] = []
    monkeypatch.setattr(plot, "slowdown", lambda rows, *rest: drawn.extend(row[0].overhead for row in rows))
    tuned = search.Tuned(curve.need_bytes, 1.0, 1.1, points, made)
    tune._draw(tuned, argparse.Namespace(picture=tmp_path / "x.png", script="train.py", module=False))
    assert drawn == [at.predicted for at in points]


def _near(factors: dict[int, float], curve: search.Curve, size: int) -> float:
    return factors[min(factors, key=lambda share: abs(share - 100 * size / curve.need_bytes))]


def test_runs_that_were_not_in_turns_are_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    tune._show_proposal(_tuned(1.5, Measured(1.4, 9), in_turns=False), _arguments(), "cpu")
    assert "one after the other" in capsys.readouterr().out


def test_the_proposal_has_its_prediction_from_before_its_run(capsys: pytest.CaptureFixture[str]) -> None:
    tuned = _tuned(1.5, Measured(1.45, 9, peak_bytes=54_000_000))
    made = tuned.proposal
    assert made is not None and made.predicted is not None and made.before is not None and made.share == 55
    tune._show(tuned, _arguments(), "cpu")
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if "<- proposal" in line)
    assert row.split()[:8] == ["55", "MB", "55", "%", "54", "MB", f"{made.predicted:.2f}x", "1.45x"], said
    assert f"before that run {made.before:.2f}x was predicted" in said
    assert len(said.splitlines()) <= 24, "one screen"


def test_budgets_without_a_plan_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    tuned = _tuned(1.5, Measured(1.45, 9))
    tuned.curve = [at if at.share > 30 else search.At(at.share, at.budget_bytes, None, None) for at in tuned.curve]
    tune._show(tuned, _arguments(), "cpu")
    said = capsys.readouterr().out
    assert "below 40 % no plan was found" in said and "30 %" not in said


def test_a_run_in_a_budget_that_is_faster_than_those_without_is_not_confirmed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tune._show_proposal(_tuned(1.5, Measured(0.6, 9)), _arguments(), "cpu")
    said = capsys.readouterr().out
    assert "the machine was busy" in said and "to confirm it" in said


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
    assert made["run"]["passes"] >= 3 and made["run"]["slowdown"] > 0 and made["predicted"] > 0
    assert made["lower_bound"] >= 1 and 0 < made["run"]["peak_bytes"] <= made["budget_bytes"] and found["in_turns"]
    assert (tmp_path / "x.svg").stat().st_size > 5000 and found["need_bytes"] > 10_000_000
    assert found["need_bytes"] == found["curve"][0]["run"]["peak_bytes"], "as memmgr run has it"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py", "x.svg"]


def test_one_command_to_the_largest_batch(tmp_path: Path) -> None:
    loader = "loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=1000)\n"
    script = LONG.replace("for _ in range(30):\n", f"{loader}for _ in range(30):\n    x, = next(iter(loader))\n")
    (tmp_path / "train.py").write_text(script)
    done = memmgr(
        "tune", "--batch", "auto", "--budget", "17MB", "--slowdown", "99", "--passes", "6", "train.py", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "the largest batch in 17MB: 1000 (now 1000)" in done.stdout, done.stdout
    assert "the data set has 1024 samples" in done.stdout and "memmgr run --budget 17MB train.py" in done.stdout


def test_a_script_that_fails_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nraise ValueError('no data')\n")
    done = memmgr("tune", "train.py", cwd=tmp_path)
    assert done.returncode == 2 and "train.py failed: ValueError: no data" in done.stderr, done.stderr


def test_a_script_of_one_pass_is_told_with_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\ntorch.nn.Linear(9, 9)(torch.ones(9)).sum().backward()\nexit(3)\n")
    done = memmgr("tune", "train.py", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert (
        "train.py made 1 pass (a pass is a forward and its backward) and ended with code 3, and 5 passes" in done.stderr
    )
    assert done.stderr.rstrip().endswith("or more are needed; it printed nothing")


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
