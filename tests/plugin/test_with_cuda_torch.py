"""The allocator and the pager inside a torch that was built with CUDA, on a double of the runtime and the driver.

Tensors, streams, autograd's device thread and copies are real; kernels do nothing, so values are not looked at.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import build

from memmgr.native import cuda

MIB = 1 << 20
MEMORY = 1 << 30
PROGRAMS = Path(__file__).with_name("programs.py")

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no CUDA"),
    pytest.mark.skipif(torch.version.cuda is not None and torch.cuda.device_count() > 0, reason="there is a GPU"),
    pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler"),
]


@functools.cache
def _doubles() -> tuple[Path, Path, Path]:
    """The driver, the runtime, and a folder with a libcuda.so.1."""
    driver, source = build.fake_driver(), Path(__file__).with_name("fake_runtime.cpp")
    headers = [f"-I{folder}" for folder in cuda.find_headers()]
    runtime = build.build(
        "fake_runtime", [source], [*headers, "-Wno-deprecated-declarations", "-Wno-cast-function-type"]
    )
    # It leans on the driver's double, which torch then finds under the name of the real one.
    lent = build.build("fake_libcuda", [source], ["-DFAKE_LIBCUDA", "-Wl,--no-as-needed", str(driver)])
    folder = build.FOLDER / "libcuda"
    folder.mkdir(exist_ok=True)
    link = folder / "libcuda.so.1"
    if not link.exists() or link.resolve() != lent:
        link.unlink(missing_ok=True)
        link.symlink_to(lent)
    return driver, runtime, folder


def _run(*words: str, **variables: str) -> Any:
    driver, runtime, folder = _doubles()
    clean = {k: v for k, v in os.environ.items() if k not in ("MEMMGR_INSTALL", "MEMMGR_BUDGET", "MEMMGR_CONF")}
    double = {"MEMMGR_DRIVER": str(driver), "LD_LIBRARY_PATH": str(folder), "FAKE_DRIVER_MEMORY": str(MEMORY)}
    triton = {"TRITON_LIBCUDA_PATH": str(folder), "TRITON_LIBCUDA": str(folder / "libcuda.so.1")}
    done = subprocess.run(
        [sys.executable, "-P", str(PROGRAMS), *words],
        env={**clean, **double, "LD_PRELOAD": f"{runtime} {folder / 'libcuda.so.1'}", **triton, **variables},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_question_is_answered() -> None:
    found = _run("answers")
    assert found["backend"] == "memmgr"
    assert found["allocated"] == [0, 4 * MIB, 4 * MIB, 4 * MIB]
    assert found["after"] == [0, 4 * MIB, 4 * MIB]
    assert found["emptied"] == [0, 0, 0]
    assert found["info"] == [MEMORY, MEMORY]
    assert found["summary"]
    texts, seen, failures = found["out_of_memory"]
    assert [text[:48] for text in texts] == [
        "CUDA out of memory. Tried to allocate 1024.00 Gi",
        "CUDA out of memory. Tried to allocate 512.00 MiB",
    ]
    assert "set_per_process_memory_fraction allows 102." in texts[1]
    assert seen == [[0, 1 << 40], [0, 512 * MIB]]
    assert failures == 2
    assert found["actions"] == ["alloc", "alloc", "free_requested", "free_completed"]
    assert "answers" in found["names"]  # this function, in the stack of the block that lives
    assert found["covered"]
    assert min(found["pages"]) > 1000
    assert found["pool"] == 1
    assert found["refused"] == ["memmgr:"] * 3


@pytest.mark.parametrize("memory", ["mapped", "plain"])
@pytest.mark.parametrize("mode", ["prompt", "random", "late"])
@pytest.mark.parametrize("policy, limit", [("auto", 40_000_000), ("offload", 48_000_000)])
def test_a_budget_is_kept(policy: str, limit: int, mode: str, memory: str) -> None:
    found = _run("budget", str(limit), policy, FAKE_DRIVER_MODE=mode, MEMMGR_CUDA_MEMORY=memory)
    assert found["need"] > 2 * limit
    assert found["peak"] == found["resident_bytes.peak"] <= limit
    assert found["offloads" if policy == "offload" else "evictions"] > 0
    assert found["error"].startswith("BudgetError: CUDA out of memory. Tried to allocate ")
    assert found["left"] == 0


def test_a_fraction_is_of_the_runtimes_total_where_that_is_larger() -> None:
    sizes = [str(n * MIB) for n in (400, 600)]
    assert _run("fraction", "0.25", *sizes, FAKE_RUNTIME_MEMORY=str(2 * MEMORY)) == [True, False]


def test_the_second_budget_of_a_process_maps_no_page() -> None:
    """The pages of the first stay as torch's own allocator keeps its own. A smaller budget and empty_cache give them back."""
    found = _run("reopened", "512000000")
    first, second = found["mapped"]
    assert first > 40 and second == 0
    kept, smaller, last = found["reserved"]
    assert kept == first * (2 * MIB)
    assert 0 < smaller <= 64_000_000 < kept
    assert last == found["left"] == 0


@pytest.mark.parametrize("mode", ["random", "late"])
@pytest.mark.parametrize("first, backend", [("memmgr", "memmgr"), ("cuda", "memmgr"), ("native", "native")])
def test_threads_with_streams_of_their_own(first: str, backend: str, mode: str) -> None:
    limit = 200 * MIB
    conf = "allocator:native" if first == "native" else ""
    found = _run("threads", str(limit), first, FAKE_DRIVER_MODE=mode, MEMMGR_CONF=conf)
    assert found["backend"] == backend
    assert found["errors"] == []
    assert found["offloads"] > 0
    assert max(found["resident_bytes.peak"], found["reserved"]) <= limit


def test_how_full_it_is_picks_no_kernels() -> None:
    include = Path(torch.__file__).parent / "include"
    folders = [part for folder in (include, *cuda.find_headers()) for part in ("-isystem", str(folder))]
    allocator = Path(torch.__file__).parent / "lib" / "libc10_cuda.so"
    library = build.build("cache_info", [Path(__file__).with_name("cache_info.cpp"), allocator], folders)
    assert _run("workspace", str(library), "40000000") == [MEMORY] * 4


@pytest.mark.parametrize("mode", ["prompt", "random", "late"])
@pytest.mark.parametrize("policy", ["auto", "offload"])
@pytest.mark.parametrize("allocator", ["memmgr", "native"])
def test_a_budget_that_opens_after_cuda_was_used(allocator: str, policy: str, mode: str) -> None:
    """torch's reserved memory, not only its allocated blocks, stays in the budget. Not with expandable segments: torch's own
    calls of the driver end in the double, with memmgr or without."""
    limit = 80 * MIB
    conf = "allocator:native" if allocator == "native" else ""
    found = _run("late", str(limit), policy, allocator, FAKE_DRIVER_MODE=mode, MEMMGR_CONF=conf)
    assert found["backend"] == allocator
    assert found["need"] > limit * 1.3
    assert found["peaks"][0] <= found["peaks"][1] <= limit
    assert found["resident_bytes.peak"] <= limit
    assert found["reserved"][0] <= limit and found["reserved"][1] == 0
    assert found["offloads" if policy == "offload" else "evictions"] > 0
    assert found["same"]
    assert found["error"].startswith("BudgetError: CUDA out of memory. Tried to allocate ")
    assert found["fractions"] == [0.5, 0.5]
    assert found["left"] == 0


@pytest.mark.parametrize("mode", ["random", "late"])
def test_tensors_from_before_memmgrs_allocator_page_if_nobody_else_has_them(mode: str) -> None:
    found = _run("taken_over", "80000000", FAKE_DRIVER_MODE=mode)
    assert found["cached"]
    movable = dict.fromkeys(("plain", "viewed", "leaf", "grad"), True)
    assert found["left"] == movable | {"shared": False, "saved": False, "given": False}
    assert found["named"]
    assert found["values"] == {
        "plain": 1,
        "viewed": 3,
        "view": 3,
        "leaf": 5,
        "grad": 6,
        "shared": 9,
        "alias": 9,
        "saved": 4,
        "given": 8,
    }
    before, after = found["outside"]
    assert 2 <= before <= 11 and after == 0  # blocks of 4 MiB share segments of 20 MiB
    assert found["counted"] == 4
    assert found["offloads"] > 0 and found["resident_bytes.peak"] <= found["budget_bytes"]


def test_tensors_stay_torchs_if_another_thread_is_in_a_backward_while_memmgr_takes_over() -> None:
    assert _run("taken_over_beside_a_backward", "80000000") is False


def test_what_torchs_own_allocator_began_goes_on_after_the_takeover() -> None:
    found = _run("taken_over_in_use", "200000000")
    assert found["grown"] == [False, False]  # beyond the budget
    assert (found["values"], found["overlaps"]) == ([0, 1, 2, 3], [False] * 4)  # the pool of the graph that lives stays
    assert found["said"] == []  # nothing that a capture forbids


def test_addresses_from_before_a_budget_stay() -> None:
    found = _run("before", "100000000")
    assert found["taken"] == [False, True, True, False, False]
    (warned,) = found["warned"]
    assert warned.startswith("memmgr: a graph was captured before the budget opened")


@pytest.mark.parametrize("allocator, limit", [("memmgr", 60_000_000), ("native", 120_000_000)])
def test_a_graph_inside_a_budget(allocator: str, limit: int) -> None:
    found = _run("graphs", str(limit), MEMMGR_CONF=f"allocator:{allocator}" if allocator == "native" else "")
    assert found["backend"] == allocator
    assert found["violations"] == 0 and found["left in the capture"] == 0
    assert found["right"] == [True] * 6
    assert found["error"].startswith("CUDA out of memory. ")
    assert found["evictions"] + found["offloads"] > 0
    assert found["resident_bytes.peak"] <= found["budget_bytes"]


def test_what_draws_is_made_again_and_a_failed_kernel_is_told() -> None:
    found = _run("draws", "100000000")
    errors = found.pop("errors")
    for name, seen in found.items():
        assert seen.pop("again") > 0, name
        assert seen == {"recipe": True, "taken": True, "drew": True, "same": True, "seed": 5}, name
    assert len(errors) == 2
    for kind, text in errors:
        assert kind != "OutOfMemoryError" and "an illegal memory access was encountered" in text, (kind, text)


@pytest.mark.parametrize("budget", ["40MB", "4%"])
def test_a_script_that_knows_nothing_is_managed(budget: str) -> None:
    """CUDA is not initialised for it: the script may still choose a device, and fork."""
    found = _run("environment", MEMMGR_BUDGET=budget, MEMMGR_CONF="quiet:1")
    assert not found["initialised"]
    assert found["budget_bytes"] == (40_000_000 if budget == "40MB" else int(MEMORY * 0.04))
    assert found["peak"] <= found["budget_bytes"]
    assert found["evictions"] > 0


@pytest.mark.parametrize("asks", [{"MEMMGR_CONF": "allocator:native,quiet:1"}, {"MEMMGR_INSTALL": "0"}])
def test_a_script_may_keep_torchs_own_allocator(asks: dict[str, str]) -> None:
    found = _run("environment", MEMMGR_BUDGET="80MB", **asks)
    assert found["backend"] == "native"
    assert not found["initialised"]
    assert found["peak"] <= found["budget_bytes"] == 80_000_000
    assert found["evictions"] > 0


def test_launches_of_a_compiled_training_are_ops() -> None:
    """With the kernels that Triton compiles, and torch's own launcher of them."""
    pytest.importorskip("triton")
    found = _run("compiled")
    assert found["plain"] > 20
    assert found["free"][-1] == found["plain"]
    assert found["trials"] > 2  # kernels of the forward have run again
    assert found["escaped_bytes"] == 0  # the launcher's addresses were not handed out for good
    assert found["floor_bytes"] > 0
