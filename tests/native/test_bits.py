"""Evicted cells of two values: what they leave behind, how they come back, and that nothing of it stays."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memmgr
from memmgr import _budget

from .shim import native

EVICT = 1
N = 1 << 16
BYTES = 4 * N


@pytest.fixture
def opened() -> Iterator[Any]:
    with memmgr.budget("1GB", policy="evict", quiet=True, verify=True, _sleep=False):
        yield native()


def dropped(n: Any, p: float = 0.1) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """(loss, the gradient of its leaf, the cell of the mask), for a dropout whose kinds have proved themselves."""
    x = torch.full((N,), 2.0, requires_grad=True)
    for _ in range(2):
        torch.manual_seed(1)
        loss = nn.functional.dropout(x, p).sum()
    torch.manual_seed(1)
    with torch.no_grad():
        want = nn.functional.dropout(torch.ones(N), p)
    (mask,) = [c for c in n.handled() if c.nbytes == BYTES and c.recipe is not None]
    loss.leaf = x
    return loss, want, mask


def outside(n: Any) -> int:
    return int(n.arena_stats()["outside_bytes"])


def recomputes() -> int:
    manager = _budget.current()
    assert manager is not None
    return manager.replayer.recomputes


def test_a_dropout_mask_leaves_its_bits(opened: Any) -> None:
    loss, want, mask = dropped(opened)
    resident, before, ran = opened.resident(), outside(opened), recomputes()
    assert opened.release(mask, EVICT)
    assert not mask.present and mask.stored and mask.gone == EVICT
    assert outside(opened) == before + N // 8, "bits count against the budget"
    assert opened.resident() == resident - BYTES + N // 8
    loss.backward()
    assert torch.equal(loss.leaf.grad, want)
    assert recomputes() == ran, "the mask was drawn again"
    assert outside(opened) == before
    counters = opened.counters()
    assert (counters["evictions"], counters["binarized"], counters["binarized_bytes"]) == (1, 1, BYTES)


def test_what_nobody_wants_any_more_leaves_nothing(opened: Any) -> None:
    loss, _, mask = dropped(opened)
    before = outside(opened)
    assert opened.release(mask, EVICT) and outside(opened) > before
    del loss, mask
    gc.collect()
    opened.end_pass()
    assert outside(opened) == before


def test_three_values_are_made_again(opened: Any) -> None:
    x, ramp = torch.randn(N, requires_grad=True), torch.arange(N) % 2
    for _ in range(2):
        torch.manual_seed(1)
        noise = torch.empty(N).bernoulli_(0.5).add_(ramp)
        loss = (x * noise).sum()
    want = noise.detach().clone()
    del noise
    (cell,) = [c for c in opened.handled() if c.nbytes == BYTES and c.recipe is not None]
    before, ran = outside(opened), recomputes()
    assert opened.release(cell, EVICT)
    assert not cell.stored and outside(opened) == before and opened.counters()["binarized"] == 0
    loss.backward()
    assert recomputes() > ran and torch.equal(x.grad, want)


@pytest.mark.parametrize("share", [0.25, 4.0])
def test_what_is_made_quickly_is_not_looked_at(opened: Any, share: float) -> None:
    x = torch.randn(N, requires_grad=True)
    for _ in range(2):
        loss = (x * torch.ones(N)).sum()
    (cell,) = [c for c in opened.handled() if c.nbytes == BYTES and c.recipe is not None]
    seconds = share * opened.bits_seconds(BYTES)
    cell.recipe.cost = seconds / 10  # believed at once; more only step by step
    for _ in range(200):
        cell.recipe.cost = seconds
    assert opened.release(cell, EVICT) and cell.stored is (share > 1)
    loss.backward()
    assert torch.equal(x.grad, torch.ones(N))


def test_bits_outlive_their_recipe(opened: Any) -> None:
    loss, want, mask = dropped(opened)
    assert opened.release(mask, EVICT)
    opened.drop_recipe(mask)
    loss.backward()
    assert torch.equal(loss.leaf.grad, want)


def test_without_room_it_waits_as_it_is(opened: Any) -> None:
    loss, want, mask = dropped(opened)
    assert opened.release(mask, EVICT)
    opened.set_budget(opened.resident() + BYTES // 2)
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward(retain_graph=True)
    assert mask.stored and not mask.present
    opened.set_budget(1 << 30)
    loss.leaf.grad = None
    loss.backward()
    assert torch.equal(loss.leaf.grad, want)


def test_leaving_the_context_gives_the_bytes_back() -> None:
    with memmgr.budget("1GB", policy="evict", quiet=True, _sleep=False):
        n = native()
        loss, want, mask = dropped(n)
        assert n.release(mask, EVICT) and mask.stored
        del mask
    assert n.counters()["bits_bytes"] == 0
    loss.backward()
    assert torch.equal(loss.leaf.grad, want)


def test_two_threads_that_want_it_get_the_same(opened: Any) -> None:
    """Each round one releases while both ask: nobody sees half of it, and what counts outside is in the end what it was."""
    loss, want, mask = dropped(opened)
    before = outside(opened)
    wrong: list[str] = []
    stop = time.monotonic() + 3.0

    def ask() -> None:
        while time.monotonic() < stop:
            opened.bring_back(mask)
            lease = opened.lease(mask)
            if lease is not None and not torch.equal(lease.view(torch.float32), want):
                wrong.append("other bytes")
            del lease
            time.sleep(0.001)

    def release() -> None:
        while time.monotonic() < stop:
            opened.release(mask, EVICT)

    threads = [threading.Thread(target=f) for f in (ask, ask, release)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and opened.counters()["binarized"] > 10
    opened.bring_back(mask)
    assert outside(opened) == before
    loss.backward()
    assert torch.equal(loss.leaf.grad, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dropout_of_every_width_trains_to_the_same_bits(dtype: torch.dtype) -> None:
    def train(n: Any = None) -> list[bytes]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(64, 64), nn.Dropout(0.2), nn.Linear(64, 64), nn.Dropout(0.3), nn.Linear(64, 8)
        ).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(512, 64, dtype=dtype)
        for _ in range(4):
            loss = model(x).pow(2).sum()
            for cell in n.handled() if n is not None else ():
                n.release(cell, EVICT)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().view(torch.uint8).numpy().tobytes() for p in model.parameters()]

    want = train()
    with memmgr.budget("1GB", policy="evict", quiet=True) as mm:
        assert train(native()) == want
    assert mm.stats()["binarized"] >= 6, "two masks a step, proven in the first"
