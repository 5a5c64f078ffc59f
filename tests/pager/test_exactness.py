"""Tensors that are evicted although the program holds them, under each policy: the same bits (rule 1). The rest is in
tests/exactness.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import cases
from exactness.harness import HUGE_BYTES, assert_same, check, managed, need, reference
from torch import nn

import memmgr

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings("error:memmgr")]


@pytest.mark.parametrize("policy", ["evict", "offload", "dtr", "lru", "largest", "delta"])
@pytest.mark.rule(1)
def test_same_bits_under_each_policy(policy: str) -> None:
    got = check(cases.CASES["unet"].fn, f"{policy}@60")
    if policy == "offload":
        assert got.stats["recomputes"] == 0
    if policy == "evict":
        assert got.stats["offloads"] == 0


@pytest.mark.rule(1)
def test_same_bits_near_the_floor() -> None:
    """A tenth above the smallest budget that the run reports, far below its unmanaged peak."""
    fn = cases.CASES["lstm_cell_loop"].fn
    assert need(fn).limit(0.0) < need(fn).limit(0.5)
    check(fn, "auto@0")


@pytest.mark.parametrize("name", ["mlp", "inplace_ops"])
def test_every_cell_that_comes_back_meets_its_checksum(name: str) -> None:
    check(cases.CASES[name].fn, "torture", verify=True)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_model_states_leave(name: str) -> None:
    """Parameters, gradients and states are evicted and restored, with clipping, and end as they would."""

    def fn(seed: int, scope: Any) -> Any:
        record = cases.Record()
        model = nn.Sequential(*[nn.Linear(48, 48) for _ in range(4)])
        optimizer = OPTIMIZERS[name](model.parameters())
        with scope():
            for _ in range(4):
                optimizer.zero_grad()
                loss = model(torch.randn(16, 48)).square().mean()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                record.losses(loss.detach())
        record.model(model)
        record.optimizer(optimizer)
        record.rng()
        return record

    got = managed(fn, HUGE_BYTES, "torture")
    assert_same(reference(fn), got.record, name)
    assert got.stats["offloads"] > 40


def test_what_the_program_holds_leaves(large_only: None, beyond: Callable[[str], int]) -> None:
    """Twenty hidden states in a list are 20 MB; 8 MB are enough, since held tensors can be evicted, too."""

    def run() -> list[bytes]:
        torch.manual_seed(0)
        h, kept = torch.randn(256, 1024), []
        for _ in range(20):
            h = torch.tanh(h * 1.01)
            kept.append(h)
        return [k.sum().numpy().tobytes() for k in kept]

    want = run()
    with torch.no_grad(), memmgr.budget(beyond("8MB"), quiet=True) as mm:
        got = run()
    assert got == want
    assert mm.stats()["resident_bytes.peak"] <= mm.stats()["budget_bytes"]
    assert mm.stats()["unmanaged_peak_bytes"] > 20_000_000


def test_inference_with_weights_of_four_budgets(large_only: None, beyond: Callable[[str], int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(16)])  # 16.8 MB
    x = torch.randn(8, 512)
    with torch.no_grad():
        want = model(x)
        with memmgr.budget(beyond("4.2MB"), quiet=True) as mm:
            got = [model(x).sum().item() for _ in range(3)]
    assert got == [want.sum().item()] * 3
    assert mm.stats()["reloads"] >= 30
    with torch.inference_mode(), memmgr.budget(beyond("4.2MB"), quiet=True):
        assert model(x).sum().item() == got[0]
