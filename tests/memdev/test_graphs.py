"""Graphs inside a budget: memmgr stands aside for a capture, and a replay's writes are no surprise."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from . import child
from .graphs import PROGRAMS

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("c++") is None, reason="no C++ compiler")

WAYS = ("accounting", "shim")
CHILDREN: dict[str, tuple[str, str, dict[str, Any]]] = {
    way: ("graphs", "all_programs", {"accounted": way == "accounting", "mode": "late", "seed": 0}) for way in WAYS
}


@pytest.fixture(scope="module")
def children() -> Iterator[Any]:
    """Runs a scenario of CHILDREN, once."""
    yield from child.each_once(CHILDREN)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_graph_inside_a_budget(children: Any, name: str, way: str) -> None:
    seen = children(way)[name]
    assert seen["plain"]["violations"] == 0
    assert seen["managed"]["digest"] == seen["plain"]["digest"]
    assert seen["managed"]["violations"] == 0  # no event was asked for, no stream waited for, nothing copied
    assert not seen["managed"]["aside"]  # and memmgr is back
    if name in ("whole_step", "overwritten"):
        assert seen["managed"]["evictions"] + seen["managed"]["offloads"] > 0


# Not `two_graphs` by the shim: what memdev's graphs keep is memdev's own memory, which never leaves.
@pytest.mark.parametrize(
    ("way", "name"),
    [(way, name) for way in WAYS for name in ("whole_step", "overwritten")] + [("accounting", "two_graphs")],
)
def test_without_knowing_of_it_something_breaks(children: Any, name: str, way: str) -> None:
    seen = children(way)[name]
    assert seen["unaware"]["digest"] != seen["plain"]["digest"] or seen["unaware"]["violations"] > 0


@pytest.mark.parametrize("way", WAYS)
def test_no_budget_opens_while_a_graph_is_captured(children: Any, way: str) -> None:
    assert "cannot be opened while a graph is captured" in children(way)["refused"]
