"""The folders that libraries compiled on this machine may be in. Torch is not imported here."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

VARIABLE = "MEMMGR_CACHE"


def wanted() -> Path | None:
    """`MEMMGR_CACHE`, else the user's cache folder; None: the user has no home."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "memmgr"
    except RuntimeError:
        return None


def temporary() -> Path:
    """The folder among the temporary files, where the wanted one cannot be written."""
    return Path(tempfile.gettempdir()) / f"memmgr-cache-{os.getuid()}"


def existing() -> list[Path]:
    """Those of this user that are there."""
    first, second = wanted(), temporary()
    found = [] if first is None or not first.is_dir() else [first]
    ours = second.is_dir() and not second.is_symlink() and second.stat().st_uid == os.getuid()
    return [*found, second] if ours else found
