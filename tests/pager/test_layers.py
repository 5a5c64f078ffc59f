"""The pager's layers: includes point down, no units include one another in a circle, and a function is defined in the unit
whose header declares it.

A unit is a header and the source of the same name.
"""

import re
from collections import defaultdict
from pathlib import Path

PAGER = Path(__file__).resolve().parents[2] / "allocator" / "pager"
LAYERS = (
    "base",  # clocks, locks that forks take, the GIL, errors, the session: options and counters of the open budget
    "pools",  # sources of memory
    "cells",  # storages, versions, recipes as nodes of the graph
    "ops",  # facts about ops, by their schemas
    "recipes",  # how an op is recorded, and which kinds of ops are trusted
    "concurrency",  # which threads may run, and steps that wait
    "residency",  # eviction, reclaim, restoring
    "remat",  # running recipes again
    "guards",  # readers and writers that are no ops
    "plan",  # the timeline, plans, the order of touches
    "dispatch",  # the kernel of every op
    "python",  # the module
)
"""Bottom up. A file includes files of its own layer and of those before it."""

BELOW_DISPATCH = LAYERS[: LAYERS.index("dispatch")]
KEEP_A_SESSION = {"guards/address_exports", "guards/extension_ops", "guards/unseen_threads"}
"""Units whose callbacks Python or torch calls without an argument of their own. A variable has their session."""

SOURCES = sorted(path for path in PAGER.rglob("*") if path.suffix in (".h", ".cpp") and path.name != "pager.cpp")
INCLUDE = re.compile(r'^#include "(?!memmgr/)([^"]+)"', re.MULTILINE)
DECLARED = re.compile(
    r"^(?!return|using|typedef|static|template|\s)[\w:<>,&*\[\] ]+?[\s*&](\w+)\([^{};]*\)[^{};]*; *$", re.MULTILINE
)
PROCESS_SESSION = re.compile(r"\bthe_session\b")
SESSION_VARIABLE = re.compile(
    r"^(?:static |extern |inline |thread_local )*(?:std::atomic<Session\*>|Session(?: ?[*&])?) ?\w+ *(?:[;={]|$)",
    re.MULTILINE,
)
MADE_ONCE = re.compile(r"\bstatic (?:auto|const auto|[\w:]+)\s*\*? ?\w+ = new\b")
DEFINED = re.compile(
    r"^(?!return|using|static|namespace|struct|class|\s)[\w:<>,&*\[\] ]+?[\s*&](\w+)\([^;{}]*\)[^;{}]*\{", re.MULTILINE
)


def unit_of(path: Path) -> str:
    return str(path.relative_to(PAGER).with_suffix(""))


def code_of(path: Path) -> str:
    """The text without comments and strings."""
    return re.sub(r'"(\\.|[^"\\\n])*"', '""', re.sub(r"//.*", "", path.read_text()))


def included() -> dict[str, set[str]]:
    units: dict[str, set[str]] = defaultdict(set)
    for path in SOURCES:
        units[unit_of(path)] |= {unit_of(PAGER / name) for name in INCLUDE.findall(path.read_text())} - {unit_of(path)}
    return units


def uses_of_the_process_session() -> dict[str, int]:
    """By unit, in the layers below `dispatch`."""
    uses: dict[str, int] = defaultdict(int)
    for path in SOURCES:
        if unit_of(path).split("/")[0] in BELOW_DISPATCH:
            uses[unit_of(path)] += len(PROCESS_SESSION.findall(code_of(path)))
    return {unit: n for unit, n in uses.items() if n}


def test_every_file_is_in_a_layer_and_compiled() -> None:
    assert len(SOURCES) > 120
    assert {unit_of(path).split("/")[0] for path in SOURCES} == set(LAYERS)
    compiled = re.findall(r'^#include "([^"]+)"', (PAGER / "pager.cpp").read_text(), re.MULTILINE)
    assert sorted(compiled) == [str(path.relative_to(PAGER)) for path in SOURCES if path.suffix == ".cpp"]


def test_kernels_are_registered_after_all_static_objects_are_made() -> None:
    """Ops of other threads reach them at once. A hash map that was not made yet ended such a process by a division by zero."""
    compiled = re.findall(r'^#include "([^"]+)"', (PAGER / "pager.cpp").read_text(), re.MULTILINE)
    registers = [one for one in compiled if "TORCH_LIBRARY" in (PAGER / one).read_text()]
    assert registers == compiled[-len(registers) :] and len(registers) == 2


def test_includes_point_down() -> None:
    height = {layer: i for i, layer in enumerate(LAYERS)}
    upward = [
        (unit, other)
        for unit, others in included().items()
        for other in others
        if height[other.split("/")[0]] > height[unit.split("/")[0]]
    ]
    assert not upward


def test_no_units_include_one_another_in_a_circle() -> None:
    units = included()
    ended: set[str] = set()

    def visit(unit: str, path: tuple[str, ...]) -> None:
        assert unit not in path, " -> ".join((*path, unit))
        if unit not in ended:
            for other in units[unit]:
                visit(other, (*path, unit))
            ended.add(unit)

    for unit in list(units):
        visit(unit, ())
    assert len(ended) > 60


def test_a_function_is_defined_in_the_unit_whose_header_declares_it() -> None:
    defined: dict[str, set[str]] = defaultdict(set)
    for path in SOURCES:
        for name in DEFINED.findall(code_of(path)):
            defined[name].add(unit_of(path))
    seen = 0
    for header in (path for path in SOURCES if path.suffix == ".h"):
        for name in DECLARED.findall(code_of(header)):
            seen += name in defined
            assert not defined[name] or unit_of(header) in defined[name], (
                f"{header.name} declares {name}: {defined[name]}"
            )
    assert seen > 300


def test_only_dispatch_and_python_name_the_session_of_the_process() -> None:
    assert not uses_of_the_process_session()
    named = {unit_of(path).split("/")[0] for path in SOURCES if PROCESS_SESSION.search(code_of(path))}
    assert named == {"dispatch", "python"}


def test_a_lower_layer_keeps_a_session_only_for_callbacks_without_an_argument() -> None:
    keep = {unit_of(path) for path in SOURCES if SESSION_VARIABLE.search(code_of(path))}
    assert keep - {"dispatch/the_session"} == KEEP_A_SESSION


def test_no_function_makes_state_of_the_process_at_its_first_call() -> None:
    assert {unit_of(path) for path in SOURCES if MADE_ONCE.search(code_of(path))} == {"base/lock"}
