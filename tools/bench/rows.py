"""Makes rows from the results of cells: medians, quartiles, shares, bits."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .turns import Cell


@dataclass(frozen=True)
class Row:
    """One cell of the bench."""

    model: str
    budget: str  # its label: "75%", "checkpoint"; "" for a system that takes none
    system: str
    budget_bytes: int | None = None  # of memmgr; None without one
    need_bytes: int = 0  # the most bytes that the reference holds
    inside_bytes: int = 0  # the most that torch's tensors held at once
    outside_bytes: int = 0  # the process's resident set at its highest, over its size before the model
    seconds: float = 0.0  # a step, the median
    # lower quartile, median and upper quartile of the time over the reference's in the same turn
    ratios: tuple[float, float, float] = (0.0, 0.0, 0.0)
    processor: float = 0.0  # the same median of the time that all of its threads computed
    bits: str = ""  # "yes", "no", or "parameters" where buffers differ (batch norm's running statistics, counted twice)
    error: str = ""  # why it did not run
    stats: dict[str, float] | None = None
    seconds_of_turns: tuple[float, ...] = ()

    @property
    def key(self) -> str:
        """The key of the row."""
        return f"{self.model}|{self.budget}|{self.system}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Row:
        """The reverse. Raises `TypeError`: not a row."""
        return Row(**data | {"ratios": tuple(data["ratios"]), "seconds_of_turns": tuple(data["seconds_of_turns"])})


def rows_of(cells: Sequence[Cell], need_bytes: int) -> list[Row]:
    """The rows of a group; the reference is its first cell. Cells without the reference's figures have its error."""
    return [_row(cell, cells[0], need_bytes) for cell in cells]


def _row(cell: Cell, reference: Cell, need_bytes: int) -> Row:
    spec = cell.spec
    error = cell.error or (f"{reference.spec['system']}: {reference.error}" if reference.error else "")
    head = (spec["model"], spec["budget"], spec["system"], spec["budget_bytes"], need_bytes)
    if error:
        return Row(*head, error=error)
    told = cell.told
    pairs = list(zip(cell.turns, reference.turns, strict=False))
    seconds = tuple(mine["seconds"] for mine, _ in pairs)
    return Row(
        *head,
        inside_bytes=told["inside_bytes"],
        outside_bytes=told["outside_bytes"],
        seconds=statistics.median(seconds),
        ratios=_quartiles([mine["seconds"] / other["seconds"] for mine, other in pairs]),
        processor=statistics.median(mine["processor"] / other["processor"] for mine, other in pairs),
        bits=_bits(cell, reference),
        stats={key: value for key, value in told.items() if isinstance(value, int | float)},
        seconds_of_turns=seconds,
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _bits(cell: Cell, reference: Cell) -> str:
    """Losses of all steps, and the parameters after the last one, with the reference's after the same step."""
    told, steps = cell.told, len(cell.told["losses"])
    other = next((t for t in [reference.told["warm"], *reference.turns] if t["steps"] == steps), None)
    if other is None or told["losses"] != reference.told["losses"][:steps] or told["parameters"] != other["parameters"]:
        return "no"
    return "yes" if told["buffers"] == other["buffers"] else "parameters"
