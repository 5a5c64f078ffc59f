"""Marks of tests: each rule has a case in `make test-fast`, and the files that go first exist."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def test_each_rule_has_a_fast_case() -> None:
    rules = set(
        re.findall(r"^(\d+)\. \*\*", (TESTS.parent / "docs" / "develop" / "rules.md").read_text(), re.MULTILINE)
    )
    sources = [path.read_text() for path in TESTS.rglob("test_*.py") if path != Path(__file__)]
    marked = {number for text in sources for number in re.findall(r"pytest\.mark\.rule\((\d+)\)", text)}
    assert len(rules) > 10 and marked == rules


def test_the_longest_files_exist(pytestconfig: pytest.Config) -> None:
    (conftest,) = (
        p for p in pytestconfig.pluginmanager.get_plugins() if getattr(p, "__file__", "") == str(TESTS / "conftest.py")
    )
    missing = [name for name in (*conftest._LONGEST, *conftest._FAST) if not [*TESTS.glob(f"{name.rstrip('/')}*")]]
    assert not missing
