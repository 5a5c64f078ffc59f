"""policies/ imports only the standard library, numpy, scipy (where it is needed: it is an extra) and itself (relatively),
and touches no clock, file or hidden dice."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import memmgr.policies

SOURCES = sorted(Path(memmgr.policies.__file__).parent.glob("*.py"))
IMPURE_MODULES = {"time", "datetime", "os", "io", "pathlib", "threading", "socket", "subprocess", "logging"}
IMPURE_CALLS = {"open", "print", "input", "exec", "eval", "globals", "__import__"}


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.name)
def test_pure(source: Path) -> None:
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level in (0, 1), "siblings are imported with one dot"
            names = [node.module or ""] if node.level == 0 else []
        else:
            names = []
        for name in names:
            root = name.partition(".")[0]
            known = root in ("numpy", "scipy") or root in sys.stdlib_module_names
            assert known, f"{source.name}:{node.lineno} imports {name}"
            assert root != "scipy" or node.col_offset > 0, f"{source.name}:{node.lineno}: scipy at import time"
            assert root not in IMPURE_MODULES, f"{source.name}:{node.lineno} imports {name}"
        if isinstance(node, ast.Global):
            pytest.fail(f"{source.name}:{node.lineno} has a global")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in IMPURE_CALLS, f"{source.name}:{node.lineno} calls {node.func.id}"
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "np.random":
            assert node.attr == "default_rng", "the global generator"
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("default_rng", "random.Random")):
            assert node.args, "randomness without a seed"
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "random":
            assert node.attr == "Random", "the global generator"


def test_there_is_something_to_check() -> None:
    assert {"types.py", "rank.py", "directors.py", "filters.py"} <= {p.name for p in SOURCES}
