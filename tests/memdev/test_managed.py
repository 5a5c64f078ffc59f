"""Budgets on the test device: the bits of training without memmgr, with any delay and any order of the device's work."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driver import build

from . import child
from .managed import POLICIES, PROGRAMS, SHARES
from .streams import PROGRAMS as RULES

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("c++") is None, reason="no C++ compiler")

NOTHING = {"bytes": 0, "cells": 0, "page-locked": 0, "events": 0, "driver errors": 0}
MODES = ("late", "random", "threaded")
# Scenarios, the longest first. The tests of a scenario share its process and its figures.
LATE = {"mode": "late", "seed": 0}
MODELS = ["mlp", "gpt", "convnet"]
FEWER = {"convnet": ["auto", "torture"]}  # which evict and offload; the slow test has the other policies
CHILDREN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "trains late": (
        *("managed", "trains"),
        {**LATE, "models": MODELS, "policies": POLICIES, "loose": POLICIES[:1], "fewer": FEWER},
    ),
    "streams": ("streams", "all_rules", LATE),
    "op from before": ("streams", "an_op_from_before", LATE),
    "comes and goes": ("managed", "comes_and_goes", LATE),
    "programs": ("managed", "programs", LATE),
    "trains random": ("managed", "trains", {"mode": "random", "seed": 3, "models": ["gpt"], "policies": POLICIES[:1]}),
    "trains threaded": (
        "managed",
        "trains",
        {"mode": "threaded", "seed": 5, "models": ["gpt"], "policies": POLICIES[2:]},
    ),
    "trains in pieces": (
        "managed",
        "trains",
        {"mode": "random", "seed": 2, "models": ["gpt"], "policies": POLICIES[2:], "piece": 1 << 16},
    ),
    "unwound": ("managed", "unwound", LATE),
    "lengths": ("managed", "lengths", LATE),
    "device times": ("managed", "device_times", LATE),
    "queued before": ("managed", "queued_before", LATE),
    "by chance": ("managed", "by_chance", LATE),
    "two devices": ("managed", "two_devices", LATE),
    "shared cell": ("managed", "shared_cell", {}),
}


@pytest.fixture(scope="module")
def children() -> Iterator[Any]:
    """Runs a scenario of CHILDREN, once."""
    yield from child.each_once(CHILDREN)


@pytest.mark.parametrize("mode", (*MODES, "in pieces"))
def test_training_has_the_bits_of_training_without_memmgr(children: Any, mode: str) -> None:
    _check_bits(children(f"trains {mode}"))


@pytest.mark.slow  # the smaller budget, with every policy, evicts more
def test_training_has_the_bits_of_training_without_memmgr_where_less_leaves() -> None:
    loose = {**LATE, "models": MODELS, "policies": [], "loose": POLICIES[1:]}
    _check_bits(child.run("trains", module="memdev.managed", timeout=120, **loose))
    left_out = {**LATE, "models": [*FEWER], "policies": ["evict", "offload"], "loose": []}
    _check_bits(child.run("trains", module="memdev.managed", timeout=120, **left_out))


def _check_bits(seen: dict[str, Any]) -> None:
    assert seen.pop("left") == NOTHING
    for name, model in seen.items():
        assert model["free"] == model["plain"]
        for how, run in model["runs"].items():
            assert run["digest"] == model["plain"], (name, how)
            assert run["resident_bytes.peak"] <= run["budget_bytes"] < model["need"], (name, how)
            assert run["evictions"] + run["offloads"] > 0, (name, how)
            assert run["driver_errors"] == run["tier_errors"] == 0, (name, how)


def test_host_memory_is_page_locked_as_it_is_needed(children: Any) -> None:
    """In pieces of 64 KiB some blocks need one of their own."""
    for how, run in children("trains in pieces")["gpt"]["runs"].items():
        ranges, locked_bytes = run["locked"]
        assert ranges > 1, how
        assert locked_bytes <= 2 * run["tier_bytes.peak"] + (1 << 17), how
        assert 0 < run["locking_seconds"] < run["wall_seconds"], how


def test_policies_do_what_they_are_for(children: Any) -> None:
    seen = {name: model["runs"] for name, model in children("trains late").items() if name != "left"}
    for name, runs in seen.items():
        for how, run in runs.items():
            if how.startswith("evict"):
                assert run["offloads"] == run["tier_bytes.peak"] == 0 < run["recomputes"], (name, how)
            if how.startswith("offload"):
                assert run["evictions"] == run["recomputes"] == 0 < run["reloads"], (name, how)
            if how.startswith("torture"):
                assert run["evictions"] > 0 and run["offloads"] > 0, (name, how)
    assert [*seen] == MODELS
    assert all(len(runs) == len(FEWER.get(name, POLICIES)) + 1 for name, runs in seen.items())
    assert all(run["pending_slices"] > 0 for how, run in seen["mlp"].items() if how.startswith("offload"))


def test_the_order_of_work_does_not_show(children: Any) -> None:
    digests = {children(f"trains {mode}")["gpt"]["plain"] for mode in MODES}
    assert len(digests) == 1


@pytest.mark.parametrize("program", RULES)
def test_a_rule_of_streams_that_is_not_kept_shows(children: Any, program: str) -> None:
    seen = children("streams")[program]
    assert seen["kept"]["digest"] == seen["plain"]["digest"]
    assert seen["left out"]["digest"] != seen["plain"]["digest"]
    left = seen["kept"]["stats"]
    assert left["offloads"] + left["evictions"] > 0


def test_a_tensor_has_the_bytes_of_an_op_that_began_before_the_budget(children: Any) -> None:
    assert children("op from before")


def test_wrong_bytes_stay_wrong(children: Any) -> None:
    """A checksum that was not met is not forgotten: the program of this rule asks twice."""
    assert "bytes came back other than they left" in children("streams")["checked"]["left out"]["digest"]


# A late device shows a wait that is missing. The other modes have the bits of a training, above.
IN_MODES = ["late", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("threaded", "random"))]


@pytest.mark.parametrize("mode", IN_MODES)
def test_checksums_and_trials_fetch_no_bytes(mode: str) -> None:
    """A checksum waits for no stream, unless all are compared: then one at a restore, and a determinism check, wait for
    their own."""
    seen = child.run("checksums", module="memdev.managed", mode=mode, seed=0, refused=False)
    waits = ("cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize", "pageable bytes")
    assert [seen["leaves"][name] for name in waits] == [0, 0, 0, 0]
    assert seen["left"] > 0 and seen["leaves"]["cuLaunchKernel"] == 3  # the word is cleared before, and fetched after
    assert seen["returns"]["cuCtxSynchronize"] == seen["returns"]["pageable bytes"] == 0
    # For the restored cell, and for the check of the op that uses it: its memory is filled before.
    assert seen["returns"]["cuLaunchKernel"] == 3 + 4
    assert seen["trials"] > 0 and seen["trial"]["cuLaunchKernel"] == 4
    assert seen["trial"]["cuCtxSynchronize"] == seen["trial"]["pageable bytes"] == 0
    assert seen["training"]["pageable bytes"] == 0 < seen["training"]["cuLaunchKernel"]
    assert [seen["sampled"][name] for name in waits] == [0, 0, 0, 0] and seen["sampled"]["cuLaunchKernel"] == 3
    assert [[when for when, _ in told] for told in seen["told"]] == [["in it", "at its end"]] * 2 + [["at its end"]]
    assert all("1048576 bytes came back other than they left" in text for told in seen["told"] for _, text in told)
    assert seen["right"] and seen["training right"]
    assert seen["after it"] == NOTHING


def test_a_driver_that_refuses_the_kernels_has_its_bytes_fetched() -> None:
    seen = child.run("checksums", module="memdev.managed", mode="late", seed=0, refused=True)
    for name in ("trial", "leaves", "returns", "training"):
        assert seen[name]["cuLaunchKernel"] == 0 < seen[name]["pageable bytes"], name
    assert seen["trials"] > 0 and seen["left"] > 0
    assert seen["right"] and seen["training right"]


@pytest.mark.parametrize("refused", [False, True])
def test_gaps_in_a_result_are_zeros_from_the_trial_on(refused: bool) -> None:
    """Where the driver refuses the kernels no memory is filled: gaps look like other bits, and the op never runs again."""
    seen = child.run("gaps", module="memdev.managed", mode="late", seed=0, refused=refused)
    assert seen["right"] and seen["same"] and seen["captured"]
    assert (seen["zeros"], seen["left"], seen["refused kinds"]) == ((False, 0, 1) if refused else (True, 1, 0))


@pytest.mark.parametrize("mode", IN_MODES)
def test_what_passes_the_host_memory_goes_on_to_a_file(mode: str, tmp_path: Path) -> None:
    seen = child.run("three_tiers", module="memdev.managed", mode=mode, seed=0, folder=str(tmp_path))
    for policy in ("offload", "auto", "torture"):
        run = seen[policy]
        assert run["digest"] == seen["plain"], policy
        assert run["ranges"] == 1 and run["tier_errors"] == 0  # page-locked once, as much as was asked for
        assert run["resident_bytes.peak"] <= run["budget_bytes"]
    assert seen["offload"]["tier_file_bytes"] > 0 and seen["offload"]["tier_bytes.peak"] > seen["host"]
    # Memory that the accelerator shares with the machine is nothing to copy into.
    assert seen["integrated asked"]["error"].startswith("ValueError: host: the memory of memdev:0 is the machine's")
    assert seen["integrated usual"]["error"].startswith("BudgetError: ")
    assert seen["integrated file"]["digest"] == seen["plain"] and seen["integrated file"]["offloads"] > 0
    assert seen["left"] == NOTHING
    assert not list(tmp_path.iterdir())


def test_budgets_come_and_go(children: Any) -> None:
    seen = children("comes and goes")
    assert seen["default device"] == "memdev:0"
    for name in ("at the floor", "cpu after it", "device again", "after the end"):
        assert seen[name] is True, name
    assert seen["cpu peak"] <= 1 and seen["peak"] < seen["need"]
    assert seen["need"] < 8 << 20  # the block that measures the way to the host is not the run's
    assert seen["left"] == NOTHING


def test_the_error_says_what_would_do(children: Any) -> None:
    seen = children("comes and goes")
    assert "the host tier is full" in seen["full host"] and "host=, --host" in seen["full host"]
    first, *rest = seen["error"].splitlines()
    assert first.startswith("Device out of memory. Tried to allocate ")
    assert "parameters" in rest[0] and "Linear" in rest[0]
    assert seen["need"] // 8 < seen["error floor"] <= seen["floor"] and seen["floor budget"] < seen["need"]


def test_a_storage_that_outlives_its_budget_grows_beside_the_next_one(children: Any) -> None:
    seen = children("comes and goes")
    assert seen["grown on the CPU"] == 0


def test_a_budget_is_about_one_device(children: Any) -> None:
    seen = children("two devices")
    assert seen["managed"] == seen["plain"]
    assert seen["evictions"] > 0
    assert seen["outside"] == seen["second outside"] == seen["of this device"]
    assert seen["left the device"] > 0 and seen["comes back to"] == "memdev:0"
    assert seen["first after it"] is True
    assert seen["left"] == NOTHING


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(children: Any, name: str) -> None:
    seen = children("programs")[name]
    assert seen["managed"] == seen["plain"]
    assert seen["left"] > 0 and seen["over"] == 0


def test_a_failed_kernel_is_told_and_leaves_no_cell_busy() -> None:
    """A cell that stays busy is waited for without end, when the budget closes at the latest."""
    seen = child.run("broken", module="memdev.managed", mode="late", seed=0)
    assert seen["left"] == 1 << 20 and seen["begun"] and seen["left broken"] == 0
    assert "; an earlier kernel failed" in seen["error"] and "; an earlier kernel failed" in seen["at its end"]


def test_lengths_that_change(children: Any) -> None:
    seen = children("lengths")
    assert seen.pop("left") == NOTHING
    plain = seen.pop("plain")
    for how, run in seen.items():
        assert run["digest"] == plain and run["refused_kinds"] == 0, how
        assert run["evictions"] + run["offloads"] > 0, how
    assert seen["evict"]["trials"] < seen["evict"]["recorded_ops"] / 10  # the budgets before it have tried enough


def test_work_that_was_queued_before_the_budget_is_waited_for(children: Any) -> None:
    assert children("queued before") == {"left": 1 << 18, "found": [5.0]}


def test_a_plan_is_made_of_the_times_of_the_device(children: Any) -> None:
    """A product of 0.9 GFLOP takes the device milliseconds, and the host far less to queue (first light, F4)."""
    took = children("device times")["mm"]
    assert len(took) >= 7
    assert min(took) > 2e-3, took


def test_what_adds_in_any_order_has_no_recipe(children: Any) -> None:
    """Two runs may agree in a trial and differ later, unless torch was asked for deterministic algorithms."""
    seen = children("by chance")
    sure = {name.removesuffix(", False"): recipe for name, recipe in seen.items() if name.endswith("False")}
    assert sure == {
        "sin": True,
        "convolution": True,
        "index_add": False,
        "scatter_add": False,
        "transposed convolution": False,
    }
    assert all(recipe for name, recipe in seen.items() if name.endswith("True"))


def test_what_is_there_before_counts(children: Any) -> None:
    seen = children("programs")["share"]
    assert seen["outside"] == seen["held"] > 0
    assert seen["budget"] == (1 << 23) // 4
    assert seen["held"] < seen["peak"] <= seen["budget"]
    assert seen["right"]
    assert children("programs")["left"] == NOTHING


@pytest.mark.parametrize("where", ["on a stream", "beside a CPU budget", "beside the next one"])
def test_a_graph_that_outlives_its_budget(children: Any, where: str) -> None:
    seen = children("unwound")
    assert seen[where]["gone"] > 0 == seen[where]["remade"]
    assert seen[where]["right"] is True and seen[where]["lies"] == ["memdev:0"]
    assert seen["left"] == NOTHING


def test_armed_by_the_environment(children: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is named as torch knows it before it is registered: the environment is read while torch loads."""
    model = children("trains late")["gpt"]
    monkeypatch.setenv("MEMMGR_BUDGET", str(int(model["need"] * SHARES["gpt"][-1])))
    monkeypatch.setenv("MEMMGR_CONF", "device:privateuseone:0,quiet:1")
    monkeypatch.setenv("MEMMGR_DRIVER", str(build.fake_driver()))
    seen = child.run("armed", module="memdev.managed", mode="late", seed=0)
    assert seen["digest"] == model["plain"]
    assert seen["evictions"] + seen["offloads"] > 0
    assert seen["resident_bytes.peak"] <= seen["budget_bytes"] < model["need"]


def test_training_notices_a_wait_that_the_core_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of those that docs/develop/streams.md lists; the core's own tests prove them all."""
    monkeypatch.setenv("MEMMGR_CORE_LIB", str(build.core_with_mutations()))
    options = {"mode": "late", "seed": 0, "models": ["gpt"], "policies": ["torture"]}
    try:
        seen = child.run("without_wait", module="memdev.managed", wait="reload.write_done", **options)
    except AssertionError as error:  # wrong bytes were indices, and an op of the double has refused them
        assert "exit status -6" in str(error)
    else:
        assert "gpt torture" in seen
