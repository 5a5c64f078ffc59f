"""Holes about memory that others can write."""

from __future__ import annotations

import pytest

from .exposed import HOLES
from .harness import check

MODES = ("torture", "evict@50", "offload@50")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", HOLES)
def test_same_bits(name: str, mode: str) -> None:
    check(HOLES[name], mode, moves=False)
