"""Compiled graphs in budgets of the test device: their Triton kernels are ops, launch by launch. No Triton runs here: the double of
its launcher is in inductor.py. For a capture memmgr stands aside, and a replay's writes are no surprise."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from . import child
from .graphs import PROGRAMS

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("c++") is None, reason="no C++ compiler")

LATE = {"mode": "late", "seed": 0}
RANDOM: dict[str, Any] = {"mode": "random", "seed": 3, "policies": ["torture"]}
CHILDREN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "late": ("compiled", "trains", {**LATE, "policies": ["auto", "offload", "evict", "torture"], "more": True}),
    "captured": ("compiled", "captured", LATE),
    "refused": ("compiled", "refused", LATE),
}
NOTHING = {"bytes": 0, "cells": 0, "page-locked": 0, "events": 0, "driver errors": 0}


@pytest.fixture(scope="module")
def children() -> Iterator[Any]:
    """Runs a scenario of CHILDREN, once. Several compile at the same time here."""
    yield from child.each_once(CHILDREN, timeout=180)


# `random` is torture once more, and compiles the model in a process of its own; test_managed.py trains in each mode.
@pytest.mark.parametrize("mode", ["late", pytest.param("random", marks=pytest.mark.slow)])
def test_a_compiled_training_has_the_bits_of_the_plain_compiled_one(children: Any, mode: str) -> None:
    seen = children("late") if mode == "late" else child.run("trains", module="memdev.compiled", timeout=180, **RANDOM)
    assert seen["same"]
    for name, run in seen["runs"].items():
        assert run["same"], name
        assert run["resident_bytes.peak"] <= run["budget_bytes"] < seen["need"], name
        assert run["evictions"] + run["offloads"] > 0, name
        assert run["escaped_bytes"] == run["tier_errors"] == 0, name
    assert seen["left"] == NOTHING


def test_the_floor_is_that_of_a_launch(children: Any) -> None:
    assert children("late")["floor"] < children("late")["need"] / 3


def test_launches_are_recomputed(children: Any) -> None:
    runs = children("late")["runs"]
    assert runs["evict"]["recomputes"] > 0
    assert runs["torture"]["recomputes"] > runs["no recipes"]["recomputes"]


def test_the_tensors_of_a_captured_launch_stay_where_they_are(children: Any) -> None:
    seen = children("captured")
    assert seen["managed"] == seen["plain"]
    assert seen["unaware"] != seen["plain"]


def test_a_kernel_whose_arguments_cannot_be_read_is_named_and_not_paged(children: Any) -> None:
    seen = children("refused")
    assert seen["same"]
    assert len(seen["warnings"]) == 1
    assert "a kernel has an argument of type tensordesc<fp32[16, 16]>" in seen["warnings"][0]


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


def test_a_graph_that_was_captured_before_the_budget_finds_its_tensors_in_place() -> None:
    """All tensors from before stay if the pager has not seen the capture, else those that the graph touched."""
    seen = child.run("captured_earlier", module="memdev.graphs", mode="late", seed=0)
    assert [each["right"] for each in seen.values()] == [True] * 3
    assert seen["earlier"]["offloads"] > 0 == len(seen["earlier"]["warned"])
    for name in ("none", "both"):
        assert seen[name]["offloads"] == 0
        (warned,) = seen[name]["warned"]
        assert warned.startswith(
            "memmgr: a graph was captured before the budget opened, so all tensors from before it stay"
        )


def test_a_budget_that_opens_amid_another_threads_capture_is_refused_and_harms_neither() -> None:
    seen = child.run("opened_amid_a_capture", module="memdev.graphs", mode="late", seed=0)
    assert "while a graph is captured there: budgets open and close outside of captures" in seen["error"]
    assert seen["right"]


def test_a_graph_of_another_budgets_device_is_not_known() -> None:
    assert child.run("captured_elsewhere", module="memdev.graphs", mode="late", seed=0) == {"right": True, "warned": 1}


def test_tensors_that_another_thread_touches_while_the_budget_opens_stay_for_an_older_graph() -> None:
    assert child.run("captured_beside", module="memdev.graphs", mode="late", seed=0) == {"right": True}
