"""Two ways exist, and some tests are about one of them."""

from __future__ import annotations

import os

import pytest

PAGER = os.environ.get("MEMMGR_PAGER") == "1"
"""Budgets of this run open over the pager."""

recorder_only = pytest.mark.skipif(PAGER, reason="the recorder only: goes with it")
