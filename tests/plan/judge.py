"""The judge of every simulated figure: the script that came with the operator logs, which shares no code with ours."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from memmgr.policies.trace import Trace
from memmgr.policies.trace.schedule import Step, judge_records

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
