"""Threads on the arena and its searches, both tiers, a device's memory and the double, in C++, under AddressSanitizer and
ThreadSanitizer."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from . import build

SECONDS = (1, 3, 10, 60)  # the next, where a machine with other load got through too few rounds
ROUNDS = 100
UNOPTIMIZED = {"address": ["-O0"]}  # compiles in two thirds of the time; nine tenths of the arena's rounds are left
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
    "FAKE_DRIVER_MODE": "threaded",
}


def works(sanitizer: str) -> str:
    """Why this machine cannot run such programs, or ''."""
    source = build.FOLDER / "empty.cpp"
    build.FOLDER.mkdir(parents=True, exist_ok=True)
    source.write_text("int main() { return 0; }\n")
    try:
        program = build.build(f"empty_{sanitizer}", [source], [f"-fsanitize={sanitizer}"], shared=False)
    except AssertionError as error:
        return str(error)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr


# In `make test` the tier and the device run under ThreadSanitizer only: compiling them once more takes a minute, and their
# threads share the arena's code for blocks.
CASES = [
    pytest.param(
        sanitizer, stress, marks=[] if sanitizer == "thread" or stress == "arena_stress" else [pytest.mark.slow]
    )
    for sanitizer in ("address", "thread")
    for stress in ("arena_stress", "tier_stress", "device_stress")
]


@pytest.mark.parametrize(("sanitizer", "stress"), CASES)
def test_threads_under_a_sanitizer(sanitizer: str, stress: str, tmp_path: Path) -> None:
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    why_not = works(sanitizer)
    if why_not:
        pytest.skip(f"-fsanitize={sanitizer} does not work here: {why_not}")
    flags = [f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer", *UNOPTIMIZED.get(sanitizer, ())]
    core = build.core(f"core_{sanitizer}", flags)
    on_host = stress == "arena_stress"  # the arena that the CPU device has, with searches, a file below it, and forks
    program = build.build(
        f"{stress}_{sanitizer}", [Path(__file__).with_name(f"{stress}.cpp"), core], flags, shared=False
    )
    for seconds in SECONDS:
        words = [str(seconds), str(tmp_path)] if on_host else [str(build.fake_driver(sanitizer)), str(seconds)]
        command = [str(program), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, **OPTIONS})
        assert done.returncode == 0, done.stdout + done.stderr
        rounds = re.search(r"(\d+) rounds", done.stdout)
        if rounds is not None and int(rounds[1]) > ROUNDS and (not on_host or _by_a_search(done.stdout)):
            return
    raise AssertionError(done.stdout)


def _by_a_search(said: str) -> bool:
    return re.search(r" [1-9]\d* by a search", said) is not None
