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
    "the backward asks in C++ whether any dispatch mode is on (isTensorSubclassLike) and then multiplies by a mask, "
    "which gives -0.0, instead of filling by the mask, which leaves 0.0"
)
_PRODUCT = (
    "the backward asks in C++ whether any dispatch mode is on (isTensorSubclassLike) and then takes the formula that can "
    "do with zeros in the input, whether there are any or not: the same up to rounding"
)
_PRODUCT_TWICE = _PRODUCT + "; only under create_graph"

MODE_DEPENDENT: dict[str, str] = {
    "cumprod": _PRODUCT_TWICE,
    "masked.cumprod": _PRODUCT_TWICE,
    "max.reduction_no_dim": _SPREAD,
    "median": _SPREAD,
    "min.reduction_no_dim": _SPREAD,
    "nanmedian": _SPREAD,
    "prod": _PRODUCT,
}
"""Compared with an unmanaged run under an *empty* dispatch mode where they differ from the plain one: the recorder is a
dispatch mode, and torch takes another way under any."""

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
