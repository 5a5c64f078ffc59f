"""One HTML page about a finished run: memory over time, where the time went, and advice.

    memmgr run --budget 12GB --log run.jsonl train.py
    memmgr report run.jsonl                     writes run.html
    memmgr report run.jsonl run.trace           with a pass that memmgr trace
                                                has recorded, op by op
    memmgr report run.rank0.jsonl run.rank1.jsonl --out both.html
    memmgr report --format perfetto run.jsonl   for ui.perfetto.dev
    memmgr report --format png run.trace        the pass as a picture; or svg
    memmgr report --out - run.jsonl             to standard output

The page is complete in itself: no network, no scripts. A log whose run was killed is reported as far as it goes. A PNG
needs the package matplotlib.

Exit code: 0; 2 when a log cannot be read, or is no log.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from memmgr.config.extras import pip_line
from memmgr.policies.trace import Trace, TraceError
from memmgr.telemetry.trace_file import is_trace, read_trace
from memmgr.tools.common.outputs import check_output, write_whole
from memmgr.tools.common.usage_error import UsageError
from memmgr.tools.view import plot
from memmgr.tools.view.perfetto import trace
from memmgr.tools.view.period import write_picture
from memmgr.tools.view.report_page import page
from memmgr.tools.view.run_state import RunState, read_log

FORMATS = {"html": ".html", "perfetto": ".perfetto.json", "png": ".png", "svg": ".svg"}
PICTURES = ("png", "svg")
"""The formats made from a log, and the endings of their files."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="a log of memmgr run, or a trace")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="html",
        help="a page, a trace, or one pass's picture (default %(default)s)",
    )
    endings = " or ".join(FORMATS.values())
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="FILE",
        help=f"the file to write, - for standard output (default: the first log's name with {endings})",
    )


def run(args: argparse.Namespace) -> int:
    """Writes the page or the trace, and says where it is."""
    for path in args.logs:
        if path.is_dir():
            raise UsageError(f"cannot read {path}: it is a folder; name a log")
    out: Path = args.out or args.logs[0].with_suffix(FORMATS[args.format])
    here = str(out) == "-"
    if here and args.format in PICTURES:
        raise UsageError("--out -: a picture needs a file; name one")
    if not here:
        check_output(out, "--out", args.logs)
        _check_ending(out, args.format)
    sessions: list[tuple[str, RunState]] = []
    passes: list[tuple[str, Trace]] = []
    for path in args.logs:
        if is_trace(path):
            passes.append((path.name, _read(path)))
            continue
        found, missing = read_log(path)
        if missing:
            print(f"memmgr report: {path}: {missing}; what is there is shown", file=sys.stderr)
        sessions += [(path.name, session) for session in found]
    try:
        if args.format in PICTURES:
            return _picture(passes, sessions, out)
        html = args.format == "html"
        text = page(sessions, passes) if html else json.dumps(trace(sessions, passes), separators=(",", ":"))
        if here:
            sys.stdout.buffer.write(text.encode("utf-8", "replace"))
            sys.stdout.flush()
            return 0
        write_whole(out, text, errors="replace")
    except BrokenPipeError:  # of a pager that ended; main knows it
        raise
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from None
    print(out)
    return 0


def _check_ending(out: Path, form: str) -> None:
    """A page must not have the ending of a picture; a picture has the format of its ending."""
    ending = out.suffix[1:]
    if ending != form and (form in PICTURES or ending in PICTURES):
        raise UsageError(f"--out: {out} is no name for --format {form}")


def _read(path: Path) -> Trace:
    try:
        return read_trace(path)
    except TraceError as error:
        raise UsageError(str(error)) from None


def _picture(passes: list[tuple[str, Trace]], sessions: list[tuple[str, RunState]], out: Path) -> int:
    if sessions:
        raise UsageError(f"{sessions[0][0]}: a log has no picture; memmgr trace records a pass that has one")
    if len(passes) != 1:
        raise UsageError(f"{out}: a picture is of one pass that memmgr trace has recorded")
    if out.suffix == ".png" and not plot.available():
        raise UsageError(f"a PNG needs the package matplotlib: {pip_line('demo')}")
    write_picture(passes[0][1], out, passes[0][0])
    print(out)
    return 0
