"""One contract, two natives: the compiled shim, and what replaces it where there is no compiler."""

from __future__ import annotations

import ast
import subprocess

import pytest

from .harness import HERE, run_child

FOUND = [
    (node.name, getattr(decorator, "id", ""))
    for node in ast.parse((HERE / "contract.py").read_text()).body
    if isinstance(node, ast.FunctionDef)
    for decorator in node.decorator_list
]
CHECKS = [(name, shim) for name, kind in FOUND if kind == "check" for shim in (True, False)]
CHECKS += [(name, False) for name, kind in FOUND if kind == "py_check"]
_runs: dict[bool, subprocess.CompletedProcess[str]] = {}


def _all(shim: bool) -> subprocess.CompletedProcess[str]:
    """All checks in one child; torch takes longer to import than they take to run."""
    if shim not in _runs:
        _runs[shim] = run_child(["-W", "error", "contract.py"], shim)
    return _runs[shim]


@pytest.mark.parametrize(("name", "shim"), CHECKS, ids=[f"{name}-{'shim' if shim else 'py'}" for name, shim in CHECKS])
def test_contract(name: str, shim: bool) -> None:
    done = _all(shim)
    if f"passed {name}\n" not in done.stdout:
        # The checks after one that failed did not run: ask for this one alone.
        done = run_child(["-W", "error", "contract.py", name], shim)
    assert f"passed {name}\n" in done.stdout, done.stdout + done.stderr


def _said(*checks: str) -> list[list[str]]:
    runs = [run_child(["-W", "error", "contract.py", *checks], shim) for shim in (True, False)]
    assert all(run.returncode == 0 for run in runs), [run.stderr for run in runs]
    return [run.stdout.splitlines() for run in runs]


# Where blocks lie is the arena's affair, and there is none without the shim.
PLACEMENT = {"set_placement", "price", "arena_address"}
# A pass is measured by the shim alone, and plans are made of what it measured.
TRACING = {"trace_begin", "trace_end", "trace_take", "trace_count", "trace_blocks", "trace_replayed"}
PLANS = {"add_plan", "drop_plans", "plan_leads", "plan_settle", "plan_brings_back"}
BITS = {"as_bits", "bits_seconds"}  # looks at every byte
DEVICES = {"device_stats", "use_plugin"}  # need the core


def test_the_same_figures_and_switches() -> None:
    """The keys of the dictionaries, and the numeric switches of this process in their order."""
    shim, py = _said("dictionaries_have_the_same_keys", "circumstances_are_interned")
    # Searches and fragmentation are an arena's; of the rest every figure is there.
    there, here = (next(set(line.split()) for line in lines if line.startswith("arena ")) for lines in (shim, py))
    assert here <= there and {"resident_peak_bytes", "live_bytes", "reclaims", "failures"} <= here
    assert [x for x in shim if not x.startswith("arena ")] == [x for x in py if not x.startswith("arena ")]


def test_the_same_names() -> None:
    """Every function of the shim is there and no other; the objects have its fields, and may have more."""
    shim, py = ({line.split()[0]: set(line.split()[1:]) for line in lines} for lines in _said("api_is_complete"))
    # While a graph is captured the shim's core says no by itself; the twin never runs an op again that has drawn.
    drawn = {"call_drawn"}
    assert shim["functions"] - PLACEMENT - TRACING - PLANS - BITS - DEVICES - drawn == py["functions"] - {
        "set_capturing"
    }
    for kind in ("Cell", "Ref", "Recipe"):
        assert shim[kind] and not shim[kind] - py[kind], kind
