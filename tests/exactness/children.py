"""Runs one function of a test module in a fresh interpreter, with stacks instead of silence when it hangs."""

import faulthandler
import gc
import os
import subprocess
import sys
from pathlib import Path

import forkserver

TESTS = Path(__file__).resolve().parents[1]


def start(module: str, *args: str, timeout: float, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """``python -m exactness.<module> args…`` (or a module named in full) in its own session, dumping every stack shortly before ``timeout``."""
    full = {
        **os.environ,
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "EXACTNESS_DUMP_AFTER": str(timeout - 3),
        **(env or {}),
    }
    return forkserver.Popen(
        [sys.executable, "-m", module if "." in module else f"exactness.{module}", *args],
        cwd=TESTS,
        env=full,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout: float) -> str:
    """Its output; an assertion with the output (and the stacks) if it failed or hung."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"hung for {timeout:.0f} s:\n{output[-8000:]}") from None
    assert process.returncode == 0, f"exit status {process.returncode}:\n{output[-8000:]}"
    return output


def run(module: str, *args: str, timeout: float = 60, env: dict[str, str] | None = None) -> str:
    return finish(start(module, *args, timeout=timeout, env=env), timeout)


def arm() -> None:
    """In the child: dump every thread's stack and exit if it takes too long. Modules that the program freezes stay frozen when
    a budget opens, as in tests/conftest.py, and it does not count them, which goes through all."""
    gc.unfreeze, gc.get_freeze_count = lambda: None, lambda: 0
    faulthandler.enable()
    after = float(os.environ.get("EXACTNESS_DUMP_AFTER", "0"))
    if after > 0:
        faulthandler.dump_traceback_later(after, exit=True)
