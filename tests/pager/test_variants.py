"""Model states in other precisions, adapters on a frozen base, accumulation: the same bits where half and a quarter fit."""

import functools

import pytest
from _training import VARIANTS, States
from budget.there import bytes_already_there

import memmgr

STEPS = 6


def trained(make: type[States], steps: int = STEPS) -> States:
    workload = make("tiny", 4)
    for _ in range(steps):
        workload.turn()
    return workload


@functools.cache
def plain(make: type[States]) -> tuple[str, dict[str, int]]:
    """The digest of training without a budget, and budgets by share, beyond the bytes left behind by other tests."""
    digest, there = trained(make).digest(), bytes_already_there()
    with memmgr.budget(None, policy="keep", quiet=True) as mm:
        workload = trained(make, 2)
        need = mm.stats()["unmanaged_peak_bytes"] - there
    return digest, workload.limits(need)


# Each takes half a dozen seconds. In a quarter more leaves than in half. Mixed precision has tensors of bf16, too.
# Accumulation has a plan over its micro-batches in test_rounds.py.
@pytest.mark.parametrize(
    ("variant", "share"),
    [
        pytest.param(variant, share, marks=[pytest.mark.slow] * (share == "50%" or variant in ("accumulate", "bf16")))
        for variant in ("amp", "bf16", "lora", "accumulate")
        for share in ("50%", "25%")
    ]
    + [("lora", "base/3")],
)
def test_the_same_bits(variant: str, share: str) -> None:
    digest, limits = plain(VARIANTS[variant])
    limit = limits[share] + bytes_already_there()
    with memmgr.budget(limit, quiet=True) as mm:
        got = trained(VARIANTS[variant])
        stats = mm.stats()
    assert got.digest() == digest
    assert stats["resident_bytes.peak"] <= limit < stats["unmanaged_peak_bytes"]
    assert stats["reloads"] > 0, "no state has left"
