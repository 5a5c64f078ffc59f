"""Filters, rank and directors, against properties and against slow, obvious references."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memmgr.policies import (
    DIRECTORS,
    FILTERS,
    NO_LINK,
    Action,
    Alternate,
    Auto,
    Candidates,
    Link,
    Price,
    rank,
)

# Powers of two and small integers: sums are exact, so that a reference in another order of addition gives equal
# results.
SIZES = st.integers(0, 64).map(lambda k: k * 1024)
SECONDS = st.integers(0, 64).map(lambda k: k / 64)
UNTIL = st.one_of(SECONDS, st.sampled_from([math.inf, math.nan]))
CELL = st.tuples(SIZES, SECONDS, SECONDS, SECONDS, st.booleans(), st.booleans(), st.booleans(), UNTIL)
SEED = st.integers(0, 2**16)


def build(cells: list[tuple]) -> Candidates:  # type: ignore[type-arg]
    size, stale, cost, chain, recomputable, clean, offloadable, until = zip(*cells, strict=True) if cells else ((),) * 8
    return Candidates.build(
        np.array(size, dtype=np.int64),
        staleness_seconds=np.array(stale, dtype=float),
        cost_seconds=np.array(cost, dtype=float),
        chain_seconds=np.array(chain, dtype=float),
        recomputable=np.array(recomputable, dtype=bool),
        clean=np.array(clean, dtype=bool),
        offloadable=np.array(offloadable, dtype=bool),
        seconds_until_use=np.array(until, dtype=float),
    )


CANDIDATES = st.lists(CELL, max_size=40).map(build)
SOME = st.lists(CELL, min_size=1, max_size=40).map(build)
BANDWIDTH = st.sampled_from([0.0, 2.0**14, 2.0**17, 2.0**20])
LINKS = st.builds(
    lambda w, r, qw, qr, lat, cpu, slack, demand, reads, due: Link(
        w,
        r,
        qw * 1024,
        qr * 1024,
        lat / 64,
        cpu,
        slack / 16,
        demand,
        reads / 16,
        tuple(b * 1024 for b, _ in due),
        tuple(s for _, s in due),
    ),
    BANDWIDTH,
    BANDWIDTH,
    st.integers(0, 64),
    st.integers(0, 64),
    st.integers(0, 2),
    st.sampled_from([0.0, 2.0**-22]),
    st.integers(0, 16),
    st.sampled_from([math.inf, 2.0**16, 2.0**19]),
    st.integers(0, 8),
    st.lists(st.tuples(st.integers(0, 32), UNTIL), max_size=6),
)
LINK = Link(1e9, 1e9)


def score(name: str, **columns: object) -> np.ndarray:
    return FILTERS[name](Candidates.build(**columns))  # type: ignore[arg-type]


POSITIVE = st.floats(1e-6, 1e3)


@settings(deadline=None)
@given(a=POSITIVE, b=POSITIVE, other=POSITIVE)
def test_monotone(a: float, b: float, other: float) -> None:
    low, high = sorted((a, b))
    size = np.array([low, high]) * 1e6
    # the larger, the staler and the cheaper leave no later
    for name in FILTERS:
        s = score(name, size_bytes=size.astype(np.int64), cost_seconds=other, staleness_seconds=other)
        assert s[1] <= s[0], name
        s = score(name, size_bytes=[1000, 1000], cost_seconds=other, staleness_seconds=[low, high])
        assert s[1] <= s[0], name
        s = score(name, size_bytes=[1000, 1000], cost_seconds=[low, high], staleness_seconds=other)
        assert s[0] <= s[1], name
    for name, column in (("dtr", "chain_seconds"), ("msps", "chain_seconds"), ("dtr_eq", "component_seconds")):
        s = score(name, size_bytes=[1000, 1000], cost_seconds=other, **{column: [low, high]})
        assert s[0] <= s[1], name


@settings(deadline=None)
@given(c=SOME)
def test_dtr_is_the_papers_formula(c: Candidates) -> None:
    got = FILTERS["dtr"](c)
    for i in range(len(c)):
        m, s = max(int(c.size_bytes[i]), 1), max(float(c.staleness_seconds[i]), 1e-9)
        assert got[i] == pytest.approx((c.cost_seconds[i] + c.chain_seconds[i]) / (m * s))


@settings(deadline=None)
@given(c=SOME, link=LINKS)
def test_scores_are_never_nan(c: Candidates, link: Link) -> None:
    for name, f in FILTERS.items():
        assert not np.isnan(f(c)).any(), name
    assert not np.isnan(Price().bind(link)(c)).any()


def test_price_is_cost_on_a_slow_link_and_bytes_on_a_fast_one() -> None:
    c = Candidates.build([1000, 1000], cost_seconds=[1e-3, 2e-3], seconds_until_use=1.0)
    assert np.argmin(Price().bind(NO_LINK)(c)) == 0
    fast = Price().bind(Link(1e12, 1e12, cpu_seconds_per_byte=1e-9, demand_bytes_per_second=1e9))(c)
    assert fast[0] == fast[1] > 0


@settings(max_examples=300, deadline=None)
@given(c=CANDIDATES, link=LINKS, f=st.sampled_from(sorted(FILTERS)), d=st.sampled_from(sorted(DIRECTORS)), need=SIZES)
def test_enough_or_everything_and_nothing_that_cannot_leave(
    c: Candidates, link: Link, f: str, d: str, need: int
) -> None:
    whole = rank(c, FILTERS[f], DIRECTORS[d], link)
    some = rank(c, FILTERS[f], DIRECTORS[d], link, need)
    for ranking in (whole, some):
        assert ranking.order.dtype == np.int64 and ranking.action.dtype == np.int8
        assert len(set(ranking.order.tolist())) == len(ranking.order) == len(ranking.action)
        for i, action in zip(ranking.order, ranking.action, strict=True):
            assert action != Action.KEEP
            assert c.recomputable[i] if action == Action.EVICT else c.offloadable[i] or c.clean[i]
    can = {"evict": c.recomputable, "offload": c.can_offload}.get(d, c.releasable)
    assert sorted(whole.order.tolist()) == np.flatnonzero(can).tolist()
    freed = int(c.size_bytes[some.order].sum())
    if freed < need:
        assert sorted(some.order.tolist()) == np.flatnonzero(can).tolist()
    elif len(some):
        assert freed - c.size_bytes[some.order[-1]] < need, "the last entry was not needed"


@settings(deadline=None)
@given(c=SOME, need=st.integers(1, 10**6))
def test_dtr_evict_against_brute_force(c: Candidates, need: int) -> None:
    left = [i for i in range(len(c)) if c.recomputable[i]]
    want, freed = [], 0
    h = [
        (c.cost_seconds[i] + c.chain_seconds[i]) / (max(int(c.size_bytes[i]), 1) * max(c.staleness_seconds[i], 1e-9))
        for i in range(len(c))
    ]
    while left and freed < need:
        victim = min(left, key=lambda i: (h[i], i))
        left.remove(victim)
        want.append(victim)
        freed += int(c.size_bytes[victim])
    assert rank(c, FILTERS["dtr"], DIRECTORS["evict"], NO_LINK, need).order.tolist() == want


@settings(deadline=None)
@given(c=SOME, seed=SEED, need=SIZES, f=st.sampled_from(sorted(FILTERS)))
def test_order_of_candidates_does_not_matter_but_for_ties(c: Candidates, seed: int, need: int, f: str) -> None:
    c = replace(c, size_bytes=np.arange(1, len(c) + 1) * 1024, staleness_seconds=np.arange(1, len(c) + 1) / 7)
    c = replace(c, cost_seconds=c.size_bytes * np.sqrt(np.arange(2, len(c) + 2)), chain_seconds=c.cost_seconds * 0)
    c = replace(c, component_seconds=c.chain_seconds)
    shuffle = np.random.default_rng(seed).permutation(len(c))
    shuffled = c.take(shuffle)
    for director in ("evict", "auto"):
        one = rank(c, FILTERS[f], DIRECTORS[director], LINK, need)
        two = rank(shuffled, FILTERS[f], DIRECTORS[director], LINK, need)
        assert one.order.tolist() == shuffle[two.order].tolist()
        assert one.action.tolist() == two.action.tolist()


@settings(deadline=None)
@given(n=st.integers(1, 400), need=st.integers(1, 400))
def test_ties_go_by_index_however_long_the_prefix(n: int, need: int) -> None:
    c = Candidates.build(np.ones(n, dtype=np.int64))
    for d in ("evict", "offload"):
        assert rank(c, FILTERS["lru"], DIRECTORS[d], LINK, need).order.tolist() == list(range(min(n, need)))


def test_nan_scores_go_last_and_nothing_is_fine() -> None:
    c = Candidates.build([10, 10, 10])
    ranking = rank(c, lambda _: np.array([math.nan, 2.0, 1.0]), DIRECTORS["evict"], NO_LINK)
    assert ranking.order.tolist() == [2, 1, 0]
    assert len(rank(Candidates.empty(), FILTERS["dtr"], DIRECTORS["auto"], LINK, 10)) == 0
    assert len(rank(c, FILTERS["dtr"], DIRECTORS["auto"], LINK, 0)) == 0


def test_a_long_search_past_what_the_director_keeps() -> None:
    recomputable = np.zeros(1000, dtype=bool)
    recomputable[-3:] = True
    c = Candidates.build(np.full(1000, 8), recomputable=recomputable, staleness_seconds=np.arange(1000, 0, -1.0))
    assert rank(c, FILTERS["lru"], DIRECTORS["evict"], LINK, 16).order.tolist() == [997, 998]


@pytest.mark.parametrize(
    ("column", "value"), [("cost_seconds", -1.0), ("staleness_seconds", math.nan), ("chain_seconds", [1.0, 2.0])]
)
def test_bad_columns_are_refused(column: str, value: object) -> None:
    with pytest.raises(ValueError, match=column):
        Candidates.build([1, 2, 3], **{column: value})  # type: ignore[arg-type]


def by_hand_auto(c: Candidates, order: list[int], link: Link, urgent: int, bias: float) -> list[int]:
    """From scratch at each decision: total delay with the transfer less total delay without it."""
    write_rate, read_rate = link.write_bytes_per_second, link.read_bytes_per_second
    written: list[tuple[int, float]] = []  # (bytes, needed at)
    promised = [
        (int(b), max(0.0, (0.0 if math.isnan(s) else float(s)) - link.seconds_until_reads))
        for b, s in zip(link.due_bytes, link.due_seconds, strict=True)
    ]

    def write_stall(queue: list[tuple[int, float]]) -> float:
        stall, total = 0.0, link.queued_write_bytes
        for size, needed in queue:
            total += size
            stall = max(stall, link.latency_seconds + total / write_rate - needed)
        return stall

    def read_stall(cells: list[tuple[int, float]]) -> float:
        stall, total = 0.0, link.queued_read_bytes
        for size, deadline in sorted(cells, key=lambda x: x[1]):
            total += size
            stall = max(stall, link.latency_seconds + total / read_rate - deadline)
        return stall

    actions, freed = [], 0
    for i in order:
        size = int(c.size_bytes[i])
        dirty, can = not c.clean[i], bool(c.offloadable[i] or c.clean[i])
        needed = link.slack_seconds + max(0, freed - urgent) / link.demand_bytes_per_second
        until = 0.0 if math.isnan(c.seconds_until_use[i]) else float(c.seconds_until_use[i])
        deadline = max(0.0, until - link.seconds_until_reads)
        recompute = float(c.cost_seconds[i] + c.chain_seconds[i]) if c.recomputable[i] else math.inf
        possible = can and read_rate > 0 and (write_rate > 0 or not dirty)
        if not c.recomputable[i]:
            action = Action.OFFLOAD if can else Action.KEEP
        elif not possible:
            action = Action.EVICT
        else:
            seconds = size * link.cpu_seconds_per_byte * (2 if dirty else 1)
            seconds += read_stall([*promised, (size, deadline)]) - read_stall(promised)
            if dirty:
                seconds += write_stall([*written, (size, needed)]) - write_stall(written)
            action = Action.OFFLOAD if bias * seconds < recompute else Action.EVICT
        if action == Action.OFFLOAD:
            promised.append((size, deadline))
            if dirty:
                written.append((size, needed))
        if action != Action.KEEP:
            freed += size
        actions.append(int(action))
    return actions


# A link that cannot move bytes while cells have no other way is decided elsewhere: there every delay is infinite.
MOVING = LINKS.filter(lambda link: link.write_bytes_per_second > 0 and link.read_bytes_per_second > 0)


@settings(max_examples=250, deadline=None)
@given(c=SOME, link=MOVING, urgent=SIZES, seed=SEED, bias=st.sampled_from([1.0, 0.5, 2.0]))
def test_auto_against_the_sequential_reference(c: Candidates, link: Link, urgent: int, seed: int, bias: float) -> None:
    order = np.random.default_rng(seed).permutation(len(c))
    assert Auto(bias)(c, order, link, urgent).tolist() == by_hand_auto(c, order.tolist(), link, urgent, bias)


@settings(deadline=None)
@given(c=SOME, link=LINKS, urgent=SIZES, d=st.sampled_from(sorted(DIRECTORS)), cut=st.integers(0, 40))
def test_an_action_does_not_depend_on_later_entries(c: Candidates, link: Link, urgent: int, d: str, cut: int) -> None:
    order = np.arange(len(c))
    whole = DIRECTORS[d](c, order, link, urgent)
    assert DIRECTORS[d](c, order[:cut], link, urgent).tolist() == whole[:cut].tolist()


@settings(deadline=None)
@given(c=SOME, link=LINKS, urgent=SIZES, d=st.sampled_from(sorted(DIRECTORS)), log2=st.sampled_from([-10, 1, 8]))
def test_units_scaling_bytes_and_bandwidth_or_all_times_changes_nothing(
    c: Candidates, link: Link, urgent: int, d: str, log2: int
) -> None:
    order = np.arange(len(c))
    want = DIRECTORS[d](c, order, link, urgent).tolist()
    k = 2.0**log2
    more_bytes = replace(
        link,
        write_bytes_per_second=link.write_bytes_per_second * k,
        read_bytes_per_second=link.read_bytes_per_second * k,
        demand_bytes_per_second=link.demand_bytes_per_second * k,
        queued_write_bytes=int(link.queued_write_bytes * k),
        queued_read_bytes=int(link.queued_read_bytes * k),
        cpu_seconds_per_byte=link.cpu_seconds_per_byte / k,
        due_bytes=tuple(int(b * k) for b in link.due_bytes),
    )
    bigger = replace(c, size_bytes=(c.size_bytes * k).astype(np.int64))
    assert DIRECTORS[d](bigger, order, more_bytes, int(urgent * k)).tolist() == want
    slower = replace(
        link,
        write_bytes_per_second=link.write_bytes_per_second / k,
        read_bytes_per_second=link.read_bytes_per_second / k,
        demand_bytes_per_second=link.demand_bytes_per_second / k,
        latency_seconds=link.latency_seconds * k,
        cpu_seconds_per_byte=link.cpu_seconds_per_byte * k,
        slack_seconds=link.slack_seconds * k,
        seconds_until_reads=link.seconds_until_reads * k,
        due_seconds=tuple(s * k for s in link.due_seconds),
    )
    longer = replace(
        c, cost_seconds=c.cost_seconds * k, chain_seconds=c.chain_seconds * k, seconds_until_use=c.seconds_until_use * k
    )
    assert DIRECTORS[d](longer, order, slower, urgent).tolist() == want


@settings(deadline=None)
@given(c=SOME, urgent=SIZES)
def test_auto_at_the_extremes_is_evict_or_offload(c: Candidates, urgent: int) -> None:
    c = replace(c, cost_seconds=c.cost_seconds + 1e-3, size_bytes=c.size_bytes + 1)
    c = replace(c, recomputable=c.recomputable | ~c.can_offload)
    order = np.arange(len(c))
    both = c.recomputable & c.can_offload
    nearly_free = Link(1e30, 1e30)
    assert (Auto()(c, order, nearly_free, urgent)[both] == Action.OFFLOAD).all()
    for slow in (NO_LINK, Link(1e-6, 1e-6), Link(1e30, 1e30, cpu_seconds_per_byte=1e6)):
        used_now = replace(c, seconds_until_use=np.zeros(len(c)))
        assert (Auto()(used_now, order, slow, urgent)[both] == Action.EVICT).all()
    assert (Auto(math.inf)(c, order, nearly_free, urgent)[both] == Action.EVICT).all()
    assert (Auto(0.0)(c, order, Link(1.0, 1.0), urgent)[both] == Action.OFFLOAD).all()


def test_auto_fills_the_link_then_recomputes() -> None:
    c = Candidates.build(np.full(100, 10**6), cost_seconds=1e-3, seconds_until_use=10.0)
    # requests take 1 GB/s, the link writes half of that: half is written, half is made again
    link = Link(0.5e9, 8e9, slack_seconds=4e-3, demand_bytes_per_second=1e9)
    actions = Auto()(c, np.arange(100), link, 0)
    assert 45 <= (actions == Action.OFFLOAD).sum() <= 60
    assert (Auto()(c, np.arange(100), replace(link, queued_write_bytes=10**9), 0) == Action.EVICT).all()
    clean = replace(c, clean=np.ones(100, dtype=bool))
    assert (Auto()(clean, np.arange(100), replace(link, queued_write_bytes=10**9), 0) == Action.OFFLOAD).all()


def test_auto_sees_reads_that_were_promised() -> None:
    c = Candidates.build([10**6], cost_seconds=1e-4, seconds_until_use=1.0, clean=True)
    link = Link(1e9, 1e9)
    assert Auto()(c, np.arange(1), link, 0).tolist() == [Action.OFFLOAD]
    busy = replace(link, due_bytes=[10**9], due_seconds=[1.0])
    assert Auto()(c, np.arange(1), busy, 0).tolist() == [Action.EVICT]
    later = replace(link, due_bytes=[10**9], due_seconds=[2.5])
    assert Auto()(c, np.arange(1), later, 0).tolist() == [Action.OFFLOAD]


def test_delta_compares_seconds() -> None:
    # 1 GB at 1 GB/s each way: two seconds
    c = Candidates.build([10**9] * 3, cost_seconds=[1.9, 2.1, 1.0], chain_seconds=[0.0, 0.0, 1.5])
    assert DIRECTORS["delta"](c, np.arange(3), LINK, 0).tolist() == [Action.EVICT, Action.OFFLOAD, Action.OFFLOAD]
    clean = replace(c, clean=np.ones(3, dtype=bool))
    assert (DIRECTORS["delta"](clean, np.arange(3), LINK, 0) == Action.OFFLOAD).all()


def test_alternate_takes_turns_and_never_spares() -> None:
    c = Candidates.build([1] * 6, recomputable=[1, 1, 1, 1, 0, 0], offloadable=[1, 1, 0, 0, 1, 0])
    turns = Alternate()(c, np.arange(6), LINK, 0).tolist()
    assert turns == [Action.EVICT, Action.OFFLOAD, Action.EVICT, Action.EVICT, Action.OFFLOAD, Action.KEEP]
    assert Alternate(1)(c, np.arange(2), LINK, 0).tolist() == [Action.OFFLOAD, Action.EVICT]
