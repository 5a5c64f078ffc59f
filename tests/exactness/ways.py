"""The two ways that memmgr has while the pager is being built, and which of them a test is about."""

from __future__ import annotations

import os

import pytest

PAGER = os.environ.get("MEMMGR_PAGER") == "1"

recorder_only = pytest.mark.skipif(PAGER, reason="the recorder only: goes with it")
pager_only = pytest.mark.skipif(not PAGER, reason="the pager only")
