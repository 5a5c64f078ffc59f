"""Leaving out any one wait of the host tier gives wrong bytes; the list of them is complete."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from . import build
from .fake import LATE, PROMPT, RANDOM, FakeDriver
from .workload import WrongBytes, run_seed

SOURCE = (build.CORE / "host_tier.cpp").read_text()
NAMES = re.findall(r'\bOrder<"([^"]+)">', SOURCE)
SEEDS = range(100)

# What orders work, or waits for it.
ORDERING = r"StreamWaitEvent|StreamSynchronize|EventSynchronize|CtxSynchronize|WaitForTouched|WaitForTail|->Touch"


@pytest.mark.parametrize("name", NAMES)
def test_leaving_it_out_is_noticed(core, driver: FakeDriver, name: str, tmp_path: Path) -> None:
    """At least one seed fails without it, by its bytes, and the same seed passes with it."""
    # Only what lies between the slab and a file calls these.
    ladder: dict[str, Any] = {"folder": tmp_path, "slab": 4096, "below": 12 << 10}
    tier = ladder if name.startswith(("reserve.", "fill.")) else {}
    for seed in SEEDS:
        for mode in (RANDOM, LATE):
            try:
                run_seed(core, driver, seed, mode, omit=name, **tier)
            except WrongBytes:
                run_seed(core, driver, seed, mode, **tier)
                return
    pytest.fail(f"no seed notices that {name} is missing")


def test_the_list_is_complete(core) -> None:
    """Each name stands at one place, the library knows it, and the header's table has it."""
    assert len(NAMES) == len(set(NAMES)) > 10
    assert set(NAMES) <= set(core.mm_test_wait_names().decode().split())
    table = (build.CORE / "host_tier.h").read_text().split("Words:")[1].split("#pragma once")[0]
    assert set(re.findall(r"\b[a-z]+\.[a-z_]+\b", table)) - {"test_host_tier.py", "ordering.h"} == set(NAMES)


def test_no_wait_passes_by_the_names() -> None:
    """Calls that order work stand in an Order, or in the two helpers that are called in one; each has its reason."""
    direct = [line.strip() for line in SOURCE.splitlines() if re.search(ORDERING, line) and "Order<" not in line]
    assert direct == [
        # Queue: only after an error.
        "if (error != 0) driver().StreamSynchronize(link.stream);",
        # WaitFor and Synchronize.
        "return DriverErrno(driver().StreamWaitEvent(waiter, operation->end, 0));",
        "const CUresult result = driver().EventSynchronize(end);",
    ]
    for helper in ("WaitFor", "Synchronize"):
        calls = [line for line in SOURCE.splitlines() if re.search(rf"(?<![\w:.]){helper}\(", line)]
        assert calls and all("Order<" in line for line in calls), calls


def test_a_device_that_is_always_idle_needs_none(core, driver: FakeDriver) -> None:
    """What fails above is order alone: with nothing late, leaving out any wait changes nothing."""
    for name in NAMES:
        for seed in range(3):
            run_seed(core, driver, seed, PROMPT, omit=name)


def test_other_names_are_refused(core) -> None:
    assert core.mm_test_leave_out(b"no.such") == -1
    assert core.mm_test_leave_out(None) == core.mm_test_leave_out(b"") == 0
