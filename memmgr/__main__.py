"""`python -m memmgr`: the command `memmgr`, for whoever has no folder of scripts on the path."""

from __future__ import annotations

import sys

from memmgr.tools.cli import main

sys.exit(main())
