"""Random programs on the host tier give the bytes that they must, whatever order the device runs things in."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .mutations import MUTATIONS
from .workload import Workload, run_seed


@pytest.mark.parametrize("seed", range(60))
def test_seeds(seed: int) -> None:
    run_seed(seed)


@settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rng=st.randoms(use_true_random=False),
    seed=st.integers(0, 2**32 - 1),
    slab_bytes=st.sampled_from([512, 1536, 4096, 8192, 1 << 20]),
    steps=st.integers(1, 60),
)
def test_property(rng: random.Random, seed: int, slab_bytes: int, steps: int) -> None:
    Workload(rng, seed, slab_bytes).run(steps)


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = run_seed(7), run_seed(7)
    assert (first.checks, first.no_room, first.tier.reached) == (second.checks, second.no_room, second.tier.reached)
    assert first.tier.stats() == second.tier.stats()


def test_the_workload_reaches_what_it_is_for() -> None:
    """Every site is reached often, slots are reused under a full slab, and something is checked."""
    runs = [run_seed(seed) for seed in range(20)]
    for mutation in MUTATIONS:
        reached = sum(run.tier.reached.get(mutation.site, 0) for run in runs)
        assert reached >= 10, f"{mutation.site}: {reached} times in 20 runs"
    assert sum(run.no_room for run in runs) > 0
    assert sum(run.checks for run in runs) > 500


def test_an_always_idle_device_needs_no_waits() -> None:
    """The mutants fail because of order alone: where everything is done at once, none of the waits matters."""
    run_seed(3, omit=frozenset(m.site for m in MUTATIONS), prompt=True)
