"""Plain data that policies see and return. Columns, not objects: 10,000 candidates rank in under a millisecond.

Seconds are seconds, bytes are bytes, everywhere: DELTA's public code compares microseconds with nanoseconds, and the
names here are there to make that hard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Bools: TypeAlias = NDArray[np.bool_]
Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Actions: TypeAlias = NDArray[np.int8]

_DTYPES: dict[str, type[np.generic]] = {
    "size_bytes": np.int64,
    "staleness_seconds": np.float64,
    "cost_seconds": np.float64,
    "chain_seconds": np.float64,
    "component_seconds": np.float64,
    "recomputable": np.bool_,
    "clean": np.bool_,
    "offloadable": np.bool_,
    "next_use": np.int64,
    "seconds_until_use": np.float64,
}


class Action(IntEnum):
    """The action for one cell."""

    KEEP = 0  # stays resident
    EVICT = 1  # drop the bytes; the recipe makes them again
    OFFLOAD = 2  # the tier below has, or gets, a copy; then drop


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The cells that may be evicted now: resident, unpinned, and with no raw pointer handed out. All columns have
    length n.

    Use `Candidates.build` for defaults and checks; the bare constructor trusts the dtypes that it is given.

    Attributes:
        size_bytes: int64, bytes that an eviction frees.
        staleness_seconds: float64, time since the last access, on the virtual clock of op costs (DTR, section 3).
        cost_seconds: float64, device time of the op that made the cell.
        chain_seconds: float64, sum of the costs of the ancestors that a recompute has to run as well: those that are evicted
            (e* of DTR) and, live, those that the program itself has released.
        component_seconds: float64, union-find estimate of the evicted neighbourhood's cost (DTR's h_eq).
        recomputable: bool, has a valid, trusted recipe (rules 5 and 8), and, where there is a tier, room for running it
            in addition to the floor.
        clean: bool, the tier has a copy: eviction costs no write.
        offloadable: bool, the tier below has room and may take it. A clean cell counts as offloadable either way.
        next_use: int64, expected number of uses of others until this cell is needed (reverse of the order of making).
        seconds_until_use: float64, estimated time until that use; +inf: never, or not in this pass; NaN: unknown,
            which `auto` treats as "now", so that the read back counts in full.
    """

    size_bytes: Ints
    staleness_seconds: Floats
    cost_seconds: Floats
    chain_seconds: Floats
    component_seconds: Floats
    recomputable: Bools
    clean: Bools
    offloadable: Bools
    next_use: Ints
    seconds_until_use: Floats

    def __len__(self) -> int:
        return len(self.size_bytes)

    @classmethod
    def build(
        cls,
        size_bytes: ArrayLike,
        *,
        staleness_seconds: ArrayLike = 1.0,
        cost_seconds: ArrayLike = 0.0,
        chain_seconds: ArrayLike = 0.0,
        component_seconds: ArrayLike | None = None,
        recomputable: ArrayLike = True,
        clean: ArrayLike = False,
        offloadable: ArrayLike = True,
        next_use: ArrayLike = 0,
        seconds_until_use: ArrayLike = np.nan,
    ) -> Candidates:
        """Makes the columns from anything array-like; scalars are spread over all cells.

        `component_seconds` defaults to `chain_seconds`.

        Raises:
            ValueError: a column has another length, or a size, cost, chain or staleness is negative or NaN.
        """
        raw: dict[str, ArrayLike] = {
            "size_bytes": size_bytes,
            "staleness_seconds": staleness_seconds,
            "cost_seconds": cost_seconds,
            "chain_seconds": chain_seconds,
            "component_seconds": chain_seconds if component_seconds is None else component_seconds,
            "recomputable": recomputable,
            "clean": clean,
            "offloadable": offloadable,
            "next_use": next_use,
            "seconds_until_use": seconds_until_use,
        }
        n = np.atleast_1d(np.asarray(size_bytes)).shape[0]
        columns: dict[str, Any] = {}
        for name, value in raw.items():
            column = np.atleast_1d(np.asarray(value, dtype=_DTYPES[name]))
            if column.ndim != 1 or (column.shape[0] != n and np.ndim(value) != 0):
                raise ValueError(f"{name} has shape {np.shape(value)}, expected ({n},)")
            columns[name] = np.ascontiguousarray(np.broadcast_to(column, (n,)))
        for name in ("size_bytes", "staleness_seconds", "cost_seconds", "chain_seconds", "component_seconds"):
            if not np.all(columns[name] >= 0):  # also false for NaN
                raise ValueError(f"{name} must be >= 0 and not NaN")
        return cls(**columns)

    @classmethod
    def empty(cls) -> Candidates:
        """No candidates."""
        return cls.build(np.zeros(0, dtype=np.int64))

    def take(self, indices: ArrayLike) -> Candidates:
        """The cells at `indices`, in that order."""
        index = np.asarray(indices)
        return Candidates(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    @property
    def recompute_seconds(self) -> Floats:
        """float64 (n,): own op plus evicted ancestors; +inf where there is no recipe."""
        return np.where(self.recomputable, self.cost_seconds + self.chain_seconds, np.inf)

    @property
    def can_offload(self) -> Bools:
        """bool (n,): there is room below, or the copy is there already."""
        return self.offloadable | self.clean

    @property
    def releasable(self) -> Bools:
        """bool (n,): some action other than KEEP is possible."""
        return self.recomputable | self.offloadable | self.clean


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """The path to the tier below: its measured rates, and the transfers that it already carries.

    Attributes:
        write_bytes_per_second: measured; 0 means that nothing can be written.
        read_bytes_per_second: measured; 0 means that nothing can be read.
        queued_write_bytes: accepted and not yet written.
        queued_read_bytes: requested and not yet complete (in flight now, not every offloaded cell: see `due_*`).
        latency_seconds: from asking to the first byte.
        cpu_seconds_per_byte: compute time lost per byte copied, in one direction, overlapped or not. About
            1/(3 GB/s) where the threads that copy to the page cache share the cores with the ops; 0 behind DMA.
        slack_seconds: time until the first byte of the ranking is needed; 0: a request waits.
        demand_bytes_per_second: pace at which requests will ask for the rest (bytes beyond the waiting ones); +inf: all
            at once. In forward: bytes saved per second. Ranking ahead without it overstates the cost of writing.
        seconds_until_reads: when reading back can begin, because room opens: the rest of forward; 0 in backward.
        due_bytes: sizes of the cells that were offloaded and will come back, (k,); empty if not tracked.
        due_seconds: estimated time until the use of each, (k,); the pair lets `auto` see reads that were promised.
    """

    write_bytes_per_second: float
    read_bytes_per_second: float
    queued_write_bytes: int = 0
    queued_read_bytes: int = 0
    latency_seconds: float = 0.0
    cpu_seconds_per_byte: float = 0.0
    slack_seconds: float = 0.0
    demand_bytes_per_second: float = float("inf")
    seconds_until_reads: float = 0.0
    due_bytes: Sequence[int] | Ints = ()
    due_seconds: Sequence[float] | Floats = ()

    def __post_init__(self) -> None:
        if len(self.due_bytes) != len(self.due_seconds):
            raise ValueError(f"{len(self.due_bytes)} due_bytes for {len(self.due_seconds)} due_seconds")
        for name in ("write_bytes_per_second", "read_bytes_per_second", "latency_seconds", "cpu_seconds_per_byte"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"Link.{name} must be >= 0, is {getattr(self, name)!r}")
        if not self.demand_bytes_per_second > 0:
            raise ValueError(f"Link.demand_bytes_per_second must be > 0, is {self.demand_bytes_per_second!r}")

    @property
    def write_seconds_per_byte(self) -> float:
        """Inverse bandwidth; +inf for a link that cannot write."""
        return 1.0 / self.write_bytes_per_second if self.write_bytes_per_second > 0 else float("inf")

    @property
    def read_seconds_per_byte(self) -> float:
        """Inverse bandwidth; +inf for a link that cannot read."""
        return 1.0 / self.read_bytes_per_second if self.read_bytes_per_second > 0 else float("inf")


NO_LINK = Link(0.0, 0.0)
"""No tier below: each cell with a recipe is recomputed."""


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """The victims in order, and the method for each. KEEP never appears.

    Attributes:
        order: int64 (k,), indices into the candidates, the first victim first.
        action: int8 (k,), an `Action` per entry of `order`.
    """

    order: Ints
    action: Actions

    def __len__(self) -> int:
        return len(self.order)


Filter: TypeAlias = Callable[[Candidates], Floats]
"""Scores, float64 (n,): the smaller leaves first."""

Director: TypeAlias = Callable[[Candidates, Ints, Link, int], Actions]
"""(candidates, order, link, urgent_bytes) -> int8 action per entry of `order`.

The action of an entry may depend on the entries before it, never on those after it: `rank` asks for ever longer
prefixes until it has enough. `urgent_bytes` are wanted now, the rest at `Link.demand_bytes_per_second`.
"""
