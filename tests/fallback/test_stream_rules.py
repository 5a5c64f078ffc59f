"""No wait of the accounting path passes by the names: each can be left out, and tests/memdev then sees other bits."""

from __future__ import annotations

import re
from pathlib import Path

import memmgr
from memmgr._py_streams import RULES

SOURCES = sorted(Path(memmgr.__file__).parent.glob("_py_*.py"))
ORDERS = re.compile(
    r"wait_event\(|wait_stream\(|record_stream\(|behind_all\(|mark_all\(|(?<!\w)mark\(|\.synchronize\(\)"
)


def _calls() -> list[tuple[str, str]]:
    """(the line before, the line) of each that orders work, or waits for it."""
    found = []
    for source in SOURCES:
        lines = [line.strip() for line in source.read_text().splitlines()]
        for before, line in zip(lines, lines[1:], strict=False):
            if ORDERS.search(line) and not line.startswith("def "):
                found.append((before, line))
    return found


def test_each_call_that_orders_work_has_a_name() -> None:
    unnamed = [line for before, line in _calls() if "keeps(" not in before and not re.search(r'mark_all\(.*, "', line)]
    assert unnamed == [
        "self._memory.synchronize()",  # Beside.synchronize: for who asks
        # The CPU, for what it reads itself, and when the tier closes.
        "event.synchronize()",
        "stream.synchronize()",
        # The helpers: behind_all, filled, mark. Who calls them has the name; filled has its own at its head.
        "stream.wait_event(other.record_event())",
        "other.wait_event(event)",
        "tensor.record_stream(stream)",
        "self._memory.synchronize()",  # the probe of the link, before a budget is at work
    ]


def test_the_names_are_those_of_the_rules() -> None:
    text = "\n".join(source.read_text() for source in SOURCES)
    assert {*re.findall(r'keeps\("([^"]+)"\)', text), *re.findall(r'mark_all\([^()]*, "([^"]+)"\)', text)} == set(RULES)
