"""The test device itself: it computes the results of the CPU, late, and a missing wait shows."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest

from . import child

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("c++") is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """The models trained in every mode, each in a process; two at a time."""
    modes = [("prompt", 0), ("late", 0), ("random", 1), ("threaded", 2)]
    results: dict[str, Any] = {}
    for pair in (modes[:2], modes[2:]):
        started = {}
        for mode, seed in pair:
            devices = ["cpu", "memdev"] if mode == "prompt" else ["memdev"]
            started[mode] = child.start("train", mode=mode, seed=seed, devices=devices)
        results |= {mode: child.finish(process) for mode, process in started.items()}
    return results


@pytest.fixture(scope="module")
def late() -> dict[str, Any]:
    """Results of the scenarios that share a process."""
    return child.run("together")


def test_training_has_the_cpus_bits(trained: dict[str, Any]) -> None:
    digests = trained["prompt"]["digests"]
    assert {name.split()[0] for name in digests} == {"mlp", "gpt", "convnet", "pooled"}
    for name, both in digests.items():
        assert both["memdev"] == both["cpu"], name
    assert len({both["cpu"] for both in digests.values()}) >= 4  # the digests tell models apart


@pytest.mark.parametrize("mode", ["late", "random", "threaded"])
def test_the_order_in_which_work_runs_does_not_show(trained: dict[str, Any], mode: str) -> None:
    want = {name: both["memdev"] for name, both in trained["prompt"]["digests"].items()}
    assert {name: both["memdev"] for name, both in trained[mode]["digests"].items()} == want
    assert trained[mode]["launches"] == trained["late"]["launches"] > 0
    # Nothing in a step waits for the device, but for reading a loss.
    assert set(trained[mode]["prompt_ops"]) == {"aten::_local_scalar_dense"}


def test_work_waits_to_be_waited_for(late: dict[str, Any]) -> None:
    seen = late["lateness"]
    assert seen["at_rest"] == 0 and seen["after_item"] == 0
    assert 0 < seen["forward"] < seen["hook"] <= seen["backward"] == seen["after_another_stream"]
    assert seen["value"] == 64.0 and seen["gradient"] == [[32.0 / 4] * 4] * 4
    assert seen["own_thread"]


def test_a_missing_wait_shows(late: dict[str, Any]) -> None:
    seen = late["waits"]
    assert seen["none"] != [7.0] * 4
    assert {how: seen[how] for how in seen if how != "none"} == dict.fromkeys(
        ("stream", "event", "synchronize"), [7.0] * 4
    )


def test_memory_that_is_freed_too_early_shows(late: dict[str, Any]) -> None:
    # 8: read from the block's next owner.
    assert late["freed_early"] == {"recorded": [3.0] * 4, "forgotten": [8.0] * 4}


def test_copies_run_late(late: dict[str, Any]) -> None:
    seen = late["copies"]
    assert seen == {
        "to host, not waited for": [0.0] * 4,
        "to host, waited for": [5.0] * 4,
        "to host, blocking": [6.0] * 4,
        "from pageable memory": [1.0] * 4,
        "is_pinned": True,
        "from page-locked memory, too early": [9.0] * 4,
        "from page-locked memory, blocking": [9.0] * 4,
        "from page-locked memory that was freed": [8.0] * 4,
        "page-locked ranges left": 0,
    }


def test_events(late: dict[str, Any]) -> None:
    seen = late["events"]
    assert seen == {
        "never recorded": True,
        "queued": False,
        "waited for": True,
        "stream idle": True,
        "current inside": True,
        "current outside": False,
        "ids differ": True,
    }


def test_tensors_behave_as_on_the_cpu() -> None:
    assert child.run("same_as_cpu") == []


def test_what_scripts_use_beside_ops(late: dict[str, Any]) -> None:
    seen = late["features"]
    assert seen == {
        "checkpoint True": True,
        "checkpoint False": True,
        "autocast": ["torch.bfloat16", "torch.float32"],
        "saved and loaded": ["memdev:0", True],
        "attention by the math path": True,
        "default device": "memdev:0",
        "forked child": 0,
    }


def test_what_is_wrong_is_refused_when_it_is_called() -> None:
    seen = child.run("refusals")
    assert "mat1 and mat2 shapes cannot be multiplied" in seen["sizes"]
    for name in ("devices", "writes to the CPU"):
        assert "Expected all tensors to be on the same device" in seen[name]
    assert seen["memory"].startswith("OutOfMemoryError: memdev: out of memory")
    assert "without memory" in seen["released"]
    assert "storage" in seen["small storage"]
    assert seen["numpy"].startswith("TypeError")
    assert float(seen["after"]) == 32.0


def test_a_kernel_that_fails_late_ends_the_process() -> None:
    process = child.start("fails_late")
    output, _ = process.communicate(timeout=60)
    assert process.returncode < 0 and "launched" in output
    assert "aten::embedding failed when its stream reached it" in output or "aten::index_select failed" in output


def test_two_devices() -> None:
    seen = child.run("two_devices")
    assert seen == {"count": 2, "current inside": 1, "y": [7.0] * 4, "x": [0.0] * 4, "devices": [0, 1]}


def test_what_an_allocators_owner_builds_on(late: dict[str, Any]) -> None:
    seen = late["hooks"]
    assert seen["calls"] == seen["wanted"]
    assert seen["fresh"] == ["nan"] * 3
    assert seen["accelerator"] == "memdev"


@pytest.mark.ops
def test_operator_database() -> None:
    """A small share of it; all with MEMMGR_TEST_ALL_OPS=1."""
    count = 1 if os.environ.get("MEMMGR_TEST_ALL_OPS") == "1" else 64
    seen = child.run("sweep", module="memdev.ops", index=0, count=count, timeout=400)
    assert seen["wrong"] == []
    assert seen["compared"] > 0


def test_training_on_memory_of_the_core() -> None:
    """Two models on streams of their own share it; without the core's wait they overwrite each other."""
    late, random = (child.start("on_the_core", mode=mode, seed=1) for mode in ("late", "random"))
    want = child.finish(late)
    assert want["cross_reuses"] > 0 and want["driver_errors"] == 0 and want["wrong"] == ""
    assert child.finish(random) == want
    prompt = child.start("on_the_core", mode="prompt", seed=0)
    forgetful = child.start("on_the_core", mode="late", seed=1, leave_out="reuse.touched")
    assert child.finish(prompt) == want
    assert child.finish(forgetful)["digest"] != want["digest"]
