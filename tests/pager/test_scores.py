"""Malloc's own orders in C++ (residency/score.h) are those of the filters of the same names."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from driver import build

from memmgr.common.constants import Order
from memmgr.policies import Candidates
from memmgr.policies.rules.filters import FILTERS, Price
from memmgr.runtime.ranking import BUILT_IN

PAGER = build.ROOT / "allocator" / "pager"


@pytest.fixture(scope="module")
def scores() -> ctypes.CDLL:
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    headers = [PAGER / "residency" / "score.h", PAGER / "base" / "constants.h", PAGER / "base" / "constants.def"]
    flags = ["-I", str(Path(__file__).parent / "no_torch"), "-I", str(PAGER)]
    library = ctypes.CDLL(str(build.build("orders", [Path(__file__).with_name("orders.cpp")], flags, more=headers)))
    library.mm_score.argtypes = (ctypes.c_uint8, ctypes.c_double, ctypes.c_uint64, ctypes.c_double)
    library.mm_score.restype = ctypes.c_double
    return library


def candidates(n: int, seed: int) -> Candidates:
    """Costs are seconds, since malloc adds 1e-7 s to each."""
    draw = np.random.default_rng(seed)
    size, age, cost = draw.integers(1 << 12, 1 << 26, n), draw.uniform(1e-3, 10, n), draw.uniform(1, 100, n)
    return Candidates.build(size, staleness_seconds=age, cost_seconds=cost)


@pytest.mark.parametrize("name", BUILT_IN)
def test_malloc_evicts_in_the_order_of_the_filter(name: str, scores: ctypes.CDLL) -> None:
    c = candidates(500, 7)
    rows = zip(c.cost_seconds.tolist(), c.size_bytes.tolist(), c.staleness_seconds.tolist(), strict=True)
    ours = [scores.mm_score(int(BUILT_IN[name]), cost, size, age) for cost, size, age in rows]
    # malloc has no queue to count on, so the default's weaker exponent of staleness is the simulator's alone.
    theirs = Price(None, 1.0)(c) if name == "price" else FILTERS[name](c)
    assert np.array_equal(np.argsort(ours, kind="stable"), np.argsort(theirs, kind="stable"))


def test_without_a_ranking_it_is_dtrs(scores: ctypes.CDLL) -> None:
    assert scores.mm_score(Order.RANKED, 0.5, 4096, 2.0) == scores.mm_score(Order.DTR, 0.5, 4096, 2.0)
