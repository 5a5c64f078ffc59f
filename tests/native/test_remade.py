"""What is run again: by whom, into whose bytes, with how much room."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch

from memmgr import _budget

from .shim import EVICT, MIB, PRESENT, opened, saved


def test_what_nobody_saved_counts_as_run_again() -> None:
    """It is there as long as the program has it. Once that lets go, what was made from it cannot be made without it."""
    with opened("1GB") as native:
        x = torch.randn(512, 512, requires_grad=True)
        for _ in range(3):  # the kinds prove themselves
            y = x * 2.0  # saves nothing
            z = y.exp()  # saves its result
            loss = z.sum()
            cell = max((c for c in saved(native) if c.nbytes == x.nbytes), key=lambda c: c.seq)
            del z

        def chain() -> tuple[float, float]:
            cells, *buffers = native.columns()
            at = next(i for i, c in enumerate(cells) if c is cell)
            return tuple(torch.frombuffer(buffers[k], dtype=torch.float64)[at].item() for k in (3, 4))

        made_y = cell.recipe.inputs[0].recipe
        assert cell.recipe.inputs[0].present and made_y.cost > 0
        assert made_y.inputs[0].recipe is not None  # x can be made again, but is the program's own
        assert chain() == (made_y.cost, made_y.cost)
        w = y.sin()  # saves y
        assert chain() == (0.0, 0.0)
        del loss, w, y


def test_a_recipe_that_is_cut_while_its_copy_ends_is_not_counted_on() -> None:
    """To evict, a write that is under way is waited for without the lock. What nothing can make again is not dropped then."""
    root = torch.arange(MIB / 4)
    with opened(_throttle=4_000_000) as native:
        native.handle(root * 2.0)  # the kind proves itself
        for _ in range(20):
            handle = native.handle(root * 2.0)
            cell = handle.cell
            written = native.tier_stats()["written_bytes"]
            assert native.write_back(cell)
            while native.tier_stats()["written_bytes"] == written:  # what has not begun is not waited for
                time.sleep(0.001)
            thread = threading.Thread(target=native.release, args=(cell, EVICT))
            thread.start()
            while cell.slot >= 0:  # the thread has taken it, and waits
                time.sleep(0.001)
            caught = cell.gone == PRESENT  # else this thread came too late
            if caught:
                native.drop_recipe(cell)
            thread.join()
            assert torch.equal(native.unpack(handle), root * 2.0)
            if caught:
                break
        assert caught


class Counting:
    """A native that counts the private copies made of it."""

    def __init__(self, native: Any) -> None:
        self.native, self.copies, self.taken = native, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def clone_storage(self, cell: Any) -> Any:
        self.copies += 1
        return self.native.clone_storage(cell)

    def take(self, cell: Any, tensor: torch.Tensor) -> Any:
        own = self.native.take(cell, tensor)
        self.taken += own is not None
        return own


def test_only_what_one_tensor_has_alone_is_taken() -> None:
    with opened() as native:
        base = torch.randn(100)

        def cell_and_tensor() -> tuple[Any, torch.Tensor]:
            made = base * 2.0
            cell = native.find(made)
            assert cell is not None and cell.recipe is not None and cell.present
            return cell, made

        cell, made = cell_and_tensor()
        alias = made.view(10, 10)
        assert native.take(cell, made) is None and cell.present, "somebody else reads those bytes"
        del alias
        handle = native.handle(made)
        assert native.take(cell, made) is None and cell.present, "autograd wants them"
        del handle
        gc.collect()
        assert native.take(cell, base) is None, "other bytes"
        assert native.take(cell, made) is made and not cell.present
        assert native.find(made) is None, "the cell is found by bytes that are no longer its own"
        assert native.misplaced() == 0


def test_a_write_on_the_way_needs_no_copy() -> None:
    with opened(policy="evict") as native:
        manager = _budget.current()
        assert manager is not None
        x = torch.randn(256, 256, requires_grad=True)

        def forward() -> tuple[torch.Tensor, torch.Tensor]:
            torch.manual_seed(1)
            mask = torch.empty_like(x).uniform_().div_(0.8)
            return (x * mask).sum(), mask.detach().clone()

        for _ in range(2):  # the kinds prove themselves
            loss, want = forward()
        assert all(native.release(cell, EVICT) for cell in saved(native))
        manager.replayer._native = counting = Counting(native)
        loss.backward()
        assert x.grad is not None and torch.equal(x.grad, want)
        assert (counting.copies, counting.taken) == (0, 1)


def test_what_others_read_is_copied_before_a_write() -> None:
    with opened(policy="evict") as native:
        manager = _budget.current()
        assert manager is not None
        x, y = (torch.randn(256, 256, requires_grad=True) for _ in range(2))
        base = torch.randn(256, 256)

        def forward() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            first = base * 2.0  # saved before it is written, so that its version is wanted as well
            loss = (x * first.clone()).sum()
            second = first + 0.0
            loss = loss + (y * second.mul_(first)).sum()
            return loss, base * 2.0, base * 2.0 * (base * 2.0)

        for _ in range(2):
            loss, want_x, want_y = forward()
        assert all(native.release(cell, EVICT) for cell in saved(native))
        manager.replayer._native = counting = Counting(native)
        loss.backward()
        assert x.grad is not None and y.grad is not None
        assert torch.equal(x.grad, want_x) and torch.equal(y.grad, want_y)
        assert counting.copies + counting.taken == 1


def test_random_bytes_that_came_back_may_leave_again() -> None:
    with opened(policy="evict") as native:
        x = torch.randn(256, 256, requires_grad=True)
        for _ in range(2):
            loss = (x * torch.empty_like(x).uniform_()).sum()
        (cell,) = saved(native)
        for _ in range(2):
            assert native.release(cell, EVICT) and not cell.present
            loss.backward(retain_graph=True)
            assert cell.present


def two_chains(base: torch.Tensor, n: int) -> torch.Tensor:
    """n numbers, whose two factors are made from twice as many each."""

    def factor(scale: float) -> torch.Tensor:
        wide = base * scale
        return wide[:n] + wide[n:]

    return factor(2.0) * factor(3.0)


def chains_dropped(native: Any, base: torch.Tensor, room: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, loss, x's gradient): the product of two chains is gone, and there is room for `room` tensors of its size."""
    n = base.numel() // 2
    x = torch.randn(n, requires_grad=True)
    for _ in range(2):
        loss = (x * two_chains(base, n)).sum()
    want = two_chains(base, n)
    (cell,) = [c for c in saved(native) if c.nbytes == 4 * n]
    assert native.release(cell, EVICT) and cell.slot < 0
    gc.collect()
    native.set_budget(native.resident() + int(room * 4 * n))
    return x, loss, want


def test_what_was_made_on_the_way_waits_below() -> None:
    # One factor beside the making of the other takes four tensors; the product of both takes three.
    base = torch.randn(MIB // 2)
    with opened() as native:
        x, loss, want = chains_dropped(native, base, 3.4)
        before = native.counters()
        loss.backward()
        native.set_budget(1000 * MIB)
        assert x.grad is not None and torch.equal(x.grad, want)
        after = native.counters()
        assert after["offloads"] == before["offloads"] + 1 and after["reloads"] == before["reloads"] + 1
        assert after["floor_bytes"] == before["floor_bytes"], "the run did without what was refused"
        del loss
        gc.collect()
        assert not saved(native) and native.tier_stats()["used_bytes"] == 0, "what waited there is over"


@pytest.mark.parametrize(("policy", "room"), [("evict", 3.4), ("auto", 2.4)])
def test_a_recomputation_without_room_is_an_error_that_names_the_floor(policy: str, room: float) -> None:
    base = torch.randn(MIB // 2)
    with opened(policy=policy) as native:
        _, loss, _ = chains_dropped(native, base, room)
        before = native.counters()["floor_bytes"]
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        native.set_budget(1000 * MIB)
        assert native.counters()["floor_bytes"] > before
        del loss


def test_near_the_floor_what_needs_room_is_offloaded() -> None:
    """What making a cell takes at once has to be there beside the floor, or the cell leaves by a copy."""
    n = MIB // 4
    base = torch.randn(2 * n)
    with opened() as native:
        x = torch.randn(n, requires_grad=True)
        for _ in range(2):
            loss = (x * two_chains(base, n)).sum()
        (cell,) = [c for c in saved(native) if c.nbytes == 4 * n]
        held = torch.empty(64 * MIB, dtype=torch.uint8)
        x.detach() * 1.0  # something is allocated beside it: the floor is known
        floor = native.counters()["floor_bytes"]
        assert floor >= 64 * MIB
        # The widest op of its chain reads what is there anyway and makes two tensors, the next reads those and makes one.
        for room, evicts in ((2.1, True), (1.9, False)):
            native.set_budget(floor + int(room * 4 * n))
            columns = native.columns()
            assert bool(columns[6][columns[0].index(cell)]) is evicts
        assert native.release(cell, EVICT) and cell.slot >= 0, "dropped without room to make it again"
        del held
        loss.backward()
