"""Shared set-up of all tests."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_compiled_code_stays() -> Iterator[None]:
    """Compiled code keeps the tensors that it was traced with, and the budgets of later tests would count them."""
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.utils.counters["stats"]["unique_graphs"]:
        dynamo.reset()
        dynamo.utils.counters.clear()
        gc.collect()
