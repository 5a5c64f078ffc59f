"""The test device itself: it computes the results of the CPU, late, and a missing wait shows."""

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


def test_autocast_lowers_products_alone(late: dict[str, Any]) -> None:
    assert late["autocast"] == ["torch.bfloat16", "torch.float32"]


def test_tensors_behave_as_on_the_cpu() -> None:
    assert child.run("same_as_cpu") == []
