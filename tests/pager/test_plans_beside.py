"""A training while its plan is made in another process: the end of that process, or of the budget, ends nothing else."""

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from budget import models
from plan import endless
from plan.own_process import SOON, process

import memmgr
from memmgr.api import budget as budgets
from memmgr.runtime import planner_process, plans
from memmgr.runtime.planner_process import PlannerProcess

from .planned import bits, need, settled, sizes, trained

__all__ = ["process", "sizes"]  # fixtures

pytestmark = [pytest.mark.filterwarnings("error:memmgr"), pytest.mark.usefixtures("sizes"), pytest.mark.timeout(300)]

GPT = functools.partial(models.gpt, layers=2, width=64)
STEPS = 12


def until_it_plans(process: PlannerProcess, training: models.Training) -> list[float]:
    """Steps until a plan is being made; their losses."""
    losses = []
    for _ in range(STEPS):
        losses.append(training.step())
        until = time.monotonic() + 10
        while process._asker is not None and process._child is not None and time.monotonic() < until:
            if process._child.ready and psutil.Process(process._child.pid).cpu_times().user > 0.3:
                return losses
            time.sleep(0.01)
    raise AssertionError("nothing is planned")


def events(log: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line for line in lines if line["type"] == "event" and line["what"] in ("plan", "no_plan")]


def test_a_planner_that_is_killed_costs_a_plan_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, process: PlannerProcess
) -> None:
    limit = int(need(GPT) * 0.55)
    torch.manual_seed(0)
    training = GPT()
    with memmgr.budget(limit, quiet=True, log=tmp_path / "run.jsonl") as mm:
        with monkeypatch.context() as patched:
            patched.setattr(plans, "make", endless.forever)
            losses = until_it_plans(process, training)
            first = process.pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            settled()
        while len(losses) < STEPS:
            losses.append(training.step())
            settled()
        assert process.pid not in (None, first)
    assert (losses, bits(training)) == trained(GPT, STEPS)
    assert mm.stats()["plans"] >= 1 and mm.stats()["planned_passes"] >= 1
    failed = [line for line in events(tmp_path / "run.jsonl") if line["what"] == "no_plan"]
    assert len(failed) == 1 and "was ended by signal 9" in failed[0]["text"]


def test_a_planner_that_is_killed_again_and_again_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, process: PlannerProcess
) -> None:
    monkeypatch.setattr(plans, "make", os.abort)
    monkeypatch.setattr(plans, "PlanJob", lambda *_: None)
    monkeypatch.setattr(PlannerProcess, "run", _with_no_arguments(PlannerProcess.run))
    limit = int(need(GPT) * 0.55)
    torch.manual_seed(0)
    training = GPT()
    losses = []
    with memmgr.budget(limit, quiet=True, log=tmp_path / "run.jsonl"):
        for _ in range(STEPS):
            losses.append(training.step())
            settled()
    assert (losses, bits(training)) == trained(GPT, STEPS)
    assert [line["what"] for line in events(tmp_path / "run.jsonl")] == ["no_plan"] * planner_process.MOST_CRASHES


def _with_no_arguments(run: Any) -> Any:
    return lambda self, asker, function, arguments: run(self, asker, function, ())


def test_a_budget_that_closes_gives_up_what_is_planned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, process: PlannerProcess
) -> None:
    monkeypatch.setattr(plans, "make", endless.forever)
    limit, took = int(need(GPT) * 0.55), []
    for _ in range(3):
        torch.manual_seed(0)
        training, threads = GPT(), threading.active_count()
        with memmgr.budget(limit, quiet=True, log=tmp_path / "run.jsonl"):
            until_it_plans(process, training)
            pid = process.pid
            assert pid is not None
            runtime: Any = budgets.current()
            begun = time.perf_counter()
            runtime.plans.close()
            took.append(time.perf_counter() - begun)
        assert threading.active_count() == threads
        assert not psutil.pid_exists(pid), "nor is it left as a zombie"
        assert not events(tmp_path / "run.jsonl")
        (tmp_path / "run.jsonl").unlink()
    assert min(took) < SOON, took


SCRIPT = """
import atexit, os, sys, threading, time
import torch

def last():
    from memmgr.runtime import planner_process
    print("PLANNER", planner_process.PLANNER.pid, flush=True)

torch.manual_seed(0)
net = torch.nn.Sequential(*[m for _ in range(10) for m in (torch.nn.Linear(96, 96), torch.nn.Tanh())])
opt = torch.optim.Adam(net.parameters())
for _ in range(6):
    x = torch.randn(256, 96)
    (net(x) - x).square().mean().backward()
    opt.step(), opt.zero_grad()
    for thread in threading.enumerate():
        if thread.name == "memmgr-plan":
            thread.join()
last()
"""


@pytest.mark.parametrize(
    "how", ["environment", pytest.param("run", marks=pytest.mark.slow)]
)  # it opens the same budget
def test_scripts_leave_no_process(tmp_path: Path, how: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command, environment = [sys.executable, "train.py"], {**os.environ, "MEMMGR_CONF": "policy:offload"}
    if how == "run":
        command = [sys.executable, "-P", "-m", "memmgr.tools.cli", "run", "--budget", "1800kB", "train.py"]
    else:
        environment["MEMMGR_BUDGET"] = "1800kB"
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    pid = done.stdout.split()[done.stdout.split().index("PLANNER") + 1]
    assert pid != "None", done.stderr
    assert "Traceback" not in done.stderr and "ResourceWarning" not in done.stderr
    assert not psutil.pid_exists(int(pid)), "nor is it left as a zombie"
