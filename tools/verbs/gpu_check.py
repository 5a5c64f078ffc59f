from __future__ import annotations

import argparse

from memmgr.tools.common.usage_error import UsageError
from memmgr.tools.gpu import check

__doc__ = check.__doc__
add_arguments = check.add_arguments


def run(args: argparse.Namespace) -> int:
    """Runs the acts; 0 when all held."""
    try:
        return check.run(args)
    except check.Wrong as wrong:
        raise UsageError(str(wrong)) from None
