"""The ranks of a distributed job side by side, for `memmgr top --job` and `memmgr report`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from memmgr.config.sizes import UNLIMITED, show_floor, show_seconds, show_size
from memmgr.observe.summary import slowdown
from memmgr.tools.view.run_state import GONE, RunState, clean

HEAD = ("rank", "budget", "resident", "peak", "floor", "unmanaged", "passes", "lost a pass", "slowdown, at least", "")
WAITED_FOR = "the others wait for it"
CLEAR = 1.2  # so many times the next rank's loss: less is noise


@dataclass(frozen=True)
class Row:
    """One rank. Bytes and seconds; `lost_seconds`: recomputing and waiting of a pass."""

    rank: int
    where: str
    budget_bytes: int
    now_bytes: int
    peak_bytes: int
    floor_bytes: int
    unmanaged_bytes: int
    passes: int
    lost_seconds: float
    slowdown: float | None


def jobs(all_watched: Iterable[RunState]) -> list[list[RunState]]:
    """Those of one job together, by rank; processes that are no ranks are in none. Of a rank's sessions the last one counts."""
    found: dict[str, dict[int, RunState]] = {}
    for watched in all_watched:
        rank, world = watched.hello.get("rank"), watched.hello.get("world_size")
        if isinstance(rank, int) and isinstance(world, int) and world > 1:
            found.setdefault(str(watched.hello.get("job", "")), {})[rank] = watched
    return [[ranks[rank] for rank in sorted(ranks)] for ranks in found.values()]


def row_of(watched: RunState) -> Row:
    """State of a rank now, or at its end."""
    stats = watched.stats
    passes = int(stats.get("passes", 0))
    lost = float(stats.get("recompute_seconds", 0.0)) + float(stats.get("stall_seconds", 0.0))
    mesh = watched.hello.get("mesh") or {}
    where = " ".join(f"{clean(str(name))} {place}" for name, place in mesh.items())
    return Row(
        int(watched.hello["rank"]),
        where,
        watched.budget_bytes,
        int(watched.sample.get("resident_bytes", 0)),
        int(stats.get("resident_bytes.peak", 0)),
        int(stats.get("floor_bytes", 0)),
        int(stats.get("unmanaged_peak_bytes", 0)),
        passes,
        lost / passes if passes else 0.0,
        slowdown(stats) if stats else None,
    )


def waited_for(rows: Sequence[Row]) -> int | None:
    """The rank whose budget costs clearly most a pass: where ranks wait for each other, all wait for it. None: none does."""
    by_loss = sorted(rows, key=lambda row: -row.lost_seconds)
    if len(by_loss) < 2 or by_loss[0].lost_seconds <= CLEAR * by_loss[1].lost_seconds:
        return None
    return by_loss[0].rank


def table(ranks: Sequence[RunState]) -> list[tuple[str, ...]]:
    """`HEAD`, a row for each rank, the smallest and the largest of each column."""
    rows, binary = [row_of(watched) for watched in ranks], ranks[0].binary
    slowest = waited_for(rows)
    told = [
        (
            f"{row.rank}" + (f" ({row.where})" if row.where else ""),
            *_cells(row, binary),
            GONE if watched.gone else WAITED_FOR * (row.rank == slowest),
        )
        for watched, row in zip(ranks, rows, strict=True)
    ]
    least, most = _extreme(rows, min), _extreme(rows, max)
    return [HEAD, *told, ("min", *_cells(least, binary), ""), ("max", *_cells(most, binary), "")]


def _extreme(rows: Sequence[Row], pick: Callable[[list[float]], float]) -> Row:
    def of(name: str) -> float:
        values = [getattr(row, name) for row in rows if getattr(row, name) is not None]
        return pick(values) if values else 0.0

    return Row(
        0,
        "",
        int(of("budget_bytes")),
        int(of("now_bytes")),
        int(of("peak_bytes")),
        int(of("floor_bytes")),
        int(of("unmanaged_bytes")),
        int(of("passes")),
        of("lost_seconds"),
        of("slowdown") or None,
    )


def _cells(row: Row, binary: bool) -> tuple[str, ...]:
    budget, now, peak, unmanaged = (
        show_size(size, binary=binary)
        for size in (row.budget_bytes, row.now_bytes, row.peak_bytes, row.unmanaged_bytes)
    )
    return (
        "none" if row.budget_bytes >= UNLIMITED else budget,
        now,
        peak,
        show_floor(row.floor_bytes, binary=binary),
        unmanaged,
        f"{row.passes:,}",
        show_seconds(row.lost_seconds),
        "" if row.slowdown is None else f"{row.slowdown:.2f}x",
    )


def as_text(ranks: Sequence[RunState]) -> str:
    """Columns, the numbers to the right."""
    rows = table(ranks)
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:-1], widths[1:-1], strict=True))]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    world = ranks[0].hello.get("world_size")
    return "\n".join([f"{len(ranks)} of {world} ranks", *lines])
