"""The check of comments and docstrings (`tools/house/check_words.py`)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "house"))
import check_words


@pytest.mark.parametrize(
    "text", ["What is kept.", "Frees whoever waits.", "Of all cells.", "Whether it is absent.", "a\nwho b"]
)
def test_unit_without_a_subject_counts(text: str) -> None:
    assert check_words.is_headless(text)


@pytest.mark.parametrize(
    "text", ["The cell is absent.", "Somewhat large.", "Prints `what`.", 'Not "Whoever waits".', "Off: none."]
)
def test_unit_with_a_subject_does_not_count(text: str) -> None:
    assert not check_words.is_headless(text)


def test_python_units_are_docstrings_and_joined_comments(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text('"""Doc."""\n# one\n# two\nx = "# no"  # three\n# four\n\n# five\ndef f():\n    "Inner."\n')
    assert check_words.units(path) == [(1, "Doc."), (2, "one two"), (4, "three four"), (7, "five"), (9, "Inner.")]


def test_cpp_units_are_joined_comments_outside_of_strings(tmp_path: Path) -> None:
    path = tmp_path / "a.cpp"
    path.write_text('// one\n// two\nauto s = "// no"; auto r = R"(// no)"; // three\n/* four\n * five */\n')
    assert check_words.units(path) == [(1, "one two"), (3, "three"), (4, "four five")]


def test_number_that_rises_or_is_not_lowered_is_a_difference() -> None:
    more, fewer = check_words.differences({"a": 3, "b": 1, "c": 2}, {"a": 2, "b": 2, "c": 2})
    assert more.startswith("a: 3") and "--lower" in fewer and fewer.startswith("b: 1")


def test_lowering_never_raises_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "words.txt").write_text("a 2\nb 2\n")
    monkeypatch.setattr(check_words, "COUNTS", tmp_path / "words.txt")
    monkeypatch.setattr(check_words, "counted", lambda: ({"a": 3, "b": 1}, check_words.Counter()))
    monkeypatch.setattr(check_words, "wrong_citations", list)
    assert check_words.main(["--lower"]) == 1
    assert check_words.allowed() == {"a": 2, "b": 1}


def test_each_cited_rule_of_a_list_has_to_exist() -> None:
    text = "(R 1; Rs 2, 3 and 40, R\n50)".replace("R", "rule")
    assert check_words.unknown_rules(text, {1, 2, 3}) == [40, 50]
