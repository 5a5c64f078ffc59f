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
    try:
        from . import _armed  # nothing of ours is imported when the variable is unset

        _armed.arm()
    except Exception as error:  # a failed `import torch` would be our fault
        import warnings

        warnings.warn(f"memmgr: MEMMGR_BUDGET is ignored: {error}", stacklevel=2)
