"""Functions over 60 lines: none without a reason (`make lint`).

    python tools/house/check_functions.py            # exit code 1 where a function is too long, or a reason is not needed
    python tools/house/check_functions.py --list     # all of them, longest first

A long function is split in named stages. REASONS holds those that stay, each with its reason: remove an entry once it is short.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST = 60
ROOMS = ("memmgr", "policies", "tools")
REASONS = {
    "memmgr/runtime/timeline.py: rows": "one pass over a schedule, whose branches change the same tables; a class for them would "
    "only move them",
    "policies/plan/cut.py: relaxed": "half of it builds the network and describes its arguments; the search reads it",
    "tools/gpu/train.py: trained": "a script for a borrowed machine; each stage needs what the one before left",
    "tools/gpu/check.py: Check.run": "the list of sections in their order, two lines each",
    "allocator/pager/dispatch/kernel.cpp: page": "the stages of an op in their order; each needs what the one before found",
    "allocator/pager/ops/rng.cpp: draw_again": "a case for each way to draw again, and nothing else",
    "allocator/pager/python/bind_figures.cpp: py_stats": "a table: a line for each figure",
    "allocator/pager/python/module.cpp: py_close": "an ordered list of what closing does, with what each step needs",
}
"""By file and function: why it is longer than MOST lines."""

_FUNCTION = re.compile(r"[\w:<>,*&~\[\] ]*?([\w:~]+)\(")
_NO_FUNCTION = ("namespace", "class", "struct", "extern", "enum", "union", "#", "}", "//", "using", "static_assert")


def in_python(path: Path) -> Iterator[tuple[str, int]]:
    """(qualified name, lines) of each function, decorators apart."""

    def walk(node: ast.AST, before: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            name = before
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{before}{child.name}."
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name[:-1], (child.end_lineno or child.lineno) - child.lineno + 1
            yield from walk(child, name)

    yield from walk(ast.parse(path.read_text()), "")


def in_cpp(path: Path) -> Iterator[tuple[str, int]]:
    """(name, lines) of each function that begins in the first column, as clang-format leaves them."""
    name, begun = "", 0
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.startswith("}"):
            if name:
                yield name, number - begun + 1
            name = ""
        elif (
            line.endswith(("{", ",", "("))
            and not line[0].isspace()
            and not line.startswith(_NO_FUNCTION)
            and (found := _FUNCTION.match(line))
        ):
            name, begun = found[1], number


def long() -> dict[str, int]:
    """Lines by "file: function"."""
    files = [(path, in_python) for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    files += [(path, in_cpp) for path in (ROOT / "allocator").rglob("*.cpp")]
    return {
        f"{path.relative_to(ROOT)}: {name}": lines for path, read in files for name, lines in read(path) if lines > MOST
    }


def main(show: bool) -> int:
    """Prints the faults, or with `show` all functions that are too long."""
    found = long()
    if show:
        print("\n".join(f"{lines:4} {name}" for name, lines in sorted(found.items(), key=lambda item: -item[1])))
        return 0
    wrong = [
        f"{name}: {lines} lines, {MOST} allowed; split it in named stages"
        for name, lines in found.items()
        if name not in REASONS
    ]
    wrong += [
        f"{name}: is short now; remove its reason in tools/house/check_functions.py"
        for name in REASONS.keys() - found.keys()
    ]
    print("\n".join(wrong) or f"{len(found)} functions over {MOST} lines, each with a reason")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main("--list" in sys.argv))
