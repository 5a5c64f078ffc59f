"""Shared set-up of the exactness suite."""

import gc
import importlib.util

import pytest


@pytest.fixture(scope="session", autouse=True)
def _frozen_heap() -> None:
    """Each run collects garbage first; objects made by the imports are no garbage and need not be walked 500 times."""
    import torch._dynamo  # noqa: F401
    import transformers  # noqa: F401

    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _memmgr() -> None:
    if importlib.util.find_spec("memmgr") is None or importlib.util.find_spec("memmgr").origin is None:
        pytest.fail("memmgr is not installed: pip install -e . --no-build-isolation")
