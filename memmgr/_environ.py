"""The function that `import torch` calls (entry point group `torch.backends`), in every process of the environment.

It enables memmgr in an unmodified script (`MEMMGR_BUDGET=12GB python train.py`), and finishes an `import memmgr` that came
before torch's. Otherwise it costs one look at the names of the environment. It raises only `SystemExit`: if the budget
cannot be opened, or a variable is misspelt.
"""

from __future__ import annotations

import os
import sys


def autoload() -> None:
    """Starts memmgr if `MEMMGR_BUDGET` is set; puts CUDA's allocator in place if memmgr is wanted."""
    try:
        package = sys.modules[__package__]
        if any(name.startswith("MEMMGR_") for name in os.environ):
            from .config.variables import refuse_unknown

            refuse_unknown()
        if "MEMMGR_BUDGET" not in os.environ:
            if "MEMMGR_CONF" in os.environ:
                from .config.conf import check_conf

                check_conf()
            if package._wanted:
                package._install()
            else:
                # We were imported by torch, not by the script. Its own `import memmgr` shall run the package anew: that is
                # when the allocator is put in place.
                # `config` becomes an attribute of that one. Its modules stay loaded.
                for name in (__package__, f"{__package__}.config", __name__):
                    sys.modules.pop(name, None)
            return
        package._install()
        from .api import autostart  # nothing of ours is imported when the variable is unset

        autostart.autostart()
    except Exception as error:
        if "MEMMGR_BUDGET" in os.environ:
            from .config.conf import give_up

            give_up(package._explained(error))
        else:  # a failed `import torch` would be our fault
            from .common.say import warn

            warn(f"CUDA's allocator is not in place: {error}")
