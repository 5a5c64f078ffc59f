"""The judge of every simulated figure: the script that came with the operator logs, which shares no code with ours."""

import importlib.util
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from memmgr.policies.online.policy import Online
from memmgr.policies.plan.paging import Paged
from memmgr.policies.simulate.simulator import Run
from memmgr.policies.trace import TierLink, Trace
from memmgr.policies.trace.plan import Plan
from memmgr.policies.trace.schedule import Cost, Step, judge_records, replay
from memmgr.tools.common.dtr_log import read_dtr_log

from .operator_logs import SHARED

needs_judge = pytest.mark.skipif(
    not (SHARED / "check_schedule.py").is_file(), reason="the judge's script is not on this machine"
)


def _module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_schedule", SHARED / "check_schedule.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def verdict(log: Path, trace: Trace, steps: Iterable[Step], budget_bytes: int) -> dict[str, Any]:
    """The judge's verdict on a schedule, in the form of a file."""
    check = _module()
    written = [json.loads(json.dumps(record)) for record in judge_records(trace, steps)]
    result: dict[str, Any] = check.check(check.Program(str(log)), written, budget_bytes)
    return result


def unmanaged(log: Path) -> tuple[int, int]:
    """(peak bytes, time in ns) of a log, by the judge."""
    peak, time, _ = _module().Program(str(log)).unmanaged()
    return peak, time


def judged(trace: Trace, made: Run | Paged, budget: int, link: TierLink) -> Cost:
    """Cost by the rules of schedule.py, which also check that it ends with the blocks that it began with."""
    return replay(
        trace, made.steps, budget, write_rate=link.write_bytes_per_second,
        read_rate=link.read_bytes_per_second, latency_seconds=link.latency_seconds, shared=link.shared,
        away=made.away, clean=made.clean,
    )  # fmt: skip


def keeps_the_rules(trace: Trace, made: Run, budget: int, tier: TierLink | None = None) -> Cost:
    """Replays the schedule of a run within its budget, which has the run's peak and time."""
    cost = judged(trace, made, budget, tier or TierLink("host", 1.0, 1.0))
    assert cost.valid, cost.why
    assert (cost.peak_bytes, cost.seconds) == (made.peak_bytes, pytest.approx(made.seconds))
    return cost


def agrees(file: Path, trace: Trace, made: Run | Plan | Online, budget: int) -> None:
    """The judge's figures of the schedule are its own."""
    said = verdict(file, trace, made.steps, budget)
    assert said["valid"], said
    assert said["peak_bytes"] == made.peak_bytes <= budget
    assert said["time_ns"] == pytest.approx(made.seconds * 1e9, rel=1e-9)


def confirmed(file: Path, run: Callable[[Trace, int], Run], ratios: Iterable[float]) -> None:
    """The judge confirms the run's figures at these shares of the unmanaged peak; at one of them it fits."""
    trace = read_dtr_log(file)
    judged = 0
    for ratio in ratios:
        budget = int(trace.unmanaged_peak[0] * ratio)
        result = run(trace, budget)
        assert result.feasible or result.why
        if result.feasible:
            judged += 1
            agrees(file, trace, result, budget)
    assert judged
