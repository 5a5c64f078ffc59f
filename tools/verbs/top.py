"""Watch training processes under a budget: resident and evicted bytes, and their cost.

    memmgr top              all processes of this user that have an open budget
    memmgr top 12345        one of them
    memmgr top run.jsonl    the last screen of a run, from its log
    memmgr top --job        the ranks of a distributed job on this machine
    memmgr top --once       one screen as text, for a log or a pipe
    memmgr top --json       the stream itself, a JSON object a line
    memmgr top --serve      the full screen in a browser on this machine

Keys: 1-4 or tab panels, s sort, / filter, p pause, left and right processes, ? help, q quit.

A reader never slows the training down: lines that it is too slow to read are dropped and counted. Without the package
`textual`, or on a terminal without UTF-8, the plain screen is repeated.

Exit code: 0; 2 when there is no such process, or none at all.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from memmgr.config.extras import pip_line
from memmgr.config.sizes import show_seconds
from memmgr.telemetry import stream
from memmgr.tools.common.outputs import check_output
from memmgr.tools.common.usage_error import UsageError
from memmgr.tools.view import top_text as text
from memmgr.tools.view.attach import ANSWER_SECONDS, Attached, wait
from memmgr.tools.view.job import as_text, jobs
from memmgr.tools.view.run_state import read_log

WANTS = ("cells", "map", "holders")
PR_SET_PDEATHSIG = 1  # linux/prctl.h
WEB_DRIVER = "textual.drivers.web_driver:WebDriver"
SAMPLES = 60
"""Samples that a picture waits for: a chart worth looking at."""
DETAIL_SECONDS = 3.0  # --once waits so long for cells and map: the process makes them when it can afford to


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("pid", nargs="?", type=_pid, metavar="PID", help="or a log; default: all that there are")
    parser.add_argument("--once", action="store_true", help="print one screen and end")
    parser.add_argument("--job", action="store_true", help="the ranks of a job side by side, as text")
    parser.add_argument("--json", action="store_true", help="lines of JSON instead of a screen")
    parser.add_argument("--interval", type=_interval, default=0.5, metavar="SECONDS", help="default %(default)s")
    parser.add_argument("--ascii", action="store_true", help="the plain screen, in ASCII")
    parser.add_argument(
        "--serve",
        nargs="?",
        type=_port,
        const=0,
        metavar="PORT",
        help="in a browser; PORT behind a PID (default: a free one)",
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE.svg", help=f"draw one screen into a file and end, after {SAMPLES} samples"
    )


def _pid(word: str) -> int | Path:
    if not word.isdecimal() and Path(word).is_file():
        return Path(word)
    if not word.isascii() or not word.isdecimal() or not 0 < int(word) < 2**31:
        raise argparse.ArgumentTypeError(f"{word!r} is no process number and no log")
    return int(word)


def _port(word: str) -> int:
    if not word.isascii() or not word.isdecimal() or int(word) > 65535:
        raise argparse.ArgumentTypeError(f"{word!r} is not a port, 0 to 65535")
    return int(word)


def _interval(word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = -1.0
    if not 0.02 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{word!r} is not between 0.02 and 3600 seconds")
    return seconds


def run(args: argparse.Namespace) -> int:
    """Watches; 0 when the user or the processes end it."""
    beside = args.serve is not None or args.picture is not None or args.json or args.ascii or args.pid is not None
    if args.job and beside:
        raise UsageError("--job is a table of all ranks here: it goes with --once and --interval only")
    if isinstance(args.pid, Path):
        return _finished(args)
    if args.json and args.ascii:
        raise UsageError("--json is no screen: it goes without --ascii")
    if args.picture is not None:
        _check_picture(args)
    if args.serve is not None:
        return _serve(args)
    if _is_page():
        _end_with_the_server()
    try:
        with _attached(args) as attached:
            if args.job:
                _side_by_side(attached, args)
            elif args.json:
                _as_json(attached, args)
            elif args.once:
                _say(_screen(_first_words(attached, detail=True), args))
            elif args.picture is not None:
                _picture(attached, args)
            elif _can_draw(args):
                from memmgr.tools.view.top_app import TopApp

                app = TopApp(attached, interval=args.interval, follow=args.pid is None)
                if not _is_page():
                    app.driver_class = _on_output(app.driver_class)
                app.run()
            else:
                _repeat_with_hint(attached, args)
    except KeyboardInterrupt:
        pass
    return 0


def _finished(args: argparse.Namespace) -> int:
    """The last screen of a log, and the command that shows all of it."""
    if args.json or args.picture is not None or args.serve is not None:
        raise UsageError(f"{args.pid} is a log: it has a last screen, and goes with --once and --ascii only")
    sessions, missing = read_log(args.pid)
    columns, rows = shutil.get_terminal_size((80, 24))
    _say(text.plain(text.once(sessions[-1], max(40, columns), rows, _glyphs(args))))
    more = f"{missing}; " * bool(missing)
    print(f"memmgr top: {more}the whole run:  memmgr report {shlex.quote(str(args.pid))}", file=sys.stderr)
    return 0


def _request(args: argparse.Namespace) -> dict[str, Any]:
    return {"interval_seconds": args.interval, "want": list(WANTS), "cells": 200, "columns": 400}


@contextmanager
def _attached(args: argparse.Namespace) -> Iterator[list[Attached]]:
    """Attaches to the named process, or to all, until the end of the block.

    Raises `UsageError`: it cannot be reached, or there is none.
    """
    found: list[Attached] = []
    try:
        if args.pid is not None:
            found.append(Attached(args.pid, _request(args)))
        else:
            for pid in stream.processes():
                with suppress(UsageError):  # it ended meanwhile
                    found.append(Attached(pid, _request(args)))
            if not found:
                raise UsageError("no process of this user has an open memmgr budget")
        yield found
    finally:
        for one in found:
            one.close()


def _utf8() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") in ("utf8", "utf8sig")


def _glyphs(args: argparse.Namespace) -> text.Glyphs:
    return text.ASCII if args.ascii or not _utf8() else text.UNICODE


def _can_draw(args: argparse.Namespace) -> bool:
    if _is_page():
        return True
    if args.ascii or not _utf8() or not sys.stdout.isatty() or os.environ.get("TERM") in (None, "", "dumb"):
        return False
    return find_spec("textual") is not None


def _on_output(driver: Any) -> Any:
    """Textual's driver draws on standard error, which may be a file; the terminal was checked of standard output."""

    class OnOutput(driver):  # type: ignore[misc]
        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            self._file = sys.__stdout__

    return OnOutput


def _first_words(attached: list[Attached], *, detail: bool) -> list[Attached]:
    """Waits for the data of a first screen; a process that did not answer is not in the list.

    Raises `UsageError`: no process answered.
    """
    wait(attached, ANSWER_SECONDS, lambda one: bool(one.watched.sample))
    for one in attached:
        if one.watched.error and not one.watched.sample:
            raise UsageError(f"process {one.watched.pid}: {one.watched.error}")
    answered = [one for one in attached if one.watched.sample]
    if not answered:
        raise UsageError(f"process {attached[0].watched.pid} does not answer")
    if detail:
        wait(answered, DETAIL_SECONDS, lambda one: bool(one.watched.cells and one.watched.map))
    return answered


def _say(lines: str) -> None:
    """Prints; a character that the terminal's encoding lacks becomes a question mark."""
    encoding = sys.stdout.encoding or "ascii"
    print(lines.encode(encoding, "replace").decode(encoding), flush=True)


def _screen(attached: list[Attached], args: argparse.Namespace) -> str:
    columns, rows = shutil.get_terminal_size((80, 24))
    height = max(16, rows // max(1, len(attached)))
    glyphs = _glyphs(args)
    return "\n\n".join(text.plain(text.once(one.watched, max(40, columns), height, glyphs)) for one in attached)


def _side_by_side(attached: list[Attached], args: argparse.Namespace) -> None:
    """One job under the other, once or again and again."""
    shown = _first_words(attached, detail=False)
    home = "\x1b[H\x1b[2J" if sys.stdout.isatty() and os.environ.get("TERM") not in (None, "", "dumb") else ""
    while True:
        found = jobs(one.watched for one in shown)
        if not found:
            raise UsageError(
                "no process here is a rank of a distributed job: memmgr top without --job shows all processes"
            )
        _say(("" if args.once else home) + "\n\n".join(as_text(ranks) for ranks in found))
        if args.once or all(one.over for one in shown):
            return
        time.sleep(args.interval)
        for one in shown:
            one.receive()


def _as_json(attached: list[Attached], args: argparse.Namespace) -> None:
    if args.once:
        for one in _first_words(attached, detail=True):
            seen = one.watched
            shown = {"hello": seen.hello, "sample": seen.sample, "cells": seen.cells, "map": seen.map}
            print(json.dumps({"pid": seen.pid, **shown, "holders": seen.holders}), flush=True)
        return
    while any(not one.over for one in attached):
        for one in attached:
            for line in one.receive():
                print(json.dumps({"pid": one.watched.pid, **line}), flush=True)
        time.sleep(min(0.1, args.interval))


def _repeat(attached: list[Attached], args: argparse.Namespace) -> None:
    """The plain screen, again and again: on a terminal in the same place, in a pipe one after the other."""
    shown = _first_words(attached, detail=False)
    home = "\x1b[H\x1b[2J" if sys.stdout.isatty() and os.environ.get("TERM") not in (None, "", "dumb") else ""
    while True:
        for one in shown:
            one.receive()
        _say(home + _screen(shown, args) + ("" if home else "\n"))
        if all(one.over for one in shown):
            return
        time.sleep(args.interval)


def _repeat_with_hint(attached: list[Attached], args: argparse.Namespace) -> None:
    """The hint comes last, because the screen is cleared again and again."""
    try:
        _repeat(attached, args)
    finally:
        if find_spec("textual") is None and sys.stdout.isatty() and not args.ascii:
            print(f"memmgr top: the full screen needs the package textual: {pip_line('top')}", file=sys.stderr)


def _is_page() -> bool:
    """It draws for a page of --serve."""
    return os.environ.get("TEXTUAL_DRIVER") == WEB_DRIVER


def _end_with_the_server() -> None:
    """A server that is killed cannot end its pages; a page without one would draw for ever."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(args: argparse.Namespace) -> int:
    if args.once or args.json or args.ascii or args.picture is not None:
        raise UsageError("--serve is the full screen: it goes with a PID and --interval only")
    if find_spec("textual_serve") is None:
        raise UsageError(f"--serve needs the package textual-serve: {pip_line('serve')}")
    from memmgr.tools.view.top_served import serve

    with _attached(args):
        pass  # there is something to show; each page makes connections of its own
    with suppress(KeyboardInterrupt):
        serve(["--interval", str(args.interval), *([] if args.pid is None else [str(args.pid)])], args.serve)
    return 0


def _check_picture(args: argparse.Namespace) -> None:
    if find_spec("textual") is None:
        raise UsageError(f"--picture needs the package textual: {pip_line('top')}")
    if args.once or args.json or args.ascii:
        raise UsageError("--picture is a screen of its own: it goes without --once, --json and --ascii")
    if args.picture.suffix != ".svg":
        raise UsageError(f"--picture: {args.picture} does not end in .svg")
    check_output(args.picture, "--picture")


def _picture(attached: list[Attached], args: argparse.Namespace) -> None:
    from memmgr.tools.view.top_app import TopApp, draw

    shown = _first_words(attached, detail=True)
    seconds = SAMPLES * args.interval
    print(f"memmgr top: watches for {show_seconds(seconds)}", file=sys.stderr, flush=True)
    wait(shown, seconds, lambda one: len(one.watched.points) >= SAMPLES)
    for one in shown:
        if one.over and (drawn := len(one.watched.points)) < SAMPLES:
            ended = (
                f"the budget of process {one.watched.pid} has ended: the picture shows {drawn} samples, not {SAMPLES}"
            )
            print(f"memmgr top: {ended}", file=sys.stderr)
    draw(TopApp(shown, interval=args.interval, follow=False), args.picture)
    print(args.picture)
