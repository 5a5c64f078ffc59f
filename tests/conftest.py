"""Shared set-up of all tests."""

from __future__ import annotations

import os

if os.environ.get("MEMMGR_SHIM") == "0":
    import memmgr._native_py

    memmgr._native_py.warned = True  # its warning has a test of its own, and would fail whichever test came first
