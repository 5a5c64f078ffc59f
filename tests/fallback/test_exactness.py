"""The exactness cases that matter most, without the compiled shim. The whole of tests/exactness runs so with MEMMGR_SHIM=0."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .exact import names
from .harness import HERE

_done: list[subprocess.CompletedProcess[str]] = []


def _all() -> subprocess.CompletedProcess[str]:
    """One child for all: importing takes longer than most cases."""
    if not _done:
        environment = {**os.environ, "MEMMGR_SHIM": "0", "OMP_NUM_THREADS": "1"}
        environment.pop("MEMMGR_BUDGET", None)
        command = [sys.executable, "-X", "faulthandler", "-m", "fallback.exact"]
        _done.append(
            subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=HERE.parent)
        )
    return _done[0]


@pytest.mark.parametrize("name", names())
def test_same_bits(name: str) -> None:
    done = _all()
    assert f"passed {name}\n" in done.stdout, done.stderr[-8000:]


def test_what_is_not_known_to_reproduce() -> None:
    """tests/exactness/test_trust.py as it is."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(HERE.parent / "exactness/test_trust.py"),
    ]
    environment = {**os.environ, "MEMMGR_SHIM": "0", "OMP_NUM_THREADS": "1"}
    environment.pop("MEMMGR_BUDGET", None)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout[-8000:]
