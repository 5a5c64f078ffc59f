"""Figures of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from memmgr.config import machine

TIMES = """cpu  9 9 9 9 9 9 9 9 9 9
cpu0 900 0 0 0 0 100 0 0 0 0
cpu2 900 0 0 0 0 0 200 400 50 0
cpu3 900 0 0 0 0 0 0 800 0 0
intr 5 5 5 5 5 5 5 5 5
"""


def test_lost_time_is_that_of_interrupts_and_the_host_on_the_processors_of_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "stat").write_text(TIMES)
    monkeypatch.setattr(machine, "_TIMES", tmp_path / "stat")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2})
    assert machine.lost_seconds() == 700 / os.sysconf("SC_CLK_TCK")


def test_lost_time_is_none_where_the_kernel_hides_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_TIMES", tmp_path / "none")
    assert machine.lost_seconds() == 0.0


def test_lost_time_is_what_psutil_reads() -> None:
    times = psutil.cpu_times(percpu=True)
    read = sum(times[number].irq + times[number].softirq + times[number].steal for number in os.sched_getaffinity(0))
    hundredths = round(100 * machine.lost_seconds()) - round(100 * read)  # the kernel counts them
    assert 0 <= hundredths < 500
