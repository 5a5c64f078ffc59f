"""Lines of memmgr among those of the program."""

from __future__ import annotations

import io
import sys
import types

import pytest

from memmgr.common.say import say


def test_a_line_has_the_prefix_and_none_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    say("a", "b")
    say()
    assert capsys.readouterr().err == "memmgr: a\nmemmgr: b\n"


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
