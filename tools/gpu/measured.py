"""Measures the figures of a simulation of this GPU: the costs of the driver's calls, its link and its page-locking."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from . import figures, plans

SECONDS = 15.0
"""The longest that `driver_calls` may take; a section that would not fit is left out, and its figures keep their sources."""
SECTIONS: tuple[str, ...] = ()
"""The sections of `driver_calls` that run; none: all."""


def driver_figures() -> dict[str, Any]:
    """The table of a simulation (`figures.py`), with the figures of the driver that is here in their places.

    Raises `RuntimeError`: the measuring program cannot be made, or the driver has no device.
    """
    act = plans.driver_calls(plans.Place(Path(os.devnull)))
    if act.missing:
        raise RuntimeError(act.missing)
    compiles = ["bash"] if act.command[0] == "bash" else []  # a script that hands its arguments on
    command = [*act.command, *compiles, f"--seconds={SECONDS:g}", *SECTIONS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS + 60)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not any("value" in line for line in lines):
        errors = [str(line["error"]) for line in lines if "error" in line] + done.stderr.splitlines()[-1:]
        raise RuntimeError(errors[0] if errors else f"driver_calls ended with code {done.returncode}")
    return figures.of_check(lines, time.strftime("%Y-%m-%d"))
