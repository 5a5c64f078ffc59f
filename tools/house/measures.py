"""`make measures`: how easily somebody else can work in this tree, as a table. Reads files, runs nothing.

Where a test already holds a measure, its reading is used (tests/pager/test_layers.py).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "pager"), str(Path(__file__).parent)]

import check_functions  # noqa: E402  found by the path above, as the next two
import check_words  # noqa: E402
import test_layers  # noqa: E402

PRODUCT = ("allocator", "memmgr", "policies", "tools")
CODE = (".py", ".cpp", ".h", ".def", ".cu", ".pyi")
SHARED_LINES, MOST_PLACES = 6, 8
"""So many equal lines make a place that repeats another; a run in more places than that is a pattern, and does not count."""


def files(*rooms: str) -> list[Path]:
    """The sources of these folders."""
    found = (path for room in rooms for path in (ROOT / room).rglob("*") if path.suffix in CODE)
    return sorted(path for path in found if path.is_file())


def lines(paths: Iterable[Path]) -> int:
    return sum(path.read_text().count("\n") for path in paths)


def components(units: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected component of each unit."""

    def reached(unit: str) -> set[str]:
        met, todo = {unit}, [unit]
        while todo:
            new = units.get(todo.pop(), set()) - met
            met |= new
            todo += new
        return met

    reach = {unit: reached(unit) for unit in units}
    return [{other for other in reach[unit] if unit in reach.get(other, ())} for unit in units]


def upward() -> int:
    height = {layer: i for i, layer in enumerate(test_layers.LAYERS)}
    return sum(
        height[other.split("/")[0]] > height[unit.split("/")[0]]
        for unit, others in test_layers.included().items()
        for other in others
    )


def elsewhere() -> int:
    """Functions that a header declares and only other units define."""
    defined: dict[str, set[str]] = defaultdict(set)
    for path in test_layers.SOURCES:
        for name in test_layers.DEFINED.findall(test_layers.code_of(path)):
            defined[name].add(test_layers.unit_of(path))
    headers = [path for path in test_layers.SOURCES if path.suffix == ".h"]
    declared = {
        (test_layers.unit_of(path), name)
        for path in headers
        for name in test_layers.DECLARED.findall(test_layers.code_of(path))
    }
    return sum(bool(defined[name]) and unit not in defined[name] for unit, name in declared)


def statics() -> int:
    """Objects that a function of the pager makes once."""
    return sum(len(test_layers.MADE_ONCE.findall(test_layers.code_of(path))) for path in test_layers.SOURCES)


def _runs(path: Path) -> Iterator[tuple[str, ...]]:
    code = [line.strip() for line in path.read_text().splitlines()]
    code = [line for line in code if len(line) > 3 and not line.startswith(("#", "//", "import ", "from ", '"""'))]
    yield from zip(*(code[i:] for i in range(SHARED_LINES)), strict=False)


def repeated() -> int:
    """Pairs of files, or of places in one file, that share a run of equal lines."""
    places: dict[tuple[str, ...], list[Path]] = defaultdict(list)
    for path in files(*PRODUCT, "tests"):
        for run in _runs(path):
            places[run].append(path)
    shared = (where for where in places.values() if 1 < len(where) <= MOST_PLACES)
    return len({pair for where in shared for pair in combinations(where, 2)})


def main() -> None:
    largest = max(components(test_layers.included()), key=len)
    uses = test_layers.uses_of_the_process_session()
    long = check_functions.long()
    headless = sum(check_words.counted()[0].values())
    rows = [
        ("largest include component of the pager, units", f"{len(largest)}", "1"),
        ("upward includes", f"{upward()}", "0"),
        ("functions declared in one unit's header and defined in another", f"{elsewhere()}", "0"),
        ("objects that a function of the pager makes once", f"{statics()}", "6"),
        ("uses of the process's session below dispatch", f"{sum(uses.values())} in {len(uses)} units", "0"),
        ("functions over 60 lines, without a reason", f"{len(long.keys() - check_functions.REASONS.keys())}", "0"),
        ("functions over 60 lines, with one", f"{len(long.keys() & check_functions.REASONS.keys())}", ""),
        ("headless comment units", f"{headless}", "150"),
        ("product, lines", f"{lines(files(*PRODUCT)):,}", "44,000"),
        ("tests, lines", f"{lines(files('tests')):,}", "36,000"),
        (f"pairs of places that share {SHARED_LINES} equal lines", f"{repeated()}", ""),
        ("words of docs", f"{sum(len(p.read_text().split()) for p in (ROOT / 'docs').rglob('*.md')):,}", ""),
    ]
    print("| measure | today | asked, at most |\n|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
