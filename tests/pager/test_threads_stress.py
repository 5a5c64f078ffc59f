"""Threads on the parts of the pager that need no torch, under ThreadSanitizer (threads_stress.cpp): admission, the kernel's
slots, the thread that drops references, the locks with their ranks."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from driver import build
from driver.test_sanitizers import OPTIONS, works

PAGER = build.ROOT / "allocator" / "pager"
DOUBLES = Path(__file__).parent / "no_torch"
SOURCES = ("base/lock.cpp", "base/kernel_slots.cpp", "base/deferred_drop.cpp", "concurrency/admission.cpp")


# The longer one is for `make test-sanitized`.
@pytest.mark.parametrize("seconds", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_no_race_and_no_broken_promise(seconds: int) -> None:
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    if why_not := works("thread"):
        pytest.skip(f"-fsanitize=thread does not work here: {why_not}")
    # ThreadSanitizer knows no fences: the order that they give is that of the system's membarrier here.
    flags = ["-fsanitize=thread", "-Wno-tsan", "-I", str(DOUBLES), "-I", str(PAGER)]
    headers = [*sorted(DOUBLES.rglob("*.h")), *sorted(PAGER.glob("base/*.h")), *sorted(PAGER.glob("base/*.def"))]
    sources = [Path(__file__).with_name("threads_stress.cpp"), *(PAGER / name for name in SOURCES)]
    more = [*headers, *sorted(PAGER.glob("concurrency/*.h"))]
    program = build.build("threads_stress", sources, flags, shared=False, more=more)
    done = subprocess.run(
        [str(program), str(seconds)], capture_output=True, text=True, timeout=300, env={**os.environ, **OPTIONS}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (\w+)", done.stdout)}
    assert all(counts[what] > 0 for what in ("admitted", "alone", "foreign", "closings", "read", "held", "ended")), (
        counts
    )
