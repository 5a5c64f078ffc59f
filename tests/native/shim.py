"""The compiled shim of the open budget."""

from __future__ import annotations

from typing import Any

import pytest

from memmgr import _budget


def native() -> Any:
    """The module; skips the test where there is no compiler."""
    manager = _budget.current()
    assert manager is not None
    if manager.native.__name__ != "memmgr._native":
        pytest.skip("these are the compiled shim's internals")
    return manager.native
