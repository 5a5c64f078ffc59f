"""Budgets on a device whose allocator is not memmgr's: the bits of training without memmgr, whatever the device's order, and
its own allocator never takes more than the budget."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from memmgr._py_streams import RULES

from . import child
from .accounting import PROGRAMS, WARNING

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("c++") is None, reason="no C++ compiler")

MODES = ("late", "random", "threaded")
POLICIES = ("auto", "evict", "offload", "torture")
LATE = {"mode": "late", "seed": 0}
CHILDREN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "trains late": ("accounting", "trains", {**LATE, "models": ["mlp", "gpt", "convnet"], "policies": POLICIES}),
    "streams": ("accounting_streams", "all_rules", LATE),
    "comes and goes": ("accounting", "comes_and_goes", LATE),
    "programs": ("accounting", "programs", {"mode": "random", "seed": 2}),
    "trains random": ("accounting", "trains", {"mode": "random", "seed": 3, "models": ["gpt"], "policies": ["auto"]}),
    "trains threaded": (
        "accounting",
        "trains",
        {"mode": "threaded", "seed": 5, "models": ["convnet"], "policies": ["auto", "offload"]},
    ),
}


@pytest.fixture(scope="module")
def children() -> Iterator[Any]:
    """Runs a scenario of CHILDREN, once."""
    yield from child.each_once(CHILDREN)


@pytest.mark.parametrize("mode", MODES)
def test_the_same_bits_within_the_budget(children: Any, mode: str) -> None:
    seen = dict(children(f"trains {mode}"))
    assert seen.pop("share") == 1.0  # the device's own limit is as it was
    for name, model in seen.items():
        assert model["free"] == model["plain"]
        for policy, run in model["runs"].items():
            assert run["digest"] == model["plain"], (name, policy)
            assert run["resident_bytes.peak"] <= run["budget_bytes"], (name, policy)
            assert run["reserved"] <= run["budget_bytes"] < model["reserved"], (name, policy)
            assert run["evictions"] + run["offloads"] > 0 and run["tier_errors"] == 0, (name, policy)


def test_policies_do_what_they_are_for(children: Any) -> None:
    seen = {name: model["runs"] for name, model in children("trains late").items() if name != "share"}
    assert len(seen) == 3
    for name, runs in seen.items():
        assert runs["evict"]["offloads"] == runs["evict"]["tier_bytes.peak"] == 0 < runs["evict"]["recomputes"], name
        assert runs["offload"]["evictions"] == runs["offload"]["recomputes"] == 0 < runs["offload"]["reloads"], name
        assert runs["torture"]["evictions"] > 0 and runs["torture"]["offloads"] > 0, name
    # Some are there before backward asks; which, is the daemon's luck.
    assert sum(run["prefetch_hits"] for runs in seen.values() for run in runs.values()) > 0


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_of_streams_that_is_not_kept_shows(children: Any, rule: str) -> None:
    found = {name: runs for name, runs in children("streams")["seen"].items() if name.split()[0] == rule}
    assert found
    for name, runs in found.items():
        assert runs["kept"]["digest"] == runs["plain"]["digest"], name
        assert runs["left out"]["digest"] != runs["plain"]["digest"], name
        assert runs["kept"]["stats"]["evictions"] + runs["kept"]["stats"]["offloads"] > 0, name


def test_every_rule_of_streams_has_its_program(children: Any) -> None:
    seen = children("streams")
    assert set(seen["rules"]) == set(RULES) == {name.split()[0] for name in seen["seen"]}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(children: Any, name: str) -> None:
    seen = children("programs")[name]
    assert seen["managed"] == seen["plain"]
    assert seen["left"] > 0 and seen["over"] == 0


def test_budgets_come_and_go(children: Any) -> None:
    """On the device and on the CPU, by accounting and by the shim, in one process; after an error, too."""
    seen = children("comes and goes")
    for name in ("at the floor", "cpu after it", "device again", "after the end", "managed tensor"):
        assert seen[name] is True, name
    assert seen["cpu native"] == "memmgr._native" and seen["device native"] == "Native"
    assert seen["left"] == {"live": 0, "page-locked": 0, "cells": 0}


def test_what_is_weaker_is_said_once(children: Any) -> None:
    (said,) = children("comes and goes")["said"]
    assert WARNING in said and "no allocator for 'memdev'" in said and "cannot be" in said


def test_what_was_there_before_counts(children: Any) -> None:
    seen = children("comes and goes")
    assert seen["outside"] == seen["held"] > 0
    assert seen["unseen"] >= seen["hidden"] > 0  # what only C++ holds
    assert seen["unseen after"] < seen["hidden"]


def test_an_allocator_without_room_is_met_by_letting_go(children: Any) -> None:
    """The device's own allocator refuses where the books see room: the op runs again, and the bits are the same."""
    seen = children("comes and goes")["refused"]
    assert seen["refusals"] > 0 and seen["right"] is True and seen["released"] > 0


def test_below_the_floor_is_a_budget_error(children: Any) -> None:
    seen = children("comes and goes")
    assert seen["error"].startswith("Device out of memory. You tried to allocate ")
    assert "mallest budget that would have worked so far" in seen["error"] and "parameters" in seen["error"]
