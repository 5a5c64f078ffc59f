"""How an optional package is installed."""

from __future__ import annotations

RELEASED = False
"""A package index has memmgr; until then its extras are installed in a checkout."""


def pip_line(extra: str) -> str:
    """The command that installs the packages of an extra."""
    return f"pip install 'memmgr[{extra}]'" if RELEASED else f"pip install '.[{extra}]' in memmgr's checkout"
