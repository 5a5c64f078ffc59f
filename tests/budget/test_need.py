"""A budget as a share of the run's need, and `auto`: measured first, then set."""

import io
import json
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memmgr
from memmgr.config.sizes import show_size
from memmgr.integrations._callback_budget import CallbackBudget
from memmgr.policies.plan.knee import Knee, knee
from memmgr.runtime import planner_process, sizing


class Run:
    """A small training that counts the cells that had left memory when each of its steps ended."""

    def __init__(self, every: int = 1, backwards: int = 1) -> None:
        torch.manual_seed(0)
        self.parts = [self._part() for _ in range(backwards)]
        self.x = torch.randn(512, 64)
        self.every = every
        self.left: list[int] = []

    def _part(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        blocks = [
            torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in range(6)
        ]
        model = torch.nn.Sequential(*blocks)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def __call__(self, steps: int = 8) -> list[float]:
        losses = []
        for step in range(1, steps + 1):
            for model, optimizer in self.parts:
                loss = model(self.x).square().mean()
                loss.backward()
                if step % self.every == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
                del loss
            now = memmgr.stats()
            self.left.append(now.get("evictions", 0) + now.get("offloads", 0))
        return losses


def _needs(make: Callable[[], Run], steps: int) -> int:
    with memmgr.budget(None, quiet=True) as mm:
        make()(steps)
    return int(mm.stats()["unmanaged_peak_bytes"])


@pytest.mark.parametrize("policy", ["auto", "evict", "offload"])
def test_what_leaves_and_comes_back_does_not_change_what_is_said_to_be_needed(policy: str) -> None:
    need = _needs(Run, 8)
    run = Run()
    with memmgr.budget(int(0.7 * need), policy=policy, quiet=True) as mm:
        run(8)
    assert run.left[-1] > 0, "nothing left, so nothing was tested"
    assert mm.stats()["unmanaged_peak_bytes"] == need


@pytest.mark.parametrize("given", ["need*0.6", "need * 60%"])
def test_a_share_is_measured_and_then_kept(given: str, capfd: pytest.CaptureFixture[str]) -> None:
    plain = Run()(8)
    need = _needs(Run, 8)
    run = Run()
    with memmgr.budget(given) as mm:
        assert repr(mm).startswith("<memmgr.budget: 60 % of the need, ")
        losses = run(8)
        assert " MB, policy auto" in repr(mm)
    stats = mm.stats()
    assert losses == plain
    assert run.left[1] == 0 and run.left[-1] > 0, (
        "what fits the device left while it was measured, or nothing left later"
    )
    assert stats["budget_bytes"] == pytest.approx(0.6 * need, rel=0.03)
    assert stats["resident_bytes.peak"] <= stats["budget_bytes"], "the peak is of the time before the limit"
    said = [line for line in capfd.readouterr().err.splitlines() if "the run needs" in line]
    assert len(said) == 1 and re.search(
        r"needs .* \(3 passes measured\): the budget is now .*, 60 % of it$", said[0]
    ), said


def test_a_share_below_the_floor_is_told_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    """The passes that measure the need have met the largest op."""
    with memmgr.budget("need*5%"), pytest.raises(memmgr.BudgetError):
        Run()(8)
    (said,) = (line for line in capfd.readouterr().err.splitlines() if "the run needs" in line)
    found = re.search(
        r"5 % of it, below the floor so far of .*, so the run will end with an error\. At least (\d+) % are needed$",
        said,
    )
    assert found is not None and 5 < int(found[1]) < 100, said


class Terminal(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize(
    ("terminal", "quiet", "shown"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_bar_on_a_terminal_while_passes_are_measured(
    terminal: bool, quiet: bool, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich", reason="the package rich is not installed")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal(terminal))
    with memmgr.budget("need*60%", quiet=quiet, policy="evict"):
        Run()(2)
        drawn = sys.stderr.getvalue()  # type: ignore[attr-defined]
        Run()(6)
        assert memmgr.stats()["budget_bytes"] < 2**60
        after = sys.stderr.getvalue().partition("the budget is now")[2]  # type: ignore[attr-defined]
    assert ("measures what the run needs" in drawn and "2/3" in drawn) == shown
    assert "measures what the run needs" not in after


@pytest.mark.parametrize(
    ("make", "steps"), [(lambda: Run(every=4), 9), (lambda: Run(every=20), 24), (lambda: Run(backwards=2), 6)]
)
def test_states_that_come_late_are_in_the_need(make: Callable[[], Run], steps: int) -> None:
    """Optimizers that step in every fourth or twentieth pass, and two models with a backward each."""
    need = _needs(make, steps)
    with memmgr.budget("need*0.8", quiet=True) as mm:
        make()(steps)
    assert mm.stats()["budget_bytes"] == pytest.approx(0.8 * need, rel=0.05)


def test_auto_is_the_knee_of_the_measured_pass(capfd: pytest.CaptureFixture[str]) -> None:
    plain = Run()(12)
    run = Run()
    with memmgr.budget("auto") as mm:
        assert repr(mm).startswith("<memmgr.budget: auto, ")
        losses = run(6)
        for thread in [t for t in threading.enumerate() if t.name == "memmgr-knee"]:
            thread.join()  # on a busy machine a dozen of these passes are over first
        losses += run(6)
    said = capfd.readouterr().err
    found = re.search(r"the run needs .* measured\): the budget is now .*, (\d+) % of it, .* take (1\.\d\d)x of", said)
    assert found, said
    assert losses == plain and int(found[1]) % 5 == 0 and 1 <= float(found[2]) <= 1.1
    assert mm.stats()["resident_bytes.peak"] <= mm.stats()["budget_bytes"]
    if int(found[1]) < 100:
        assert mm.stats()["evictions"] + mm.stats()["offloads"] > 0


def test_auto_where_no_pass_is_a_trace_keeps_what_the_run_needs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError("no idea")

    monkeypatch.setattr(planner_process, "executor", planner_process.InThread)
    monkeypatch.setattr("memmgr.runtime.planning.knee", fails)
    with memmgr.budget("auto") as mm:
        Run()(8)
    said = capfd.readouterr().err
    assert "all of it: what less would cost is not known (RuntimeError: no idea)" in said, said
    assert mm.stats()["evictions"] == mm.stats()["offloads"] == 0 and mm.stats()["budget_bytes"] < 10**9


def test_auto_that_ends_too_early_says_why(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    begun = threading.Event()

    def seeks(*args: Any) -> Knee:
        begun.wait(60)
        return Knee(10**6, 1.0)

    monkeypatch.setattr(planner_process, "executor", planner_process.InThread)
    monkeypatch.setattr("memmgr.runtime.planning.knee", seeks)
    with memmgr.budget("auto"):
        Run()(8)
        threading.Timer(0.1, begun.set).start()
    assert re.search(r"no limit was set: the run needs [\d.]+ MB, and it ended while", capfd.readouterr().err)


def test_without_a_backward_it_says_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sizing, "PATIENCE_SECONDS", 0.05)
    model = torch.nn.Linear(256, 256)
    with memmgr.budget("need*50%") as mm, torch.no_grad():
        until = time.monotonic() + 20
        said = ""
        while "no backward has ended" not in said and time.monotonic() < until:
            model(torch.randn(512, 256))
            said += capfd.readouterr().err
        assert "nothing is limited" in said and "name a budget in bytes" in said
    assert "no limit was set: no passes" in capfd.readouterr().err
    assert mm.stats()["evictions"] == mm.stats()["offloads"] == 0


def test_the_peak_of_the_measuring_passes_is_told_beside_that_of_the_budget(capfd: pytest.CaptureFixture[str]) -> None:
    with memmgr.budget("need*60%") as mm:
        Run()(8)
    stats, told = mm.stats(), capfd.readouterr().err
    assert stats["resident_bytes.peak"] <= stats["budget_bytes"] < stats["measuring_bytes.peak"]
    assert f", {show_size(stats['measuring_bytes.peak'])} while it measured; " in told
    with memmgr.budget("1GB") as mm:
        Run()(2)
    assert mm.stats()["measuring_bytes.peak"] == 0 and "while it measured" not in capfd.readouterr().err


def test_quiet_says_nothing_and_the_log_has_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with memmgr.budget("need*70%", quiet=True, log=tmp_path / "run.jsonl") as mm:
        Run()(5)
    assert capfd.readouterr().err == ""
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    (limit,) = [line for line in lines if line["type"] == "event" and line["what"] == "limit"]
    assert limit["budget_bytes"] == mm.stats()["budget_bytes"] == int(0.7 * limit["need_bytes"])


def test_a_callback_takes_it() -> None:
    session = CallbackBudget("need*60%", {"quiet": True})
    session.open()
    Run()(5)
    session.close()
    assert 0 < session.stats()["budget_bytes"] < 10**9


@pytest.mark.parametrize(
    ("cost", "share", "slowdown"),
    [
        (lambda percent: 1.0, 5, 1.0),
        (lambda percent: None, 100, 1.0),
        (lambda percent: 1.0 + (100 - percent) / 500, 50, 1.1),
        (lambda percent: 1.04 if percent >= 35 else None, 35, 1.04),
        (lambda percent: 1.2, 100, 1.0),
    ],
)
def test_the_knee(cost: Callable[[float], float | None], share: int, slowdown: float) -> None:
    found = knee(1000, lambda budget_bytes: cost(budget_bytes / 10))
    assert (found.budget_bytes, found.slowdown) == (10 * share, pytest.approx(slowdown))
