"""Exceptions of the sweep over the operator database, each with its reason. Keep it short: each is torch's own
behaviour, and a test asserts that each entry is still needed."""

import os
import subprocess
import sys
from typing import Any

import torch

_PIVOTS = "reads LAPACK pivots (jpvt) that nobody has written (before 2.14): its bits depend on what memory held"

_WRITES_PIVOTS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)
NOT_DETERMINISTIC: dict[str, str] = (
    {} if _WRITES_PIVOTS else {"linalg.lstsq": _PIVOTS, "linalg.lstsq.grad_oriented": _PIVOTS}
)
"""Not compared: two unmanaged runs may differ. memmgr must not recompute them either (rule 8)."""

RAISES: dict[str, str] = {
    "abs": "in place: not for complex numbers",
    "as_strided.partial_views": "the third sample needs more storage than a private copy of its input has",
    "float_power": "in place: the result is float64 whatever the input was",
    "native_layer_norm": "create_graph without weights: torch's formula gets an undefined tensor",
    "nn.functional.ctc_loss": "create_graph: no second derivative",
}
"""Some samples raise without memmgr too; the test compares that they raise the same with it."""

SKIPPED: dict[str, str] = {}
"""Not run at all."""


def is_skipped(case: Any) -> bool:
    return case.op in SKIPPED or case.op in NOT_DETERMINISTIC


_PROBE = """
import torch
torch.manual_seed(0)
A, B = torch.randn(2, 5, 3), torch.randn(2, 5, 3)
print(torch.linalg.lstsq(A, B).solution.numpy().tobytes().hex())
"""


def lstsq_reads_unwritten_memory() -> bool:
    """In two processes whose malloc fills allocated memory, with zeros and with other values (glibc)."""
    found = []
    for perturb in ("255", "1"):  # memory is filled with the complement
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "MALLOC_PERTURB_": perturb},
        )
        found.append(done.stdout)
    return found[0] != found[1]
