"""What a search over addresses is told: the filter's order per byte, in costs that can be added up and that age."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memmgr.policies import FILTERS, NO_LINK, Candidates, DtrOptions, Link, Price, rank, window_costs
from memmgr.policies.rules.directors import evict

LINK = Link(1e9, 2e9, cpu_seconds_per_byte=1e-10)
CELL = st.tuples(st.integers(1, 1 << 30), st.floats(1e-6, 1e4), st.floats(1e-7, 1.0), st.floats(0, 10.0))


def build(cells: list[tuple[int, float, float, float]]) -> Candidates:
    size, stale, cost, chain = zip(*cells, strict=True)
    return Candidates.build(size, staleness_seconds=stale, cost_seconds=cost, chain_seconds=chain)


@pytest.mark.parametrize("link", [NO_LINK, LINK], ids=["no link", "link"])
@pytest.mark.parametrize("name", sorted(FILTERS))
@settings(max_examples=60, deadline=None)
@given(cells=st.lists(CELL, min_size=2, max_size=12))
def test_aged_costs_per_byte_keep_the_filters_order(name, link, cells):
    candidates = build(cells)
    costs, exponent = window_costs(candidates, FILTERS[name], link)
    assert costs.shape == (len(cells),) and np.isfinite(costs).all() and (costs >= 0).all()
    per_byte = costs / candidates.size_bytes / np.maximum(candidates.staleness_seconds, 1e-9) ** exponent
    order = rank(candidates, FILTERS[name], evict, link).order
    assert (np.diff(per_byte[order]) >= -1e-9 * per_byte[order][:-1]).all()


def test_coops_cost_is_the_time_over_the_staleness():
    costs, exponent = window_costs(build([(100, 4.0, 1.0, 2.0), (7, 8.0, 0.5, 0.0)]), FILTERS["dtr"], NO_LINK)
    assert exponent == 1.0
    assert costs == pytest.approx([3.0, 0.5])


def test_exponents_are_those_of_the_filters():
    candidates = build([(1, 1.0, 1.0, 0.0)] * 3)
    found = {name: window_costs(candidates, score, NO_LINK)[1] for name, score in FILTERS.items()}
    assert found == {"dtr": 1, "dtr_eq": 1, "delta": 1, "lru": 1, "msps": 0, "largest": 0, "price": 0.25}
    assert window_costs(candidates, Price(None, 0.5), NO_LINK)[1] == 0.5


def test_what_a_filter_leaves_out_goes_last_not_never():
    candidates = build([(1 << 20, 1.0, 1.0, 0.0)] * 3 + [(16, 1.0, 1e-6, 0.0)])
    costs, exponent = window_costs(candidates, DtrOptions(FILTERS["dtr"]), NO_LINK)
    assert exponent == 1.0 and np.isfinite(costs).all()
    assert costs[3] > 1e5 * costs[0]


def test_an_unknown_filter_with_negative_scores_keeps_its_order():
    candidates = build([(100, 1.0, 1.0, 0.0), (200, 1.0, 1.0, 0.0), (300, 1.0, 1.0, 0.0)])
    costs, exponent = window_costs(candidates, lambda c: np.array([2.0, -1.0, 0.5]), NO_LINK)
    assert exponent == 0.0
    assert np.argsort(costs / candidates.size_bytes).tolist() == [1, 2, 0]


def test_no_candidates_no_costs():
    costs, exponent = window_costs(Candidates.empty(), FILTERS["dtr"], NO_LINK)
    assert len(costs) == 0 and exponent == 0.0


def test_a_ranking_is_cut_where_it_is_enough():
    candidates = build([(100, 1.0, 1.0 + i, 0.0) for i in range(5)])
    whole = rank(candidates, FILTERS["dtr"], evict, NO_LINK)
    assert [len(whole.until(candidates, need)) for need in (1, 100, 101, 500, 10_000)] == [1, 1, 2, 5, 5]
