"""The section of docs/compatibility.md about other people's tests."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
MARK = "<!-- Made by tests/foreign/run.py: `make test-foreign`. -->"
HEAD = f"""
## Other people's tests

{MARK}

Each test of another project's suite runs twice: plain, and in a budget that evicts every tensor after every op. The second run has to
have the same outcome, and the same bits in everything that the test compares or differentiates. Tolerances of the tests do not count.
Of a large suite a fixed share runs (`tests/foreign/suites`).

- *Begun*: tests that ran. Tests that skip themselves are not counted.
- *Fail plain*: tests that fail here without memmgr (most want a network, or a package). They are not compared.
- *Vary plain*: tests whose bits differ between two plain runs, and that have no other difference.
- *Known*: tests with a difference that has a reason, listed below. *Different*: with any other.
- *Calls*: calls whose bits were compared. *Evicted*: tensors that were evicted.

| suite | versions | begun | same | fail plain | vary plain | known | different | calls | evicted |
|---|---|---|---|---|---|---|---|---|---|
"""


def section(rows: dict[str, tuple[Any, str, Any]]) -> str:
    """The section on suites, with their versions and verdicts."""
    text, reasons, total = HEAD, [], [0] * 8
    for suite, versions, v in rows.values():
        figures = [v.begun, v.same, v.plain_failures, v.varying, len(v.known), len(v.different), v.entries, v.evicted]
        total = [a + b for a, b in zip(total, figures, strict=True)]
        text += f"| {suite.title} | {versions} | {' | '.join(f'{n:,}' for n in figures)} |\n"
        for reason in dict.fromkeys(v.known.values()):
            names = [name for name, why in v.known.items() if why == reason]
            reasons.append(f"- {suite.name}, {len(names)} test{'s' if len(names) > 1 else ''}: {reason}\n")
    text += f"| together | | {' | '.join(f'{n:,}' for n in total)} |\n"
    return text + ("\nKnown differences:\n\n" + "".join(reasons) if reasons else "")


def write(text: str) -> None:
    """Writes the section below the one that `make compatibility` wrote."""
    before = PAGE.read_text().partition("\n## ")[0]
    PAGE.write_text(before + text)
