"""What the sweep over the operator database leaves out, each with its reason."""

from __future__ import annotations

from typing import Any


def why_excluded(case: Any) -> str | None:
    """The reason why the case is not run, or None."""
    return None
