"""One HTML page about a finished run: memory over time, where the time went, and what to change.

    memmgr run --budget 12GB --log run.jsonl train.py
    memmgr report run.jsonl                     writes run.html
    memmgr report run.rank0.jsonl run.rank1.jsonl --out both.html

The page needs nothing beside itself: no network, no scripts. A log whose run was killed is reported as far as it goes.

Exit code: 0; 2 when a log cannot be read, or is none.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from memmgr.tools._report_page import page
from memmgr.tools._watched import Watched, read_log
from memmgr.tools._wrong import Wrong


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="what memmgr run --log or budget(log=) wrote")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page (default: the first log's name with .html)")


def run(args: argparse.Namespace) -> int:
    """Writes the page and says where it is."""
    sessions: list[tuple[str, Watched]] = []
    for path in args.logs:
        found, missing = read_log(path)
        if missing:
            print(f"memmgr report: {path}: {missing}; what is there is shown", file=sys.stderr)
        sessions += [(path.name, session) for session in found]
    out: Path = args.out or args.logs[0].with_suffix(".html")
    if out in args.logs:
        raise Wrong(f"{out} is a log; name the page with --out")
    try:
        out.write_text(page(sessions), encoding="utf-8", errors="replace")
    except OSError as error:
        raise Wrong(f"cannot write {out}: {error.strerror}") from None
    print(out)
    return 0
