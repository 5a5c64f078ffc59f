"""Compiled graphs in budgets of the test device: their Triton kernels are ops, launch by launch. No Triton runs here: the double of
its launcher is in inductor.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from . import child

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
