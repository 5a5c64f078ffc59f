"""Mixed integer programs, solved by HiGHS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np

LIMIT_SECONDS: ContextVar[float] = ContextVar("LIMIT_SECONDS", default=20.0)
"""Time limit of a system's integer programs at a budget; the best answer until then counts."""


@contextmanager
def limited_to(seconds: float) -> Iterator[None]:
    """Sets the time limit of the integer programs that are solved inside, and puts the one before back."""
    token = LIMIT_SECONDS.set(seconds)
    try:
        yield
    finally:
        LIMIT_SECONDS.reset(token)


@dataclass
class Milp:
    """A mixed integer program being written: variables in [0, 1] unless said otherwise, rows `low <= sum <= high`."""

    cost: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)

    def variable(self, cost: float = 0.0, low: float = 0.0, high: float = 1.0, *, whole: bool = False) -> int:
        self.cost.append(cost)
        self.low.append(low)
        self.high.append(high)
        self.whole.append(whole)
        return len(self.cost) - 1

    def at_most(self, right: float, *terms: tuple[int, float], least: float = -np.inf) -> None:
        for column, value in terms:
            self.row.append(len(self.most))
            self.column.append(column)
            self.value.append(value)
        self.least.append(least)
        self.most.append(right)

    def solve(self, limit_seconds: float, *, relaxed: bool = False) -> tuple[bool, list[float] | None]:
        """(whether it was solved to the end, the best that was found). Raises `ImportError`: no scipy."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        matrix = csr_array((self.value, (self.row, self.column)), shape=(len(self.most), len(self.cost)))
        found = milp(
            self.cost,
            constraints=LinearConstraint(matrix, np.array(self.least), np.array(self.most)),
            bounds=Bounds(np.array(self.low), np.array(self.high)),
            integrality=np.array(self.whole) & (not relaxed),
            options={"time_limit": limit_seconds, "mip_rel_gap": 1e-6},
        )
        return found.status in (0, 2), None if found.x is None else list(found.x)
