"""Deleting any one wait or deferral of the host tier gives wrong bytes; the list of them is complete."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from .double import HostUseAfterFree
from .mutations import MUTATIONS, Mutation
from .workload import WrongBytes, run_seed

SEEDS = range(100)
HELPERS = ("_wait", "_free_after", "_synchronize")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.site)
def test_deleting_it_is_noticed(mutation: Mutation) -> None:
    """At least one seed fails without it, by its bytes, and the same seed passes with it."""
    for seed in SEEDS:
        try:
            run_seed(seed, omit=frozenset([mutation.site]))
        except (WrongBytes, HostUseAfterFree):
            run_seed(seed)
            return
    pytest.fail(f"no seed notices that {mutation.site} is missing")


def _host_source() -> ast.Module:
    spec = importlib.util.find_spec("memmgr.tiers.host")
    assert spec is not None and spec.origin is not None
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def _calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    """All calls `something.name(...)` in the tree, as (dotted name, call)."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return [(ast.unparse(call.func), call) for call in calls]


def test_the_list_is_complete() -> None:
    """Each call of a helper names its site by a constant, each site is there once, and the list has all of them."""
    found = []
    for name, call in _calls(_host_source()):
        helper = name.removeprefix("self.")
        if helper in HELPERS:
            assert name == f"self.{helper}"
            site = call.args[0]
            assert isinstance(site, ast.Constant) and isinstance(site.value, str), ast.unparse(call)
            found.append((site.value, helper))
    assert sorted(found) == sorted((m.site, m.helper) for m in MUTATIONS)


def test_no_wait_passes_by_the_helpers() -> None:
    """The StreamApi's ways to order work are called in the helpers, once each, and nowhere else."""
    tree = _host_source()
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {f.name: [name for name, _ in _calls(f)] for f in functions if f.name in HELPERS}
    assert inside == {
        "_wait": ["self._streams.wait"],
        "_free_after": ["self._streams.free"],
        "_synchronize": ["self._streams.synchronize"],
    }
    ordering = ("wait", "free", "synchronize", "settle", "wait_event", "wait_stream", "record_stream")
    direct = [name for name, _ in _calls(tree) if "streams" in name.lower() and name.rsplit(".", 1)[1] in ordering]
    assert sorted(direct) == ["self._streams.free", "self._streams.synchronize", "self._streams.wait"]
    # An alias (`wait = self._streams.wait`) would escape the check of calls: nobody takes such an attribute uncalled.
    taken = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in ordering]
    called = {id(call.func) for _, call in _calls(tree)}
    assert all(id(node) in called for node in taken)
