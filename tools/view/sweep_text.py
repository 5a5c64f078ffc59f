"""The tables of `memmgr simulate --sweep`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memmgr.tools.common.console import megabytes, table

if TYPE_CHECKING:
    from memmgr.tools.verbs.simulate import Result


def _factor(overhead: float | None) -> str:
    return "-" if overhead is None else f"{overhead:.3f}"


def show_one(found: list[list[Result]]) -> None:
    """A row a budget."""
    rows = [
        [f"{r.ratio:.0%}", megabytes(r.budget_bytes), _factor(r.overhead), _factor(r.lower_bound), _bar(r.overhead)]
        for (r,) in found
    ]
    table(["budget", "", found[0][0].policy, "bound", ""], rows)


def show_systems(names: list[str], found: list[list[Result]]) -> None:
    """A row a policy, a column a budget, and the bound below them all."""
    rows = [[name, *(_factor(row[i].overhead) for row in found)] for i, name in enumerate(names)]
    rows.append(["bound", *(_factor(row[0].lower_bound) for row in found)])
    table(["", *(f"{row[0].ratio:.0%}" for row in found)], rows)


def _bar(overhead: float | None) -> str:
    """Overhead of a run as a bar, a character for five per cent."""
    return "" if overhead is None else ("#" * min(30, round(20 * (overhead - 1)))).ljust(30)
