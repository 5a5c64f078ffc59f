"""What the sweep over the operator database leaves out or compares otherwise, each with its reason.

Keep it short: everything here is torch's own behaviour, and a test asserts that each entry is still needed.
"""

from __future__ import annotations

from typing import Any

import torch

from . import sweep

_PIVOTS = "reads LAPACK pivots (jpvt) that nobody has written, so its bits depend on what the memory held before"

NOT_DETERMINISTIC: dict[str, str] = {
    "linalg.lstsq": _PIVOTS,
    "linalg.lstsq.grad_oriented": _PIVOTS,
}
"""Not compared: two unmanaged runs may differ. memmgr must not recompute them either (rule 7)."""

_SPREAD = (
    "its backward asks in C++ whether any dispatch mode is on and then multiplies by a mask instead of filling by one: "
    "-0.0 where there was 0.0"
)
_PRODUCT = "its backward asks in C++ whether any dispatch mode is on and then takes another formula for the same product"

MODE_DEPENDENT: dict[str, str] = {}
"""Compared with an unmanaged run under an *empty* dispatch mode instead: torch takes another way under any mode."""

SKIPPED: dict[str, str] = {}
"""Not run at all."""


def is_skipped(case: Any) -> bool:
    return case.op in SKIPPED or case.op in NOT_DETERMINISTIC


def unwritten_memory_matters(name: str) -> bool:
    """Do unmanaged runs of some sample differ when small free blocks held other values before?"""
    for case in sweep.cases_of(name, {torch.float32}):
        sweep.fill_free_memory(0)
        first = sweep.run(case)
        for value in (1, -7, 1):
            sweep.fill_free_memory(value)
            if first.differences(sweep.run(case)):
                return True
    return False
