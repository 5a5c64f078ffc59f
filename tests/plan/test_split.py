"""Splits of a total among ranks: against every split that there is."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from memmgr.policies.plan.split import Curve, Limit, Split, equal, fits, split, spread

points = st.lists(
    st.tuples(st.integers(1, 12), st.one_of(st.none(), st.integers(1, 6).map(float))), min_size=1, max_size=5
)
curve = points.map(Curve.of).filter(lambda c: bool(c.points))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[Curve], list[Limit]]:
    curves = draw(st.lists(curve, min_size=1, max_size=3))
    ranks = tuple(range(len(curves)))
    limits = [Limit(ranks, draw(st.integers(1, 30)))]
    if draw(st.booleans()):  # hosts, or devices
        limits += [Limit((rank,), draw(st.integers(1, 12))) for rank in ranks]
    if draw(st.booleans()):
        limits.append(Limit(ranks[:2], draw(st.integers(1, 20))))
    return curves, limits


def by_trying_all(curves: list[Curve], limits: list[Limit]) -> float | None:
    found = [
        max(seconds for _, seconds in chosen)
        for chosen in itertools.product(*(c.points for c in curves))
        if fits([budget for budget, _ in chosen], limits)
    ]
    return min(found, default=None)


@given(jobs())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_none_is_better(job: tuple[list[Curve], list[Limit]]) -> None:
    curves, limits = job
    best, found = by_trying_all(curves, limits), split(curves, limits)
    assert (found.seconds if found is not None else None) == best
    if found is None:
        return
    reached = [c.seconds(b) for c, b in zip(curves, found.budgets, strict=True)]
    assert max(s for s in reached if s is not None) == found.seconds and None not in reached
    most = [c.points[-1][0] for c in curves]
    for budgets in (found.budgets, spread(found.budgets, most, limits)):
        assert fits(budgets, limits)
        assert all(b <= max(m, own) for b, m, own in zip(budgets, most, found.budgets, strict=True))
        assert all(c.least_bytes(found.seconds) <= b for c, b in zip(curves, budgets, strict=True))  # type: ignore[operator]
    beside = [c.seconds(b) for c, b in zip(curves, equal(len(curves), limits), strict=True)]
    # The equal split may use budgets that are no point of the curve, which is worth no more than the point below.
    assert None in beside or found.seconds <= max(s for s in beside if s is not None)


def test_the_slowest_rank_gets_what_the_other_does_not_need() -> None:
    heavy = Curve.of([(4, 9.0), (8, 3.0), (10, 1.0), (6, None)])
    light = Curve.of([(1, 1.5), (2, 1.0), (5, 1.0)])
    assert heavy.points == ((4, 9.0), (8, 3.0), (10, 1.0)) and light.points == ((1, 1.5), (2, 1.0))
    limits = [Limit((0, 1), 11)]
    assert split([heavy, light], limits) == Split((10, 1), 1.5)
    assert equal(2, limits) == (5, 5) and heavy.seconds(5) == 9.0
    assert split([heavy, light], [Limit((0, 1), 4)]) is None


def test_what_is_left_over_goes_to_who_can_use_it() -> None:
    assert spread((10, 2, 3), (10, 4, 30), [Limit((0, 1, 2), 25)]) == (10, 4, 11)
    assert spread((1, 1), (9, 9), [Limit((0, 1), 9)]) == (4, 5)
    assert spread((1, 1), (9, 9), [Limit((0, 1), 20), Limit((0,), 3), Limit((1,), 8)]) == (3, 8)
