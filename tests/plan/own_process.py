"""A planner's process that belongs to one test: a fixture for the files that import it."""

from collections.abc import Iterator

import pytest

from memmgr.runtime import planner_process
from memmgr.runtime.planner_process import PlannerProcess

SOON = 0.2
"""Seconds in which a closing budget has given up a running plan."""


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlannerProcess]:
    """A process of the test's own."""
    process = PlannerProcess()
    monkeypatch.setattr(planner_process, "PLANNER", process)
    yield process
    process.close()
