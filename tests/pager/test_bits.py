"""Two-valued bytes (masks) are evicted but for a bit for each element, and are restored with the same bytes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budget.there import bytes_already_there
from exactness import cases
from exactness.harness import HUGE_BYTES, assert_same, managed, reference
from torch import nn

import memmgr
from memmgr.native import binding as native

N = 1 << 16


def residency(tensor: torch.Tensor) -> str:
    found = native.load().describe(tensor)
    assert found is not None
    return found["residency"]


def masks(seed: int, scope: Any) -> cases.Record:
    record = cases.Record()
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3)) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with scope():
        for _ in range(4):
            h = torch.randn(128, 64)
            for block in model:
                h = block(h)
                h = F.dropout(h, 0.5) * (h > 0)
            loss = h.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            record.losses(loss.detach())
    record.model(model)
    record.rng()
    return record


@pytest.mark.parametrize("policy", ["torture", "evict"])
def test_masks_leave_as_bits(policy: str) -> None:
    got = managed(masks, HUGE_BYTES if policy == "torture" else bytes_already_there() + 900_000, policy)
    assert_same(reference(masks), got.record, policy)
    assert got.stats["packed"] > 0


def test_what_stays_of_a_mask_counts_and_ends_with_it() -> None:
    pager = native.load()
    with memmgr.budget("1GB", quiet=True, disk=False) as mm:
        x = torch.randn(N)
        for _ in range(2):  # its kind is known from the first on
            mask = torch.bernoulli(torch.full((N,), 0.5))
        want = mask.clone()
        pager.drain()
        before = mm.stats()["resident_bytes.current"]
        assert pager.take_away(mask, 0) == N * 4 - N // 8
        assert residency(mask) == "packed"
        assert mm.stats()["resident_bytes.current"] == before - N * 4 + N // 8
        assert torch.equal(mask, want)
        assert residency(mask) == "resident"
        assert mm.stats()["resident_bytes.current"] == before
        pager.take_away(mask, 0)
        mask.add_(x)  # a write to a packed tensor
        assert torch.equal(mask, want + x)
        mask = torch.bernoulli(torch.full((N,), 0.5))
        pager.take_away(mask, 0)
        held = mm.stats()["resident_bytes.current"]
        del mask
        assert mm.stats()["resident_bytes.current"] <= held - N // 8
        kept = torch.bernoulli(torch.full((N,), 0.5))
        again = kept.clone()
        pager.take_away(kept, 0)
    assert torch.equal(kept, again)  # it was restored at the end


def test_more_values_than_the_first_of_its_kind_had() -> None:
    """They leave as everything does: made again, since there is no tier."""
    pager = native.load()
    with memmgr.budget("1GB", quiet=True, disk=False):
        torch.sign(torch.rand(N) - 0.5)
        three = torch.randn(N)
        three[::3] = 0
        signs = torch.sign(three)
        want = signs.clone()
        assert pager.take_away(signs, 0) == N * 4
        assert residency(signs) == "evicted"
        assert torch.equal(signs, want)


def test_a_kind_whose_first_result_was_two_valued_by_chance() -> None:
    """Zeros, say, times anything: plans counted on bits of all later ones, and each of them ran short."""
    pager = native.load()
    n = N + 64  # of a kind that no other test has tried to pack

    def signs(values: int) -> torch.Tensor:
        return torch.sign((torch.rand(n) * values).floor() - 0.5 * (values - 1))  # dearer to make than to pack

    with memmgr.budget("1GB", quiet=True, disk=False):
        signs(2)
        two, three = signs(2), signs(3)
        assert pager.take_away(two, 0) == n * 4 - n // 8
        pager.take_away(three, 0)
        two = signs(2)
        want = two.clone()
        assert pager.take_away(two, 0) == n * 4
        assert residency(two) == "evicted"
        assert torch.equal(two, want)
