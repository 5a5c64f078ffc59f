"""Figures of the machine."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from memmgr.config import machine


def _processor(**seconds: float) -> Any:
    return SimpleNamespace(**{"user": 9.0, "irq": 0.0, "softirq": 0.0, "steal": 0.0, **seconds})


def test_lost_time_is_that_of_interrupts_and_the_host_on_the_processors_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processors = [_processor(irq=1.0), _processor(softirq=2.0, steal=4.0), _processor(steal=8.0)]
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: processors)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert machine.lost_seconds() == 7.0


def test_lost_time_is_none_where_the_kernel_hides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(percpu: bool) -> Any:
        raise PermissionError("/proc/stat")

    monkeypatch.setattr(psutil, "cpu_times", hidden)
    assert machine.lost_seconds() == 0.0


def test_lost_time_only_grows() -> None:
    before = machine.lost_seconds()
    assert 0.0 <= before <= machine.lost_seconds()
