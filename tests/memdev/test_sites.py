"""Sites of planned periods: the bits of training without memmgr, with any order of the device's work.

In virtual time (test_timed.py) work runs as soon as its time has come. Here it runs late, in a random order, or on a thread.
"""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from driver import build

from . import child

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("c++") is None, reason="no C++ compiler")

POLICIES = ["auto", "offload", "torture"]
CHILDREN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "late": ("sites", "trains", {"mode": "late", "seed": 1, "policies": POLICIES}),
    "random": ("sites", "trains", {"mode": "random", "seed": 2, "policies": POLICIES}),
    "late, disturbed": ("sites", "trains", {"mode": "late", "seed": 3, "policies": ["evict"], "disturbed": 3}),
    "random, disturbed": ("sites", "trains", {"mode": "random", "seed": 4, "policies": ["offload"], "disturbed": 4}),
    "threaded, disturbed": (
        *("sites", "trains"),
        {"mode": "threaded", "seed": 5, "policies": ["auto", "evict", "offload"], "disturbed": 5},
    ),
}
# The other orders meet the same frames, and this one takes longest.
SLOW = ["threaded, disturbed"]


@pytest.fixture(scope="module")
def children() -> Iterator[Any]:
    """Runs a scenario of CHILDREN, once."""
    yield from child.each_once({name: of for name, of in CHILDREN.items() if name not in SLOW})


def _check(seen: dict[str, Any]) -> None:
    assert set(seen["left"].values()) == {0}
    assert seen["free"] == seen["plain"]["3"]
    for policy, run in seen["runs"].items():
        assert run["right"], policy
        assert run["driver_errors"] == run["tier_errors"] == 0 and not run["plan errors"], policy
        assert run["resident_bytes.peak"] <= run["budget_bytes"], policy
        assert run["evictions"] + run["offloads"] > 0, policy
        if policy != "torture":
            assert run["planned_passes"] > 5, policy
            # Frames have several addresses after some steps.
            assert sum(aliases > 64 for aliases in run["aliases"]) >= 4, (policy, run["aliases"])


@pytest.mark.parametrize("how", [name for name in CHILDREN if name not in SLOW])
def test_blocks_at_sites_have_the_bits_of_training_without_memmgr(children: Any, how: str) -> None:
    """`disturbed`: cells leave where no plan says so, and blocks are asked for that it does not know."""
    _check(children(how))


@pytest.mark.slow
@pytest.mark.parametrize("how", SLOW)
def test_blocks_at_sites_have_the_bits_of_training_without_memmgr_on_a_thread(how: str) -> None:
    module, scenario, options = CHILDREN[how]
    _check(child.run(scenario, module=f"memdev.{module}", timeout=120, **options))


def test_training_at_sites_notices_that_a_frame_forgets_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block at a site whose frame is still being copied to the host is written too early."""
    monkeypatch.setenv("MEMMGR_CORE_LIB", str(build.core_with_mutations()))
    options = {"mode": "late", "seed": 0, "policies": ["offload"], "leave_out": "frame.touched"}
    try:
        seen = child.run("trains", module="memdev.sites", **options)
    except AssertionError as error:  # wrong bytes were indices, or memory was unmapped that is in use
        assert any(f"exit status -{signal}" in str(error) for signal in (6, 11))
    else:
        assert not seen["runs"]["offload"]["right"]
