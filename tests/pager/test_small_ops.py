"""Ops whose tensors are all small: the most frequent ones have kernels with types, and these keep the rules as well."""

from collections.abc import Callable

import pytest
import torch
from budget.there import bytes_already_there
from torch import nn

import memmgr
from memmgr.config.sizes import round_up, show_size
from memmgr.native import binding as native

from .planned import settled

MB = 10**6
# Calls that make 4 MB of small tensors.
LARGE_RESULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "aten::add": lambda x: x + x.t(),
    "aten::mm": lambda x: x @ x.t(),
    "aten::cat": lambda x: torch.cat([x] * 1000),
}


def test_typed_kernels_are_those_of_their_ops() -> None:
    native.load()
    for name in ("add.Tensor", "mul_.Tensor", "mm", "t", "view", "cat", "sigmoid_backward", "unsafe_split.Tensor"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Fake"), name


@pytest.mark.parametrize("name", LARGE_RESULTS)
def test_large_result_of_small_tensors_is_a_cell(large_only: None, name: str) -> None:
    x = torch.randn(1000, 1)
    plain = LARGE_RESULTS[name](x)
    pager = native.load()
    with memmgr.budget("1GB", quiet=True) as mm:
        before = mm.stats()["ops"]
        y = LARGE_RESULTS[name](x)
        assert mm.stats()["ops"] > before
        assert pager.describe(y) is not None and pager.describe(x) is None
        assert pager.take_away(y, 1) > 0
        assert torch.equal(y, plain)


@pytest.mark.parametrize("name", LARGE_RESULTS)
def test_small_tensors_whose_result_has_no_room_end_as_other_ops(large_only: None, name: str) -> None:
    x = torch.randn(1000, 1)
    with pytest.raises(memmgr.BudgetError) as caught, memmgr.budget(bytes_already_there() + 2 * MB, quiet=True):
        LARGE_RESULTS[name](x)
    error = caught.value
    assert f"This op ({name}) needs {show_size(round_up(error.floor_bytes))}" in str(error)
    with memmgr.budget(error.enough_bytes, quiet=True):
        LARGE_RESULTS[name](x)


def test_in_place_op_without_room_for_its_own_memory_is_a_budget_error(large_only: None) -> None:
    """It takes a copy of its argument in another dtype: the last bytes of the budget are not enough."""
    wide, small = torch.ones(8000, dtype=torch.float64), torch.ones(8000)
    there = bytes_already_there()
    with memmgr.budget(there + 2 * MB, quiet=True) as mm:
        kept = [torch.ones(250).numpy() for _ in range((there + 2 * MB - mm.stats()["resident_bytes.current"]) // 1024)]
        with pytest.raises(memmgr.BudgetError, match="This op \\(aten::add_\\)"):
            small.add_(wide)
        del kept
        small.add_(wide)


def test_result_is_noted_in_the_pass(large_only: None) -> None:
    """A plan counts it: passes whose only cells are results of small tensors follow one."""
    x = torch.randn(1000, 1, requires_grad=True)

    def step() -> torch.Tensor:
        parts = [x * (1.0 + i) + x.t() for i in range(6)]
        total = parts[0]
        for part in parts[1:]:
            total = total * part
        total.sum().backward()
        grad, x.grad = x.grad, None
        assert grad is not None
        return grad

    plain = step()
    with memmgr.budget(None, quiet=True) as mm:
        step()
    need = mm.stats()["unmanaged_peak_bytes"]
    with memmgr.budget(int(0.7 * need), quiet=True) as mm:
        for _ in range(12):
            assert torch.equal(step(), plain)
            settled()
    assert mm.stats()["evictions"] + mm.stats()["offloads"] > 0 and mm.stats()["planned_passes"] > 0


def test_write_to_a_small_tensor_that_a_recipe_reads_is_seen(large_only: None) -> None:
    """A small tensor is a cell once a recipe names it, and a write to it in place goes the whole way."""
    pager = native.load()
    with memmgr.budget("1GB", quiet=True):
        x = torch.randn(1000, 1, requires_grad=True)
        w = torch.full((1000, 1000), 2.0)
        small = torch.randn(1000)
        y = (w * small).requires_grad_()
        z = y * small
        expected = z.detach().clone()
        small.add_(torch.ones(1000))
        small.mul_(3.0)
        assert pager.take_away(z.detach(), 0) > 0
        assert torch.equal(z, expected) and x.grad is None


def test_training_of_small_tensors_has_the_same_bits(large_only: None) -> None:
    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        cell, out = nn.GRUCell(16, 16), []
        optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
        for _ in range(3):
            h = torch.zeros(4, 16)
            for x in torch.randn(20, 4, 16):
                h = cell(x, h)
            loss = h.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            out.append(loss.detach())
        return out + [p.detach() for p in cell.parameters()]

    plain = train()
    with memmgr.budget("1GB", quiet=True):
        assert all(map(torch.equal, train(), plain))
