"""Lines of memmgr among those of the program."""

from __future__ import annotations

import io
import sys
import types

import pytest

from memmgr.common.say import say, warn


def test_a_line_has_the_prefix_and_none_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    say("a", "b")
    say()
    assert capsys.readouterr().err == "memmgr: a\nmemmgr: b\n"


def test_a_long_line_goes_on_in_the_next_one_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stderr", shown := Terminal())
    monkeypatch.setenv("COLUMNS", "60")
    say("four  words", "the budget is " + "larger than it was, and " * 4)
    lines = shown.getvalue().splitlines()
    assert lines[0] == "memmgr: four  words" and len(lines) > 2 and max(map(len, lines)) <= 60
    assert all(line.startswith("        ") for line in lines[2:])


def test_a_program_may_have_replaced_the_bars(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=lambda rows: rows))
    say("a")
    assert capsys.readouterr().err == "memmgr: a\n"


def test_a_bar_is_not_in_the_same_line(monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm = pytest.importorskip("tqdm", reason="the package tqdm is not installed")
    monkeypatch.setattr("sys.stderr", shown := io.StringIO())
    with tqdm.tqdm(total=2, file=shown) as bar:
        bar.update()
        say("the need is 1 GB")
    lines = shown.getvalue().replace("\r", "\n").splitlines()
    assert "memmgr: the need is 1 GB" in lines
    assert any("1/2" in line for line in lines[lines.index("memmgr: the need is 1 GB") :]), "the bar is drawn again"


def test_a_warning_names_the_line_of_the_program() -> None:
    """Frames of memmgr and of torch are between that line and the warning."""
    program = compile("import torch\ntorch.utils._pytree.tree_map(warn, ['the tier is full'])\n", "train.py", "exec")
    with pytest.warns(UserWarning, match="^memmgr: the tier is full$") as seen:
        exec(program, {"__name__": "__main__", "warn": warn})
    assert (seen[0].filename, seen[0].lineno) == ("train.py", 2)
