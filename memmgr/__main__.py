"""`python -m memmgr`: the command `memmgr`, for an environment whose folder of scripts is not on the path."""

from __future__ import annotations

import sys

from memmgr.tools.cli import main

sys.exit(main())
