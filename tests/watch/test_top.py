"""`memmgr top`: its output, the full screen and its keys, and bad input."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import os
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from memmgr.observe.states import KINDS
from memmgr.telemetry import stream
from memmgr.tools import cli
from memmgr.tools.verbs import top
from memmgr.tools.view import run_state, top_text
from memmgr.tools.view.attach import Attached
from memmgr.tools.view.run_state import RunState
from watch import lines
from watch.test_watched import SCREEN

REQUEST = {"interval_seconds": 0.5, "want": ["cells"]}


# -- printed --


def test_once(capsys: pytest.CaptureFixture[str]) -> None:
    with lines.served(4242, lines.lines()):
        assert cli.main(["top", "4242", "--once", "--ascii"]) == 0
    assert capsys.readouterr().out.rstrip() == SCREEN


def test_all_processes(capsys: pytest.CaptureFixture[str]) -> None:
    with lines.served(4242, lines.lines()), lines.served(77, lines.lines(20, pid=77)):
        assert cli.main(["top", "--once"]) == 0
        shown = capsys.readouterr().out
        assert "\n4242  python" in "\n" + shown and "\n77  python" in "\n" + shown and "░" in shown
        assert cli.main(["top", "--once", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["pid"] for one in found] == [77, 4242]
    assert found[1]["sample"]["seconds"] == 29.5 and len(found[1]["cells"]["cells"]) == 6


def test_json_is_the_stream_with_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    found = [*lines.lines(), lines.end()]
    with lines.served(4242, found, hang_up=True):
        assert cli.main(["top", "--json", "4242"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [{"pid": 4242, **f} for f in found]


def test_the_plain_screen_is_repeated_until_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with lines.served(4242, [*lines.lines(), lines.end()], hang_up=True):
        assert cli.main(["top", "4242", "--interval", "0.02"]) == 0
    shown = capsys.readouterr().out
    assert "ended  20 passes  after 29.5 s" in shown and "\x1b" not in shown


# -- bad input: one line, code 2 --


def test_a_process_that_goes_without_an_end_has_a_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    with lines.served(4242, lines.lines(), hang_up=True):
        assert cli.main(["top", "4242", "--ascii"]) == 0
        shown = capsys.readouterr().out.rstrip().splitlines()
        assert shown[-1] == "process 4242 has gone: no end of its budget came (killed?)"
        assert cli.main(["top", "4242", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"pid": 4242, "type": "gone", "seconds": 29.5}


def test_a_log_has_its_last_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = lines.written(tmp_path / "run.jsonl", [*lines.lines(), lines.end()])
    assert cli.main(["top", str(log), "--ascii"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("4242  python train.py") and "ended" in shown.out.splitlines()[0]
    assert shown.err == f"memmgr top: the whole run:  memmgr report {log}\n"
    killed = lines.written(tmp_path / "killed.jsonl", lines.lines())
    assert cli.main(["top", str(killed)]) == 0
    shown = capsys.readouterr()
    assert "  no end (killed?)  " in shown.out.splitlines()[0] and "it has no end" in shown.err
    assert "is a log" in _fails_with(capsys, str(log), "--json")


def test_the_log_of_a_process_that_runs_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_state, "processes", lambda: [4242])
    assert cli.main(["top", str(lines.written(tmp_path / "run.jsonl", lines.lines()))]) == 0
    shown = capsys.readouterr()
    assert "  running  " in shown.out.splitlines()[0]
    assert "process 4242 still writes it: memmgr top 4242 shows the run as it is now" in shown.err


def _fails(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["top", *words]) == 2
    shown = capsys.readouterr()
    assert len(shown.err.strip().splitlines()) == 1 and shown.out == ""
    return shown.err


def test_who_cannot_be_watched(
    capsys: pytest.CaptureFixture[str], runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert f"there is no process {gone.pid}" in _fails(capsys, str(gone.pid))
    assert "no open memmgr budget" in _fails(capsys, str(os.getpid()), "--once")
    assert "no process of this user" in _fails(capsys, "--once")
    monkeypatch.setattr(top, "ANSWER_SECONDS", 0.1)
    with lines.served(4242, []):
        assert "does not answer" in _fails(capsys, "4242", "--once")
    with lines.served(4242, [lines.hello(protocol=9)]):
        assert "writes telemetry version 9" in _fails(capsys, "4242", "--json")
    with lines.served(4242, [{"type": "error", "text": "8 readers are connected already"}], hang_up=True):
        assert "8 readers" in _fails(capsys, "4242", "--once")
    with lines.served(4242, [{"type": "sample"}]):
        assert "not of this format" in _fails(capsys, "4242", "--once")


def test_no_permission(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, act: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with lines.served(os.getpid(), lines.lines()):
        monkeypatch.setattr(stream, "_at", refuse)  # not by the file's mode: root may connect to anything
        assert "no permission to reach" in _fails(capsys, str(os.getpid()), "--once")


@pytest.mark.parametrize("beside", ["--json", "--job", "--picture"])
def test_what_is_not_a_screen_is_not_in_ascii(beside: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [beside, str(tmp_path / "x.svg")] if beside == "--picture" else [beside]
    assert beside in _fails(capsys, "--ascii", *words)


@pytest.mark.parametrize("words", [["0"], ["-5"], ["abc"], ["99999999999"], ["--interval", "0"], ["--interval", "nan"]])
def test_arguments_that_make_no_sense(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["top", *words])
    assert end.value.code == 2 and "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_terminals_of_all_encodings(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    with lines.served(4242, [lines.hello(command=["日本.py"]), *lines.lines()[1:]]):
        assert cli.main(["top", "4242", "--once"]) == 0
    out.flush()
    shown = out.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    assert ("░" in shown) == (encoding == "utf-8") and "budget 8 MB" in shown


# -- the full screen --


def _app(follow: bool = False) -> Any:
    pytest.importorskip("textual", reason="the full screen is the extra `top`")
    from memmgr.tools.view.top_app import TopApp

    attached = [Attached(pid, REQUEST) for pid in stream.processes()]
    return TopApp(attached, interval=0.1, follow=follow)


def _text(app: Any) -> str:
    """The text on the screen, without colours."""
    return "\n".join(
        "".join(segment.text for segment in strip).rstrip() for strip in app.screen._compositor.render_strips()
    )


def _drive(app: Any, act: Callable[[Any], Awaitable[None]], size: tuple[int, int] = (80, 24)) -> None:
    async def driven() -> None:
        async with app.run_test(size=size) as pilot:
            await pilot.pause(0.2)
            await act(pilot)

    asyncio.run(driven())


def test_the_screen_at_80_by_24() -> None:
    with lines.served(4242, lines.lines()):
        app = _app()

        async def look(pilot: Any) -> None:
            for _ in range(100):  # the footer is drawn last, and not at once on a busy machine
                shown = _text(app).splitlines()
                if len(shown) == 24:
                    break
                await pilot.pause(0.1)
            assert len(shown) == 24
            assert shown[0].startswith("4242  python train.py") and shown[0].endswith("backward  5 passes  29.5 s")
            assert shown[1].startswith("budget 8 MB  now 4.2 MB (52%)")
            assert (
                "░" in shown[3]
                and "╱" in shown[4]
                and "┴" in shown[7]
                and "─" in "".join(shown[2:5])
                and shown[8].startswith("▓ fixed")
            )
            assert shown[10].startswith("▓▓▓▓▓▓▓▓████████········▄▄▄▄") and shown[12].startswith("· free")
            assert shown[13] == " 1 modules  2 tensors  3 states  4 events   9.5 s old  times: of the last 30 s"
            assert shown[12].endswith("leaving  9.5 s old"), "the map is of then"
            assert shown[14].split() == ["module", "resident", "fixed", "absent", "recomputing", "waiting"]
            assert shown[15].split()[:3] == ["Net.first.1", "2", "MB"]
            assert all(key in shown[23] for key in ("q quit", "p pause", "s sort", "/ filter", "? help"))

        _drive(app, look)


def test_keys() -> None:
    with lines.served(77, lines.lines(20, pid=77)), lines.served(4242, [*lines.lines(), lines.end()], hang_up=True):
        app = _app()

        async def press(pilot: Any) -> None:
            async def after(*keys: str) -> str:
                await pilot.press(*keys)
                await pilot.pause()
                return _text(app)

            assert "77 (1 of 2)" in await after()
            assert "4242 (2 of 2)" in await after("right") and "ended" in _text(app).splitlines()[0]
            assert "77 (1 of 2)" in await after("left")
            shown = await after("s")
            assert "by age" in shown and shown.splitlines()[15].split()[1:3] == ["kB", "evicted"]
            shown = await after("2")
            assert shown.splitlines()[14].split() == ["size", "state", "what", "module", "age", "cost"]
            shown = await after("1")
            assert "recomputing" in shown.splitlines()[14] and "Net.first.1" in shown.splitlines()[15]
            shown = await after("3")
            assert "optimizer states" in shown and "Net.first.0" in shown
            assert "3 lines were dropped" in await after("tab")
            assert "Net.first.1" in await after("tab", "tab")
            from memmgr.tools.view.top_app import HELP

            shown = await after("question_mark")
            wanted = [line for line in re.sub(r"\[/?b\]", "", HELP).splitlines() if line]
            assert [line for line in wanted if f" {line}\n" not in shown + "\n"] == [], "a line is wrapped or cut off"
            assert "closes this" not in await after("x")
            shown = await after("slash", *"second", "enter")
            assert "Net.second.1" in shown and "Net.first" not in shown and "with 'second'" in shown
            assert "Net.first" in await after("escape")
            assert "paused" in await after("p") and "paused" not in await after("p")
            await pilot.press("q")

        _drive(app, press)
    assert all(one.over for one in app._attached)


def test_the_first_screen_does_not_wait_for_the_process() -> None:
    """One op may hold the interpreter for a while; the process is found at once."""
    with lines.served(4242, []):
        app = _app()

        async def look(pilot: Any) -> None:
            shown = _text(app).splitlines()
            assert shown[0].startswith("4242") and "waiting" in shown[0] and "waiting for the map" in "".join(shown)
            assert "waiting for figures" in "".join(shown)

        _drive(app, look)


def test_what_has_not_changed_is_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with lines.served(4242, lines.lines()):
        app = _app()

        async def look(pilot: Any) -> None:
            table, above = app.query_one("DataTable"), app.query_one("#above")
            drawn: list[str] = []
            monkeypatch.setattr(table, "clear", lambda **_: drawn.append("table"))
            monkeypatch.setattr(above, "update", lambda _: drawn.append("above"))
            app.draw()
            app.draw()
            assert not drawn
            app._attached[0].watched.sample["resident_bytes"] += 1_000_000
            app.draw()
            assert drawn == ["above"]

        _drive(app, look)


@pytest.mark.parametrize("panel", ["1", "2", "3", "4"])
def test_no_panel_is_wider_than_the_screen(panel: str) -> None:
    with lines.served(4242, lines.lines()):
        app = _app()

        async def look(pilot: Any) -> None:
            await pilot.press(panel)
            await pilot.pause()
            assert app.query_one("DataTable").max_scroll_x == 0

        _drive(app, look)


def test_what_has_not_come_yet_is_said_and_a_silent_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with lines.served(4242, [lines.hello(), *(lines.sample(i) for i in range(9)), lines.cells()]):
        app = _app()

        async def look(pilot: Any) -> None:
            assert "4 events   waiting for" not in _text(app), "the modules are there"
            await pilot.press("3")
            await pilot.pause()
            assert "4 events   waiting for figures" in _text(app) and "silent" not in _text(app)
            total = app._attached[0].watched.sample["total"]
            for kind in KINDS:
                total |= {f"{figure}_bytes.{kind}": 1 for figure in ("resident", "offloaded", "moved")}
            app.draw()
            await pilot.pause()
            assert "4 events   waiting for modules" in _text(app), "their sums are there"
            app._attached[0]._heard -= 30.0
            await pilot.pause(0.3)
            assert "silent for" in _text(app).splitlines()[0]
            await pilot.press("p")
            await pilot.pause()
            assert "silent for" not in _text(app).splitlines()[0], "who does not listen cannot say that"

        _drive(app, look)


def test_a_process_that_is_killed_in_a_pause_does_not_look_alive() -> None:
    with contextlib.ExitStack() as serving:
        serving.enter_context(lines.served(4242, lines.lines()))
        app = _app()

        async def look(pilot: Any) -> None:
            await pilot.press("p")
            await pilot.pause(0.3)
            assert "gone" not in _text(app).splitlines()[0]
            serving.close()
            await pilot.pause(0.5)
            assert "gone (killed?)" in _text(app).splitlines()[0]

        _drive(app, look)


def test_a_process_that_was_killed_does_not_look_alive() -> None:
    with lines.served(4242, lines.lines(), hang_up=True):
        app = _app()

        async def look(pilot: Any) -> None:
            first = _text(app).splitlines()
            assert first[0].endswith("gone (killed?) 0 ago  5 passes  after 29.5 s")
            app._attached[0]._heard -= 12.0
            await pilot.pause(0.3)
            shown = _text(app).splitlines()
            assert re.search(r"gone \(killed\?\) 1\d s ago", shown[0]) and "silent" not in shown[0]
            assert (old := re.search(r"([\d.]+) s old", shown[13])) and float(old[1]) >= 21.5, "what it sent ages, too"

        _drive(app, look)


def test_while_a_filter_is_typed_keys_are_letters() -> None:
    with lines.served(4242, lines.lines()):
        app = _app()

        async def press(pilot: Any) -> None:
            await pilot.press("slash", "q", "s", "left", "p", "2")
            await pilot.pause()
            assert app._wanted == "qp2s" and not app._paused and app._panel == "modules"

        _drive(app, press)


def test_processes_that_begin_later_are_followed_and_the_end_is_shown() -> None:
    with lines.served(77, lines.lines(20, pid=77)):
        app = _app(follow=True)

        async def look(pilot: Any) -> None:
            with lines.served(4242, lines.lines()):
                app._look_for_more()
                app._look_for_more()
                await pilot.pause(0.3)
                assert "77 (1 of 2)" in _text(app)

        _drive(app, look)


def test_another_version_is_said_on_the_screen() -> None:
    with lines.served(77, [lines.hello(77, protocol=9)]):
        app = _app()

        async def look(pilot: Any) -> None:
            assert "writes telemetry version 9" in _text(app) and "lost" in _text(app).splitlines()[0]

        _drive(app, look)


@pytest.mark.parametrize("size", [(20, 8), (200, 60)])
def test_any_size(size: tuple[int, int]) -> None:
    with lines.served(4242, lines.lines()):

        async def look(pilot: Any) -> None:
            assert "4242" in _text(app)

        app = _app()
        _drive(app, look, size)


def test_on_a_terminal() -> None:
    """A process of its own on a pseudo-terminal: it draws on standard output, obeys q, and leaves the terminal as it was."""
    pytest.importorskip("textual", reason="the full screen is the extra `top`")
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    before = termios.tcgetattr(theirs)
    with lines.served(4242, lines.lines()):
        env = {**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
        command = [sys.executable, "-P", "-m", "memmgr.tools.cli", "top", "4242"]
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=env) as process:
            shown = b""
            deadline = time.monotonic() + 60
            while b"Net.first.1" not in shown and time.monotonic() < deadline:
                if select.select([ours], [], [], 1.0)[0]:
                    shown += os.read(ours, 65536)
            os.write(ours, b"q")
            while process.poll() is None and time.monotonic() < deadline:
                if select.select([ours], [], [], 0.1)[0]:
                    shown += os.read(ours, 65536)
            assert process.wait(10) == 0 and process.stderr is not None and process.stderr.read() == b""
    assert "budget 8 MB" in shown.decode(errors="replace")
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("textual", reason="the full screen is the extra `top`")
    out = tmp_path / "top.svg"
    with lines.served(4242, lines.lines(70)):
        assert cli.main(["top", "4242", "--picture", str(out)]) == 0
    shown = capsys.readouterr()
    assert shown.out.strip() == str(out) and "has ended" not in shown.err
    drawn = out.read_text()
    assert drawn.startswith("<svg") and "Net.first.1" in drawn and "budget" in drawn and "url(http" not in drawn
    assert "does not exist" in _fails_with(capsys, "--picture", str(tmp_path / "no" / "top.svg"))
    assert "does not end in .svg" in _fails_with(capsys, "--picture", str(tmp_path / "top.png"))
    assert "without --once" in _fails_with(capsys, "--once", "--picture", str(tmp_path / "top.svg"))


def test_a_picture_of_a_budget_that_ends_before_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("textual", reason="the full screen is the extra `top`")
    with lines.served(4242, lines.lines(12), hang_up=True):
        assert cli.main(["top", "4242", "--picture", str(tmp_path / "top.svg")]) == 0
    ended = "the budget of process 4242 has ended: the picture shows 12 samples, not 60"
    assert capsys.readouterr().err.splitlines()[-1] == f"memmgr top: {ended}"


def _fails_with(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["top", *words]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("width", "end"), [(80, "`self.history` of Trainer.run(); 5.24 MB so far"), (40, "…"), (200, "far")]
)
def test_a_leak_has_two_lines_of_a_narrow_screen(width: int, end: str) -> None:
    watched = RunState()
    leak = (
        "a leak: +1.05 MB a step since step 1, made at train.py:6 (add.Tensor), kept in the list `self.history` of "
        "Trainer.run(); 5.24 MB so far"
    )
    watched.feed(lines.sample(0, leaks=[leak, "another"]))
    shown = ["".join(part for part, _ in line) for line in top_text.leaks(watched, width, top_text.UNICODE)]
    assert len(shown) == 1 + (width < len(leak)) and max(map(len, shown)) <= width
    assert shown[0].startswith("a leak: +1.05 MB a step since step 1,"[:width]) and shown[-1].endswith(end)
