"""One contract, two natives: the compiled shim, and what replaces it where there is no compiler."""

from __future__ import annotations

import ast
import subprocess

import pytest

from .harness import HERE, run_child

CHECKS = [
    node.name
    for node in ast.parse((HERE / "contract.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and any(getattr(d, "id", "") == "check" for d in node.decorator_list)
]
_runs: dict[bool, subprocess.CompletedProcess[str]] = {}


def _all(shim: bool) -> subprocess.CompletedProcess[str]:
    """All checks in one child; torch takes longer to import than they take to run."""
    if shim not in _runs:
        _runs[shim] = run_child(["-W", "error", "contract.py"], shim)
    return _runs[shim]


@pytest.mark.parametrize("shim", [True, False], ids=["shim", "py"])
@pytest.mark.parametrize("name", CHECKS)
def test_contract(name: str, shim: bool) -> None:
    done = _all(shim)
    if f"passed {name}\n" not in done.stdout:
        # The checks after one that failed did not run: ask for this one alone.
        done = run_child(["-W", "error", "contract.py", name], shim)
    assert f"passed {name}\n" in done.stdout, done.stdout + done.stderr


def test_both_say_the_same() -> None:
    """The keys of the dictionaries, and the numeric switches of this process in their order."""
    said = [run_child(["contract.py", "dictionaries_have_the_same_keys", "circumstances_are_interned"], s) for s in (True, False)]
    assert said[0].returncode == said[1].returncode == 0, said
    assert said[0].stdout == said[1].stdout
