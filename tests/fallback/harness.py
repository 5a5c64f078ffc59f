"""Both natives behind one interface. Only one can be active in a process, so the accounting path runs in a child."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def run_child(
    arguments: list[str], shim: bool, timeout: float = 600, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python with or without the shim; `arguments` as on its command line."""
    environment = {**os.environ, "MEMMGR_SHIM": "1" if shim else "0", **variables}
    environment.pop("MEMMGR_BUDGET", None)
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=timeout, env=environment, cwd=HERE
    )
