"""Compiles the libraries that tests load, before the tests, which would wait for one another: `python
tests/compiled.py`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from driver import build
from memdev.build import library
from pager.extension import library as extension

from memmgr.native import binding

if build.compiler() is not None:
    binding.load()
    build.fake_driver()
    build.core_with_mutations()
    library()
    extension()
