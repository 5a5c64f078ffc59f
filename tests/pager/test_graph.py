"""The equations of allocator/pager/cells/check_graph.h hold after every op, and a false one is found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from budget import models

import memmgr
from memmgr.native import binding

from .planned import bits, need, sizes, trained

__all__ = ["sizes"]  # a fixture

STEPS = 3
CASES = [
    ("convnet", "evict", 0.6),
    ("gpt", "offload", 0.4),
    ("lstm", "auto", 0.5),
    pytest.param("gpt", "auto", 0.5, marks=pytest.mark.slow),  # a near copy of the last one
]


@pytest.fixture
def checked() -> Iterator[pager.Pager]:
    """After every op."""
    native = binding.load()
    native.set_graph_checks(1.0)
    yield native
    native.set_graph_checks(0.0)


@pytest.mark.rule(5)
@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize(("model", "policy", "share"), CASES)
def test_equations_hold_after_every_op_of_a_training(
    checked: pager.Pager, model: str, policy: str, share: float
) -> None:
    make = models.MODELS[model]
    limit = int(need(make) * share)
    torch.manual_seed(0)
    training = make()
    with memmgr.budget(limit, device="cpu", policy=policy, quiet=True) as mm:
        losses = [training.step() for _ in range(STEPS)]
        assert mm.stats()["evictions"] + mm.stats()["offloads"] > 10
        assert checked.check_graph() == ""
    assert (losses, bits(training)) == trained(make, STEPS)
    assert checked.check_graph() == ""


def test_equations_hold_while_everything_is_evicted_after_each_op(checked: pager.Pager) -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    with memmgr.budget("1MB", device="cpu", quiet=True, policy="torture") as mm:
        x = torch.randn(32, 64)
        y = torch.nn.functional.dropout(x @ weight, 0.3).relu()
        z = y.clone()
        z[:, ::2] += 1
        (z @ weight).sum().backward()
        assert mm.stats()["evictions"] > 0
    assert checked.check_graph() == ""


def test_a_sum_that_does_not_agree_is_found(checked: pager.Pager) -> None:
    with memmgr.budget("1MB", device="cpu", quiet=True):
        kept = torch.randn(64, 64) * 2
        pin = checked.pin([kept], held=True)
        checked.miscount(1)
        try:
            with pytest.raises(RuntimeError, match="long_pinned_bytes is 16385, and the sum is 16384"):
                kept.sum()
        finally:
            checked.miscount(-1)
        del pin
        kept.sum()  # no error
