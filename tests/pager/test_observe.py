"""Figures of the pager: counted once; passes; errors; causes of evictions."""

import json
import sys
import time
from pathlib import Path

import forkserver
import pytest
import torch
import torch.utils.checkpoint
from budget.in_backward import in_backward
from budget.there import bytes_already_there

import memmgr
from memmgr.native import binding

MB = 1_000_000


def _deep(layers: int = 12, rows: int = 2048) -> torch.Tensor:
    x = torch.rand(rows, 256, requires_grad=True)
    y = x
    for _ in range(layers):
        y = y.sin().exp()
    return y.sum()


@pytest.mark.parametrize("policy", ["evict", "offload", "auto"])
def test_a_wait_is_counted_once(policy: str) -> None:
    """Reading back waits for room, and making again does: the sum of all waits is no more than the time there was."""
    with memmgr.budget(16 * MB, policy=policy, quiet=True) as mm:
        begun = time.perf_counter()
        _deep(rows=2048).backward()
        wall = time.perf_counter() - begun
    stats = mm.stats()
    assert stats["evictions"] + stats["offloads"] > 0
    assert 0 < stats["stall_seconds"] + stats["recompute_seconds"] < wall
    assert (stats["recompute_seconds"] > 0) == (stats["recomputes"] > 0)


def test_a_pass_is_an_outermost_backward() -> None:
    def runs_another(grad: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = torch.ones_like(grad, requires_grad=True)
            x.sin().sum().backward()
        return grad

    with memmgr.budget(None, quiet=True) as mm:
        for _ in range(3):
            in_backward(runs_another)(torch.ones(1000, requires_grad=True)).sum().backward()
    assert mm.stats()["passes"] == 3


@pytest.mark.parametrize("enough", [True, False])
def test_what_was_there_counts_once_however_often_a_budget_opens(enough: bool) -> None:
    """Small tensors and large ones that were made before; a budget that cannot be opened leaves nothing behind either."""
    small = [torch.ones(64) for _ in range(300)]
    large = [torch.ones(MB) for _ in range(2)]

    def there() -> int:
        with memmgr.budget(64 * MB, policy="evict", quiet=True) as mm:
            return int(mm.stats()["resident_bytes.current"])

    first = there()
    for _ in range(3):
        if enough:
            assert there() == first
        else:
            with pytest.raises(memmgr.BudgetError), memmgr.budget(4 * MB, policy="evict", quiet=True):
                pass
    assert first >= len(small) * 256 + len(large) * 4 * MB
    assert there() == first


@pytest.mark.parametrize("reentrant", [False, True])
def test_ones_own_checkpointing_is_timed(reentrant: bool) -> None:
    def part(x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp().tanh()

    before = torch.enable_grad.__enter__
    with memmgr.budget(None, quiet=True) as mm:
        assert torch.enable_grad.__enter__ is not before
        x = torch.ones(300_000, requires_grad=True)
        part(x).sum().backward()
        assert mm.stats()["checkpoint_seconds"] == 0
        torch.utils.checkpoint.checkpoint(part, x, use_reentrant=reentrant).sum().backward()
    stats = mm.stats()
    assert 0 < stats["checkpoint_seconds"] < stats["watched_seconds"]
    assert torch.enable_grad.__enter__ is before, "the patch outlives the budget"


def test_what_was_refused_and_then_fitted_is_no_floor() -> None:
    """An op that is new runs a second time if there is room: that there was none says nothing about the smallest budget."""
    limit = 10 * MB
    with memmgr.budget(limit, quiet=True) as mm:
        torch.ones(MB, requires_grad=True).exp()
    assert 8 * MB <= mm.stats()["floor_bytes"] <= limit


def test_outputs_are_counted_once_in_the_floor() -> None:
    there = bytes_already_there()
    with memmgr.budget(None, quiet=True) as mm, torch.no_grad():
        x = torch.ones(1_000_000)
        x.exp()
    assert 8 * MB <= mm.stats()["floor_bytes"] < 8.4 * MB + there


def test_with_a_tier_states_are_no_part_of_the_floor() -> None:
    """They can leave, so a budget that they do not fit into may do."""
    there = bytes_already_there()
    with pytest.raises(memmgr.BudgetError) as caught, memmgr.budget(12 * MB + there, quiet=True):
        kept = torch.nn.ModuleList(torch.nn.Linear(1000, 1000) for _ in range(6))
        torch.ones(5 * MB)
    assert kept is not None
    error = caught.value
    assert 20 * MB <= error.floor_bytes < 22 * MB + there and "parameters" in str(error)


def test_a_failed_opening_can_be_followed_by_another(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    opening = memmgr.budget("1GB", disk=str(tmp_path / "gone"), quiet=True)
    (tmp_path / "gone").rmdir()
    with pytest.raises(OSError, match="cannot open a tier file"):
        opening.__enter__()
    held = [torch.ones(MB) for _ in range(4)]
    with pytest.raises(memmgr.BudgetError, match="on the device already"):
        memmgr.budget(4 * MB, disk=False, quiet=True, log=tmp_path / "run.jsonl").__enter__()
    with memmgr.budget(None, quiet=True) as mm:
        held[0].add_(1)
    assert mm.stats()["outside_bytes"] >= 16 * MB


def test_small_tensors_that_were_there_count(tmp_path: Path) -> None:
    before = [torch.ones(100) for _ in range(50)]
    with memmgr.budget(None, quiet=True) as mm:
        there = mm.stats()["outside_bytes"]
        assert there >= 50 * 400
        before.clear()
        assert mm.stats()["outside_bytes"] <= there - 50 * 400


@pytest.mark.usefixtures("large_only")
def test_escapes_are_flat_and_named(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    with memmgr.budget(None, quiet=True, log=log) as mm:
        t = torch.ones(MB)
        array = t.numpy()
        stats = mm.stats()
        assert stats["escapes"] == 1 and stats["escaped_bytes"] >= 4 * MB
        assert any(name.startswith("escapes.") and "test_observe.py:" in name for name in stats), stats.keys()
    assert array[0] == 1
    assert all(type(value) in (int, float) for value in mm.stats().values())
    end = json.loads(log.read_text().splitlines()[-1])
    assert end["type"] == "end" and end["stats"] == mm.stats()


def test_a_read_ahead_is_told_with_the_time_that_it_was_waited_for(tmp_path: Path) -> None:
    native = binding.load()
    with memmgr.budget("64MB", policy="offload", quiet=True, log=tmp_path / "run.jsonl", _throttle=100 * MB) as mm:
        x = torch.rand(2 * MB)
        assert native.take_away(x, 1) > 0
        assert native.read_ahead(x)
        x.add_(1)  # 80 ms later, or a little less
    assert mm.stats()["reads_ahead"] == mm.stats()["late_reads"] == 1
    events = [
        item
        for line in map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
        if line["type"] == "events"
        for item in line["items"]
        if item["what"] in ("reload", "stall")
    ]
    assert sum(i["bytes"] for i in events if i["what"] == "reload") >= x.nbytes
    assert sum(i["seconds"] for i in events) == pytest.approx(mm.stats()["stall_seconds"], abs=1e-6)
    assert mm.stats()["stall_seconds"] > 0.01


def described(tensor: torch.Tensor) -> tuple[str, int]:
    info = binding.load().describe(tensor)
    assert info is not None
    return info["evicted_for"], info["evicted_in_pass"]


@pytest.mark.parametrize(("policy", "causes"), [("offload", {"none", "request"}), ("torture", {"after_op"})])
def test_malloc_and_torture_record_their_evictions(policy: str, causes: set[str]) -> None:
    with memmgr.budget("4MiB", policy=policy, quiet=True):
        tensors = [torch.randn(1 << 18) for _ in range(6)]
        assert {described(t)[0] for t in tensors} == causes


def test_an_eviction_by_name_records_the_pass() -> None:
    native = binding.load()
    with memmgr.budget("64MiB", policy="offload", quiet=True):
        weight = torch.ones(1 << 18, requires_grad=True)
        x = torch.randn(1 << 18)
        assert described(x) == ("none", 0)
        passes = []
        for _ in range(2):
            assert native.take_away(x) > 0
            passes.append(described(x)[1])
            (weight * x).sum().backward()
        assert described(x)[0] == "by_name"
        assert passes[1] == passes[0] + 1


OWN_TIME = """
import torch, memmgr
from memmgr.native import binding
pager, x = binding.load(), torch.randn(1 << 16)
with memmgr.budget("1GB", device="cpu", quiet=True):
    for ticks, measured in ((3000, 20), (30_000_000, 1)):
        before = pager.stats()["own_ns"]
        pager.count_ticks(ticks)
        for _ in range(64 * measured):
            x.add_(1)
        pager.count_ticks(0)
        print(1e-9 * (pager.stats()["own_ns"] - before))
"""


def test_own_time_of_a_thread_that_did_not_run_counts_once() -> None:
    """The pager measures one op in 64 and counts it for all. Here each look at the clock takes a microsecond, or ten
    milliseconds. In a process of its own, because the pager learns how long an op takes."""
    done = forkserver.run([sys.executable, "-P", "-c", OWN_TIME], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    short, long = map(float, done.stdout.split())
    assert 64 * 20 * 5e-7 < short < 64 * 20 * 1e-4
    assert 5e-3 < long < 0.3  # and not 64 times as much
