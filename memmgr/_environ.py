"""What `import torch` calls (entry point group `torch.backends`), in every process of the environment.

It enables memmgr in an unmodified script (`MEMMGR_BUDGET=12GB python train.py`), and finishes an `import memmgr` that came
before torch's. It costs one look at the environment when neither is the case, and it never raises.
"""

from __future__ import annotations

import os
import sys


def autoload() -> None:
    """Arms memmgr if `MEMMGR_BUDGET` is set; puts CUDA's allocator in place if memmgr is wanted."""
    try:
        package = sys.modules[__package__]
        if "MEMMGR_BUDGET" not in os.environ:
            if package._wanted:
                package._install()
            else:
                # We were imported by torch, not by the script. Its own `import memmgr` shall run the package anew: that is
                # when the allocator is put in place.
                for name in (__package__, __name__):
                    sys.modules.pop(name, None)
            return
        package._install()
        from . import _armed  # nothing of ours is imported when the variable is unset

        _armed.arm()
    except Exception as error:  # a failed `import torch` would be our fault
        import warnings

        warnings.warn(f"memmgr: MEMMGR_BUDGET is ignored: {error}", stacklevel=2)
