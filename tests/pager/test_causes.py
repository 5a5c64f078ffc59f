"""The record of a cell's last eviction: its cause and its pass."""

from __future__ import annotations

import pytest
import torch

import memmgr
from memmgr.native import binding


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
