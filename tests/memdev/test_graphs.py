"""Graphs inside a budget: memmgr stands aside for a capture, and a replay's writes are no surprise."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from . import child
from .graphs import PROGRAMS

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("c++") is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def programs() -> Any:
    """The results of each of PROGRAMS."""
    return child.run("all_programs", module="memdev.graphs", mode="late", seed=0)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_graph_inside_a_budget(programs: Any, name: str) -> None:
    seen = programs[name]
    assert seen["plain"]["violations"] == 0
    assert seen["managed"]["digest"] == seen["plain"]["digest"]
    assert seen["managed"]["violations"] == 0  # no event was asked for, no stream waited for, nothing copied
    if name in ("whole_step", "overwritten"):
        assert seen["managed"]["evictions"] + seen["managed"]["offloads"] > 0


# Not `two_graphs`: memdev's graphs keep memdev's own memory, which is never evicted.
@pytest.mark.parametrize("name", ["whole_step", "overwritten"])
def test_without_knowing_of_it_something_breaks(programs: Any, name: str) -> None:
    seen = programs[name]
    assert seen["unaware"]["digest"] != seen["plain"]["digest"] or seen["unaware"]["violations"] > 0


def test_no_budget_opens_while_a_graph_is_captured(programs: Any) -> None:
    assert "cannot be opened while a graph is captured" in programs["refused"]
