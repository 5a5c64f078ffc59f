"""The shim's vault and cells by themselves: how bytes leave and come back, and what must not go wrong on the way."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memmgr

from .shim import native

EVICT, OFFLOAD = 1, 2
GONE_EVICTED, GONE_OFFLOADED = 1, 2


@pytest.fixture
def opened() -> Iterator[Any]:
    with memmgr.budget("1GB", policy="keep", quiet=True, verify=True):
        yield native()


@pytest.fixture
def slow_disk() -> Iterator[Any]:
    with memmgr.budget("1GB", policy="keep", quiet=True, verify=True, _throttle=4_000_000):
        yield native()


def saved(n: Any, size: int = 1 << 20) -> tuple[Any, torch.Tensor]:
    """A handle on bytes that nobody else holds, made by a recorded op, and what they should be."""
    with torch.no_grad():  # not recorded, so a root
        x = torch.arange(size // 4, dtype=torch.float32)
    made = x * 2
    handle = n.handle(made)
    expected = made.clone()
    root = x  # the recipe's input lives in this frame until here
    handle_root.append(root)
    return handle, expected


handle_root: list[torch.Tensor] = []


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    handle_root.clear()


@pytest.mark.parametrize("action", [EVICT, OFFLOAD])
def test_bytes_leave_and_come_back(opened: Any, action: int) -> None:
    handle, expected = saved(opened)
    cell = handle.cell
    before = opened.resident()
    assert cell.ours_alone
    assert opened.release(cell, action)
    assert not cell.present
    assert cell.gone == (GONE_EVICTED if action == EVICT else GONE_OFFLOADED)
    assert opened.resident() <= before - cell.nbytes
    assert torch.equal(opened.unpack(handle), expected)


def test_what_the_program_holds_stays(opened: Any) -> None:
    held = torch.ones(1 << 18) * 3
    handle = opened.handle(held)
    assert not opened.release(handle.cell, EVICT)
    assert not opened.release(handle.cell, OFFLOAD)
    assert torch.equal(opened.unpack(handle), held)


def test_a_storage_object_held_by_the_program_stays(opened: Any) -> None:
    held = torch.ones(1 << 18) * 3
    handle = opened.handle(held)
    storage = held.untyped_storage()
    del held
    assert not opened.release(handle.cell, OFFLOAD)
    assert storage.nbytes() == 1 << 20


@pytest.mark.parametrize("how", ["a tensor", "a storage object", "a view", "numpy"])
def test_no_copy_is_taken_early_of_what_somebody_could_write(opened: Any, how: str) -> None:
    """Else it would count as clean, and a raw write after it would be lost."""
    held: Any = torch.ones(1 << 18) * 3
    handle = opened.handle(held)
    array = held.numpy() if how == "numpy" else None
    held = {"a storage object": held.untyped_storage(), "a view": held[7:9], "numpy": None}.get(how, held)
    assert not opened.write_back(handle.cell)
    assert handle.cell.slot < 0
    if array is not None:
        array[:] = 5.0
    elif how == "a storage object":
        torch.empty(0).set_(held).fill_(5.0)
    else:
        (ctypes.c_float * 2).from_address(held.data_ptr())[:] = [5.0, 5.0]
    del held, array
    opened.release(handle.cell, OFFLOAD)
    got = opened.unpack(handle)
    first = 7 if how == "a view" else 0
    assert got[first : first + 2].tolist() == [5.0, 5.0]


def test_evicting_takes_an_unfinished_copy_with_it(slow_disk: Any) -> None:
    """The copy that was under way is of bytes that are gone: it must never count as clean later."""
    n = slow_disk
    handle, expected = saved(n)
    cell = handle.cell
    assert n.write_back(cell)
    assert cell.slot >= 0
    assert n.release(cell, EVICT)
    assert cell.gone == GONE_EVICTED
    assert cell.slot < 0
    assert torch.equal(n.unpack(handle), expected)


def test_offloading_waits_for_the_copy_that_is_under_way(slow_disk: Any) -> None:
    n = slow_disk
    handle, expected = saved(n)
    assert n.write_back(handle.cell)
    assert n.release(handle.cell, OFFLOAD)
    assert handle.cell.gone == GONE_OFFLOADED
    assert n.counters()["offloads"] == 1  # one copy, not two
    assert torch.equal(n.unpack(handle), expected)


def test_a_prefetched_cell_is_whole_again_and_can_leave_again(opened: Any) -> None:
    """A moved-from DataPtr keeps its address: what was prefetched once must not be found as prefetched again."""
    n = opened
    handle, expected = saved(n)
    cell = handle.cell
    for _ in range(3):
        assert n.release(cell, OFFLOAD)
        assert n.prefetch(cell, 0) == 1
        assert cell.arriving
        assert not n.bring_back(cell)
        assert cell.present
        assert not cell.arriving
        assert n.release(cell, OFFLOAD)
        assert not n.bring_back(cell)
    assert torch.equal(n.unpack(handle), expected)
    assert n.counters()["prefetch_hits"] == 3


def test_a_prefetch_gives_way_to_a_request() -> None:
    with memmgr.budget("40MB", policy="keep", quiet=True, verify=True):
        n = native()
        n.set_options(False, True, True, 0)
        handle, expected = saved(n, 8 << 20)
        handle_root.clear()
        assert n.release(handle.cell, OFFLOAD)
        n.lose(handle.cell.recipe.inputs[0])
        assert n.prefetch(handle.cell, 0) == 1
        room = 40_000_000 - n.resident()
        big = torch.empty(room + (4 << 20), dtype=torch.uint8)
        assert not handle.cell.arriving
        assert n.counters()["prefetch_cancels"] == 1
        del big
        assert torch.equal(n.unpack(handle), expected)


def test_a_copy_is_given_up_when_the_bytes_are_handed_out(opened: Any) -> None:
    """Whoever has the bytes could write to them, unseen: from then on the copy below is not clean."""
    handle, _ = saved(opened)
    assert opened.write_back(handle.cell)
    tensor = opened.unpack(handle)
    assert handle.cell.slot < 0
    del tensor


def test_a_modified_saved_tensor_is_autograds_error(opened: Any) -> None:
    x = torch.ones(8)
    handle = opened.handle(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        opened.unpack(handle)


def test_a_write_through_data_is_read_as_in_torch(opened: Any) -> None:
    """`.data` has a version counter of its own: autograd does not notice, and reads the new bytes."""
    x = torch.ones(8)
    handle = opened.handle(x)
    x.data.add_(1)
    assert torch.equal(opened.unpack(handle), torch.full((8,), 2.0))


def test_a_lost_root_makes_its_dependants_offload_only(opened: Any) -> None:
    handle, expected = saved(opened)
    recipe = handle.cell.recipe
    assert recipe is not None and recipe.ok
    root = recipe.inputs[0]
    del recipe
    handle_root.clear()
    opened.lose(root)
    assert handle.cell.recipe is None
    assert opened.release(handle.cell, EVICT)
    assert handle.cell.gone == GONE_OFFLOADED
    assert torch.equal(opened.unpack(handle), expected)


def test_overwriting_a_root_would_strand_what_was_dropped(opened: Any) -> None:
    handle, expected = saved(opened)
    root = handle_root[-1]
    assert opened.would_strand(root) == []
    assert opened.release(handle.cell, EVICT)
    assert opened.would_strand(root) == [handle.cell]
    root.mul_(0)  # seen by the mode: the dropped cell is made again first
    assert handle.cell.present
    assert torch.equal(opened.unpack(handle), expected)


def test_a_failed_write_loses_nothing(opened: Any) -> None:
    handle, expected = saved(opened)
    opened.set_options(False, True, True, 0)
    opened.tier_inject(5, 1, 0, 0)
    assert not opened.release(handle.cell, OFFLOAD)
    assert handle.cell.present
    assert torch.equal(opened.unpack(handle), expected)


def test_a_failed_read_is_recomputed_where_it_can_be(opened: Any) -> None:
    handle, expected = saved(opened)
    assert opened.release(handle.cell, OFFLOAD)
    opened.tier_inject(0, 0, 5, 1)
    assert torch.equal(opened.unpack(handle), expected)


def test_a_failed_read_without_a_recipe_is_a_clear_error(opened: Any) -> None:
    handle, _ = saved(opened)
    opened.drop_recipe(handle.cell)
    assert opened.release(handle.cell, OFFLOAD)
    opened.tier_inject(0, 0, 5, 1)
    with pytest.raises(OSError, match="disk tier"):
        opened.unpack(handle)


def test_the_address_of_a_storage_that_died_is_anothers(opened: Any) -> None:
    """What nobody saved dies with the program's tensor; made again for what needs it, it lives in another storage."""
    w = torch.full((16,), 5.0, requires_grad=True)
    x = torch.ones(16)
    others: list[Any] = []
    for _ in range(20):  # the system's allocator gives the address out again as it likes
        between = x + 1
        address = between.untyped_storage()._cdata
        cell = opened.find(between)
        others.append(between * 2)  # its recipe names the cell
        del between
        assert not cell.present and cell.handles == 0
        with torch.no_grad():
            again = x + 1
        opened.fill(cell, again)  # as a replay does on its way to what it is after
        assert cell.present
        assert opened.misplaced() == 0
        made = [w * 3 for _ in range(50)]
        for q in made:
            if q.untyped_storage()._cdata == address:
                assert opened.find(q) is not cell
                (q * q).sum().backward()  # the product saves q
                assert w.grad is not None and torch.equal(w.grad, torch.full_like(w, 2 * 15 * 3))
                return
        others += [cell, again, *made]


def test_long_chains_die_without_recursion(opened: Any) -> None:
    x = torch.ones(16, requires_grad=True)
    y = x
    for _ in range(20_000):
        y = y + 1
    y.sum().backward()
    del y
    opened.end_pass()
    assert opened.handled() == []


def test_the_cost_of_a_kind_follows_its_calls(opened: Any) -> None:
    """About their median: neither the first call, which compiles, nor one that only stalled decides what is cheap."""
    handle, _ = saved(opened)
    recipe = handle.cell.recipe
    before = recipe.cost
    assert before > 0
    least = recipe.cost = before / 4
    assert recipe.cost == pytest.approx(least)
    recipe.cost = 0.0
    assert recipe.cost == pytest.approx(least)
    recipe.cost = 1000 * before
    assert recipe.cost == pytest.approx(1.05 * least)
    for _ in range(100):
        recipe.cost = before
    assert recipe.cost == pytest.approx(before, rel=0.06)


@pytest.mark.parametrize("recomputing", [False, True])
def test_what_found_no_room_names_a_larger_budget(recomputing: bool) -> None:
    """Also when it was a recomputation, once it gives up: that ends the run, whatever could have been offloaded instead."""
    with memmgr.budget("4MB", policy="keep", quiet=True):
        n = native()
        before = n.set_recomputing(recomputing)
        try:
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(8_000_000, dtype=torch.uint8)
        finally:
            n.set_recomputing(before)
        if recomputing:
            assert n.counters()["floor_bytes"] <= 4_000_000, "it may find another way"
            n.refused()
        assert n.counters()["floor_bytes"] > 4_000_000


@pytest.mark.parametrize("how", ["first use", "known kind", "no grad"])
def test_what_was_had_in_the_end_is_no_floor(how: str) -> None:
    """The first try finds no room, garbage goes, the second one fits: no larger budget was needed."""
    gc.collect()
    with memmgr.budget(None, quiet=True):
        there = native().resident()
    limit = there + 8_000_000
    with memmgr.budget(limit, policy="keep", quiet=True) as mm, torch.set_grad_enabled(how != "no grad"):
        native().forget_kinds()
        if how == "known kind":
            torch.zeros(2_500_000, dtype=torch.uint8)
        gc.disable()
        try:
            cycle: list[Any] = [torch.empty(6_000_000, dtype=torch.uint8)]
            cycle.append(cycle)
            del cycle
            kept = torch.zeros(2_500_000, dtype=torch.uint8)
        finally:
            gc.enable()
        assert mm.stats()["floor_bytes"] <= limit
        assert kept.nbytes == 2_500_000


def test_a_tier_that_goes_takes_its_count_along(opened: Any) -> None:
    handle, _ = saved(opened)
    assert opened.release(handle.cell, OFFLOAD)
    assert opened.counters()["offloaded_bytes"] == handle.cell.nbytes
    opened.close_tier()
    assert opened.counters()["offloaded_bytes"] == 0


def test_a_pass_leaves_no_recipes(opened: Any) -> None:
    w = torch.ones(64, requires_grad=True)
    state = torch.zeros(64)
    sizes = []
    for _ in range(30):
        out = torch.tanh(state * w)
        out.sum().backward()
        state = out.detach()
        sizes.append(opened.table_size()[0])
    assert max(sizes[5:]) <= sizes[4] + 2
