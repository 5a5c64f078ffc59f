"""Policies: malloc's own orders, those that a thread ranks ahead of need, and the planners of the papers, by name."""

import ctypes
import functools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from budget import models
from budget.there import bytes_already_there
from driver import build

import memmgr
from memmgr.api import budget as budgets
from memmgr.common.constants import Order
from memmgr.policies import POLICIES, Candidates, Policy, parse_policy
from memmgr.policies.rules.directors import DIRECTORS
from memmgr.policies.rules.filters import FILTERS, Price
from memmgr.policies.rules.prefetchers import PREFETCHERS
from memmgr.policies.rules.registry import STREAMING, SWAPPING
from memmgr.runtime.ranking import BUILT_IN, order_of

pytestmark = pytest.mark.filterwarnings("error:memmgr")

STEPS = 6


def trained(steps: int = STEPS, **options: Any) -> tuple[list[float], dict[str, Any], Any]:
    torch.manual_seed(0)
    training = models.unet(width=8, batch=2, height=48)
    if not options:
        return [training.step() for _ in range(steps)], {}, None
    losses = []
    with memmgr.budget(quiet=True, **options) as mm:
        runtime: Any = budgets.current()
        for _ in range(steps):
            losses.append(training.step())
            runtime.plans.wait()
    return losses, mm.stats(), runtime


@functools.cache
def plain(steps: int = STEPS) -> list[float]:
    """The losses without a budget."""
    return trained(steps)[0]


@functools.cache
def need() -> int:
    """Beyond the bytes left behind by other tests."""
    _, stats, _ = trained(limit=None)
    return int(stats["unmanaged_peak_bytes"]) - bytes_already_there()


def limit(share: float) -> int:
    return bytes_already_there() + int(need() * share)


def newest_first(c: Candidates) -> Any:
    """A user's own filter: the tensor touched last is evicted first."""
    return np.asarray(c.staleness_seconds, dtype=np.float64)


MINE = Policy("mine", newest_first, DIRECTORS["auto"], PREFETCHERS["off"])


def test_which_orders_are_mallocs_own() -> None:
    own = {
        "auto",
        "evict",
        "offload",
        "torture",
        "capuchin",
        "delta_taco",
        "coop",
        *STREAMING,
        *SWAPPING,
        "keep",
        "nothing",
    }
    assert {name for name, policy in POLICIES.items() if order_of(policy) is not Order.RANKED} == own
    assert order_of(parse_policy("lru+evict")) is Order.LRU
    assert order_of(parse_policy("delta")) is Order.RANKED  # its director compares as the paper does
    assert order_of(MINE) is order_of(parse_policy("msps")) is Order.RANKED


@pytest.mark.parametrize(
    "policy", [MINE, "msps+auto", "delta", "lru+offload", "largest"], ids=lambda p: getattr(p, "name", p)
)
def test_other_policies_run_as_themselves(policy: Any) -> None:
    """They have no plan, and where malloc has no such order a thread ranks."""
    losses, stats, runtime = trained(limit=limit(0.6), policy=policy)
    assert losses == plain()
    assert stats["plans"] == 0 and stats["resident_bytes.peak"] <= stats["budget_bytes"]
    ranked = order_of(policy if isinstance(policy, Policy) else parse_policy(policy)) is Order.RANKED
    assert (stats["rankings"] > 0) == ranked
    assert not any(thread.name == "memmgr-rank" for thread in threading.enumerate())


def test_a_policy_that_fails_costs_its_order_only() -> None:
    def broken(c: Candidates) -> Any:
        raise ZeroDivisionError("on purpose")

    policy = Policy("broken", broken, DIRECTORS["auto"], PREFETCHERS["off"])
    with pytest.warns(RuntimeWarning, match="the policy 'broken' failed .*on purpose"):
        losses, stats, _ = trained(limit=limit(0.6), policy=policy)
    assert losses == plain() and stats["rankings"] == 0


@pytest.mark.parametrize("policy", ["capuchin", "delta_taco"])
def test_published_planners_are_followed(policy: str) -> None:
    steps = 2 * STEPS  # other work of the machine decides after which step there is a plan
    losses, stats, runtime = trained(steps, limit=limit(0.7), policy=policy)
    assert losses == plain(steps)
    assert stats["plans"] > 0 and stats["planned_passes"] > 0, runtime.plans.errors()
    assert stats["resident_bytes.peak"] <= stats["budget_bytes"]


def test_the_window() -> None:
    """Victims may be chosen by address (Coop): the same bits, and the budget."""
    losses, stats, _ = trained(limit=limit(0.6), policy="lru+auto", _placement="window")
    assert losses == plain()
    assert 0 < stats["resident_bytes.peak"] <= stats["budget_bytes"]
    assert stats["search_seconds"] > 0


@pytest.mark.parametrize("policy", ["keep", "nothing"])
def test_nothing_leaves(policy: str) -> None:
    losses, stats, _ = trained(limit="1GB", policy=policy)
    assert losses == plain()
    with pytest.raises(memmgr.BudgetError):
        trained(limit=limit(0.6), policy=policy)
    last = memmgr.stats()
    assert last["evictions"] == last["offloads"] == last["packed"] == 0


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
