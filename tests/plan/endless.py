"""What the planner's process computes in tests. It has no torch, so neither has this."""

from __future__ import annotations

from typing import Any, NoReturn


def forever(*_: Any) -> NoReturn:
    """Never ends of itself."""
    while True:
        pass


def fails(text: str) -> NoReturn:
    """Raises."""
    raise ValueError(text)
