"""policies/ imports only the standard library, numpy, scipy (where it is needed: it is an extra) and itself, touches no clock,
file or hidden dice, and its folders import one another in one direction."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import memmgr.policies

ROOM = Path(memmgr.policies.__file__).parent
SOURCES = sorted(ROOM.rglob("*.py"))
LEAST_SOURCES = 35  # fewer would mean that files are not seen, not that they have gone
MOST_LINES = 450

ARROWS = {
    "": {"rules"},  # the package's own exports
    "rules": set(),
    "trace": set(),
    "online": {"rules", "trace"},
    "simulate": {"rules", "trace"},
    "plan": {"rules", "trace", "online", "simulate"},
    "published": {"rules", "trace", "simulate"},
}
"""For each folder: those that it may import. No circle: a folder comes after all that it may import."""
IMPURE_MODULES = {"time", "datetime", "os", "io", "pathlib", "threading", "socket", "subprocess", "logging"}
IMPURE_CALLS = {"open", "print", "input", "exec", "eval", "globals", "__import__"}


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: str(p.relative_to(ROOM)))
def test_pure(source: Path) -> None:
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level in (0, 1), "siblings are imported with one dot, other folders by their whole name"
            names = [node.module or ""] if node.level == 0 else []
        else:
            names = []
        for name in names:
            root = name.partition(".")[0]
            known = root in ("numpy", "scipy") or root in sys.stdlib_module_names
            known = known or name.startswith("memmgr.policies.")
            assert known, f"{source.name}:{node.lineno} imports {name}"
            assert root != "scipy" or node.col_offset > 0, f"{source.name}:{node.lineno}: scipy at import time"
            assert root not in IMPURE_MODULES, f"{source.name}:{node.lineno} imports {name}"
        if isinstance(node, ast.Global):
            pytest.fail(f"{source.name}:{node.lineno} has a global")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in IMPURE_CALLS, f"{source.name}:{node.lineno} calls {node.func.id}"
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "np.random":
            assert node.attr == "default_rng", "the global generator"
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("default_rng", "random.Random")):
            assert node.args, "randomness without a seed"
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "random":
            assert node.attr == "Random", "the global generator"


def test_there_is_something_to_check() -> None:
    """Files that move out of sight of the tests above would pass them."""
    assert len(SOURCES) >= LEAST_SOURCES
    assert {p.name for p in ROOM.iterdir() if p.is_dir()} - {"__pycache__"} == set(ARROWS) - {""}
    for folder in set(ARROWS) - {""}:
        assert sum(p.parent.name == folder for p in SOURCES) >= 3, folder
    assert {p.parent.parent for p in SOURCES if p.parent != ROOM} == {ROOM}, "folders in folders: ARROWS knows none"
    assert {"types.py", "rank.py", "directors.py", "filters.py"} <= {
        p.name for p in SOURCES if p.parent.name == "rules"
    }


def imported(source: Path) -> Iterator[tuple[int, str]]:
    """(line, folder) of each import from this room."""
    own = source.parent.name if source.parent != ROOM else ""
    for node in ast.walk(ast.parse(source.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            if node.level:
                inside = [node.module] if node.module else [alias.name for alias in node.names]
                # In the package itself one dot leads to the folders; inside a folder it leads to siblings.
                yield from ((node.lineno, own or str(name).partition(".")[0]) for name in inside)
                continue
            names = [node.module or ""]
            if node.module == "memmgr.policies":
                names = [f"memmgr.policies.{alias.name}" for alias in node.names]
        for name in names:
            if name == "memmgr" or name.startswith("memmgr."):
                yield node.lineno, name.removeprefix("memmgr.policies.").partition(".")[0]


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: str(p.relative_to(ROOM)))
def test_folders_import_in_one_direction(source: Path) -> None:
    own = source.parent.name if source.parent != ROOM else ""
    for line, folder in imported(source):
        assert folder == own or folder in ARROWS[own], f"{own or 'policies'}/{source.name}:{line} imports {folder}"


def test_the_arrows_have_no_circle_and_are_all_used() -> None:
    order: list[str] = []
    left = dict(ARROWS)
    while left:
        free = [folder for folder, needs in left.items() if needs <= set(order)]
        assert free, f"a circle among {sorted(left)}"
        order += free
        for folder in free:
            del left[folder]
    used: dict[str, set[str]] = {folder: set() for folder in ARROWS}
    for source in SOURCES:
        own = source.parent.name if source.parent != ROOM else ""
        used[own] |= {folder for _, folder in imported(source)} - {own}
    assert used == ARROWS


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: str(p.relative_to(ROOM)))
def test_no_file_is_long(source: Path) -> None:
    assert len(source.read_text().splitlines()) <= MOST_LINES
