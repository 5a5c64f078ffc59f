"""Writes the table of the pager's locks in docs/develop/architecture.md from allocator/pager/base/locks.def."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DECLARED = ROOT / "allocator" / "pager" / "base" / "locks.def"
PAGE = ROOT / "docs" / "develop" / "architecture.md"
BEGIN, END = "<!-- locks.def -->\n", "<!-- end of locks.def -->\n"
LOCK = re.compile(r'^LOCK\((\w+), (\w+), k(\w+), "(.*)"\)$', re.MULTILINE)


def table() -> str:
    """The table, in the order of ranks."""
    rows = [
        f"| {'leaf' if rank == 'kLeaf' else rank} | {name} | {fork.lower()} | {guards} |\n"
        for name, rank, fork, guards in LOCK.findall(DECLARED.read_text())
    ]
    return "| rank | lock | at a fork | guards |\n|---|---|---|---|\n" + "".join(rows)


def page() -> str:
    """The page with the table of today."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(None if page() == PAGE.read_text() else "docs/develop/architecture.md is old: make locks")
    PAGE.write_text(page())
