"""Enables memmgr in an unmodified script: `MEMMGR_BUDGET=12GB python train.py`.

`import torch` calls `autoload` (entry point group `torch.backends`). It costs one look at the environment when the
variable is unset, and it never raises.
"""

from __future__ import annotations

import os


def autoload() -> None:
    """Arms memmgr if `MEMMGR_BUDGET` is set."""
    if "MEMMGR_BUDGET" not in os.environ:
        return
    from . import _armed  # noqa: PLC0415 - nothing is imported when the variable is unset

    _armed.arm()
