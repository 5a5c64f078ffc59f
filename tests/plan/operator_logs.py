"""The operator logs, where they are: `MEMMGR_SHARED`, or `shared` beside the repository."""

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("MEMMGR_SHARED", Path(__file__).resolve().parents[3] / "shared"))
NAMES = ("inceptionv4", "transformer", "treelstm", "unet")
needs_logs = pytest.mark.skipif(not (SHARED / "dtr-logs").is_dir(), reason="the operator logs are not on this machine")


def log(name: str) -> Path:
    """The file of a log."""
    return SHARED / "dtr-logs" / f"{name}.log"
