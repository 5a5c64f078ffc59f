"""Prefetchers and names."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memmgr.policies import (
    DIRECTORS,
    FILTERS,
    POLICIES,
    PREFETCHERS,
    Auto,
    Candidates,
    Link,
    Upcoming,
    fifo,
    parse_policy,
    rank,
)
from memmgr.policies.rules.prefetchers import Bandwidth, Fifo
from memmgr.policies.rules.registry import STREAMING, SWAPPING

LINK = Link(1e9, 1e9)

SIZES = st.lists(st.integers(0, 10**6), max_size=60)


@settings(deadline=None)
@given(
    sizes=SIZES,
    gaps=st.lists(st.integers(0, 5), min_size=60, max_size=60),
    headroom=st.integers(-(10**6), 10**7),
    pace=st.sampled_from([0.0, 1e-4, 1e-2]),
    flight=st.integers(0, 10**7),
    bandwidth=st.sampled_from([0.0, 1e6, 1e9]),
    prefetch=st.sampled_from([*PREFETCHERS.values(), fifo(1), Bandwidth(0.0, 0)]),
)
def test_a_prefix_that_fits(sizes, gaps, headroom, pace, flight, bandwidth, prefetch) -> None:  # type: ignore[no-untyped-def]
    upcoming = Upcoming.build(sizes, np.cumsum(gaps[: len(sizes)]))
    picked = prefetch(upcoming, Link(bandwidth, bandwidth), headroom, pace, flight)
    assert picked.tolist() == list(range(len(picked)))
    assert upcoming.size_bytes[picked].sum() <= max(headroom, 0)
    if headroom < 0:
        assert len(picked) == 0


@settings(deadline=None)
@given(sizes=SIZES, headroom=st.integers(0, 10**7), more=st.integers(0, 10**7))
def test_more_headroom_never_fetches_less(sizes: list[int], headroom: int, more: int) -> None:
    up = Upcoming.build(sizes)
    for prefetch in PREFETCHERS.values():
        one, two = (len(prefetch(up, LINK, h, 1e-4, 0)) for h in (headroom, headroom + more))
        assert one <= two


def test_bandwidth_fetches_no_earlier_than_is_safe_and_no_later() -> None:
    up = Upcoming.build([10**6] * 100)  # 1 ms each at 1 GB/s
    prefetch = Bandwidth(caution=0.0, ahead_uses=0)
    # needed every 10 ms: one at a time; unknown pace: all that fit
    assert prefetch(up, LINK, 10**9, 10e-3, 0).tolist() == [0]
    assert len(prefetch(up, LINK, 10**9, 0.0, 0)) == 100
    assert len(prefetch(up, LINK, 5 * 10**6, 0.0, 0)) == 5
    # the link is slower than use: everything is urgent
    assert len(prefetch(up, Link(1e8, 1e8), 10**9, 1e-3, 0)) == 100
    # a burst far ahead makes earlier uses urgent too
    burst = Upcoming.build([10**6] * 100, [0, 20, *[21] * 98])
    assert len(prefetch(burst, LINK, 10**9, 1e-3, 0)) == 100
    assert prefetch(up, Link(1e9, 0.0), 10**9, 0.0, 0).tolist() == []


def test_fifo_is_delta_s_five_and_asking_twice_does_not_run_ahead() -> None:
    up = Upcoming.build([10] * 20)
    assert len(PREFETCHERS["fifo"](up, LINK, 10**6, 0.0, 0)) == 5
    rest = Upcoming.build([10] * 15, np.arange(5, 20))
    assert len(PREFETCHERS["fifo"](rest, LINK, 10**6, 0.0, 50)) == 0
    assert len(PREFETCHERS["off"](up, LINK, 10**6, 0.0, 0)) == 0
    with pytest.raises(ValueError, match="off"):
        fifo(0)


@pytest.mark.parametrize(("size", "distance"), [([1, 2], [1]), ([1, 2], [2, 1]), ([-1], [0])])
def test_bad_upcoming(size: list[int], distance: list[int]) -> None:
    with pytest.raises(ValueError):
        Upcoming.build(size, distance)


def test_every_combination_has_a_name() -> None:
    for f in FILTERS:
        for d in DIRECTORS:
            for p in PREFETCHERS:
                for text in (
                    f"{f}+{d}+{p}",
                    f"filter:{f},director:{d},prefetch:{p}",
                    f"prefetch={p}, director={d},filter={f}",
                ):
                    policy = parse_policy(text)
                    assert (policy.filter, policy.director, policy.prefetcher) == (
                        FILTERS[f],
                        DIRECTORS[d],
                        PREFETCHERS[p],
                    )
                    assert not policy.torture
            assert parse_policy(f"{f}+{d}").director is DIRECTORS[d]


def test_policies_that_never_recompute() -> None:
    never = {name for name, policy in POLICIES.items() if not policy.recomputes}
    assert never == {"offload", "keep", "nothing", *STREAMING, *SWAPPING}
    assert not parse_policy("lru+offload").recomputes and parse_policy("lru+auto").recomputes


def test_names_alone() -> None:
    for name, policy in POLICIES.items():
        assert parse_policy(name) is policy
    assert [n for n, p in POLICIES.items() if p.torture] == ["torture"]
    for name, director in (
        ("dtr", "evict"),
        ("dtr_eq", "evict"),
        ("msps", "evict"),
        ("dtr_local", "evict"),
        ("lru", "auto"),
        ("largest", "auto"),
    ):
        assert parse_policy(name).director is DIRECTORS[director]
        assert parse_policy(name).filter is FILTERS[name]
    assert parse_policy(" DTR-eq ").filter is FILTERS["dtr_eq"]
    assert parse_policy("prefetch:fifo(7)").prefetcher == Fifo(7)
    assert parse_policy("prefetch:off").director is DIRECTORS["auto"]


@pytest.mark.parametrize(
    ("text", "recomputes", "offloads"),
    [
        ("auto", True, True),
        ("evict", True, False),
        ("offload", False, True),
        ("lru+offload", False, True),
        ("filter:lru,director:evict,prefetch:bandwidth", True, False),
        ("dtr", True, False),
        ("capuchin", True, True),  # its net only swaps, its planner does both
        ("delta_taco", True, True),
        ("zero_infinity", False, True),  # nothing runs again
        ("torture", True, True),
        ("keep", False, False),
    ],
)
def test_a_policy_says_what_it_may_do(text: str, recomputes: bool, offloads: bool) -> None:
    policy = parse_policy(text)
    assert (policy.recomputes, policy.offloads) == (recomputes, offloads)


def test_a_bias_is_a_factor() -> None:
    with pytest.raises(ValueError, match="bias"):
        Auto(-1.0)


BAD_NAMES = "fast|dtr+|+evict|dtr+evict+off+off|filter:dtr,filter:lru|filter|director:|filter:x|fifo0|lru+offload+fifo0"


@pytest.mark.parametrize("text", [*BAD_NAMES.split("|"), "", "speed:9", "torture+evict", None, 3])
def test_a_bad_name_is_told_what_would_do(text: object) -> None:
    with pytest.raises(ValueError) as error:
        parse_policy(text)  # type: ignore[arg-type]
    message = str(error.value)
    assert repr(text) in message
    guess = re.search(r"did you mean '(.+)'\?", message)
    usual = "the usual ones are 'auto', 'evict' and 'offload'" in message
    assert usual if guess is None else guess[1] in (*POLICIES, *FILTERS)
    assert message.endswith("`memmgr run --policy help` lists all") and len(message) < 140


def test_keep_releases_nothing() -> None:
    keep = parse_policy("nothing")
    assert len(rank(Candidates.build([1, 2, 3]), keep.filter, keep.director, LINK)) == 0
