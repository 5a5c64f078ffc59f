"""`memmgr simulate --job`: which budget for which rank gives a distributed job's shortest step.

The ranks' traces, the planner's curve of each, and the split of a total by `policies/plan/split.py`, beside the equal one. First
a tenth of the need apart, then finer where the split is.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memmgr.config.sizes import UNLIMITED, parse_limit, show_floor, show_seconds, show_size
from memmgr.policies.plan.split import Curve, Limit, Split, equal, split, spread
from memmgr.policies.trace import Trace
from memmgr.telemetry.trace_file import is_trace, read_about, read_trace
from memmgr.tools.common.console import ProgressBar, table

TENTHS = range(10, 0, -1)
ROUNDS = 3  # of looking closer; each halves the distance to the next budget
FLOOR_ROUNDS = 5
BETWEEN = "(between ops)"  # as memmgr/runtime/timeline.py has it
_COLLECTIVE = ("c10d::", "_c10d_functional::")

Decide = Callable[[Trace, int], float | None]
"""(pass, budget in bytes) -> its seconds; None: it does not fit."""


class Refused(Exception):
    """One line for the user."""


@dataclass
class Rank:
    """A rank and its results.

    Attributes:
        number: its rank.
        host: where it ran; empty where the trace does not say it.
        waits: seconds inside of collectives: waits for other ranks, and the transfer.
        found: seconds of a pass, without `waits`, by budget; None: it does not fit.
    """

    number: int
    path: Path
    trace: Trace
    host: str = ""
    waits: float = 0.0
    found: dict[int, float | None] = field(default_factory=dict)

    @property
    def need_bytes(self) -> int:
        """Without a budget."""
        return self.trace.unmanaged_peak[0]

    @property
    def own_seconds(self) -> float:
        """Without a budget, and without waiting for others."""
        return self.trace.seconds - self.waits

    def curve(self) -> Curve:
        """The results so far as a curve."""
        return Curve.of(self.found.items())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the verb for a job."""
    job = parser.add_argument_group("a distributed job", "which budget for which rank gives the shortest step")
    job.add_argument("--job", type=Path, nargs="+", metavar="FILE", help="a trace of each rank, or a folder with them")
    job.add_argument("--total", metavar="SIZE", help="memory of all ranks together: 48GB")
    job.add_argument("--host-total", metavar="SIZE", help="memory of the ranks of a host together")
    job.add_argument("--limit", metavar="SIZE", help="the most that a rank can have: its device")


def run(args: argparse.Namespace, decide: Decide) -> int:
    """Answers; exit code 0.

    Raises:
        Refused: the files are not the traces of one job, or the floors do not fit.
        ValueError, TraceError, OSError: a size or a file that makes no sense.
    """
    if args.schedule_out:
        raise Refused("--schedule-out is of one trace: memmgr simulate FILE")
    ranks = _ranks(_files(args.job))
    limits = _limits(args, ranks)
    with ProgressBar(len(ranks) * (len(TENTHS) + 1 + 2 * ROUNDS)) as progress:

        def look(rank: Rank, budget: int) -> None:
            progress.say(f"rank {rank.number} in {show_size(budget)}", 1)
            seconds = decide(rank.trace, budget)
            rank.found[budget] = None if seconds is None else max(0.0, seconds - rank.waits)

        evenly = tuple(min(b, r.need_bytes) for b, r in zip(equal(len(ranks), limits), ranks, strict=True))
        for rank, budget in zip(ranks, evenly, strict=True):
            for size in dict.fromkeys((*(rank.need_bytes * tenths // 10 for tenths in TENTHS), budget)):
                look(rank, size)
        best = _best(ranks, limits, look)
    budgets = spread(best.budgets, [r.need_bytes for r in ranks], limits)
    transfer = min(rank.waits for rank in ranks)  # the last rank to arrive waits only for the transfer
    if args.picture:
        from memmgr.tools.view import job_picture

        job_picture.draw(ranks, budgets, evenly, best.seconds, args.picture)
    if args.json:
        print(json.dumps(_as_json(ranks, limits, budgets, evenly, transfer)))
    else:
        _show(ranks, limits, budgets, evenly, transfer)
        if args.picture:
            print(args.picture)
    return 0


# ---- the files


def _files(given: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in given:
        if path.is_dir():
            inside = sorted(one for one in path.iterdir() if one.is_file() and is_trace(one))
            if not inside:
                raise Refused(
                    f"{path}: no traces in this folder; memmgr trace inside torchrun writes one for each rank"
                )
            found += inside
        else:
            found.append(path)
    return found


def _ranks(files: Iterable[Path]) -> list[Rank]:
    ranks: dict[int, Rank] = {}
    about: dict[int, dict[str, Any]] = {}
    for path in files:
        trace = read_trace(path)
        said = read_about(path)
        number = said.get("rank", _of_name(path))
        if not isinstance(number, int):
            raise Refused(f"{path}: neither the trace nor its name (run.rank0.trace) says of which rank it is")
        if number in ranks:
            raise Refused(f"rank {number} twice: {ranks[number].path} and {path}")
        if not trace.ops:
            raise Refused(f"{path}: no ops")
        ranks[number] = Rank(number, path, trace, str(said.get("host", "")), waiting_seconds(trace))
        about[number] = said
    ordered = [ranks[number] for number in sorted(ranks)]
    first = ordered[0]
    for rank in ordered[1:]:
        for key, word in (("job", "job"), ("world_size", "number of ranks")):
            one, other = (about[r.number].get(key) for r in (first, rank))
            if one != other:
                raise Refused(f"not one job: {first.path} says {word} {one!r}, {rank.path} says {other!r}")
    world = about[first.number].get("world_size") or ordered[-1].number + 1
    missing = [str(number) for number in range(world) if number not in ranks]
    if missing:
        raise Refused(f"of {world} ranks {', '.join(missing)} missing: the slowest may be among them")
    if world < 2:
        raise Refused(f"{first.path} is one rank alone: memmgr simulate {first.path} --sweep")
    return ordered


def _of_name(path: Path) -> int | None:
    found = re.findall(r"rank[._-]?(\d+)", path.name)
    return int(found[-1]) if found else None


def waiting_seconds(trace: Trace) -> float:
    """Time in collectives and right after them, while the program waits for work that it has begun."""
    seconds, inside = 0.0, False
    for op in trace.ops:
        collective = op.name.startswith(_COLLECTIVE)
        if collective or (inside and op.name == BETWEEN):
            seconds += op.seconds
        inside = collective
    return seconds


def _limits(args: argparse.Namespace, ranks: Sequence[Rank]) -> list[Limit]:
    limits: list[Limit] = []
    everyone = tuple(range(len(ranks)))
    if args.total is not None:
        limits.append(Limit(everyone, parse_limit(args.total, what="--total")))
    if args.host_total is not None:
        if not all(rank.host for rank in ranks):
            raise Refused("--host-total: the traces do not say on which host they were recorded; --total does without")
        size = parse_limit(args.host_total, what="--host-total")
        for host in dict.fromkeys(rank.host for rank in ranks):
            limits.append(Limit(tuple(i for i in everyone if ranks[i].host == host), size))
    if args.limit is not None:
        limits += [Limit((i,), parse_limit(args.limit, what="--limit")) for i in everyone]
    limits = [limit for limit in limits if limit.size_bytes < UNLIMITED]
    if not limits:
        raise Refused("how much is there? --total 48GB for all ranks together, --host-total, or --limit 12GB for each")
    return limits


# ---- the split


def _best(ranks: Sequence[Rank], limits: Sequence[Limit], look: Callable[[Rank, int], None]) -> Split:
    """The best split, refined around the budgets that it gives the ranks."""
    found = split([rank.curve() for rank in ranks], limits) if all(rank.curve().points for rank in ranks) else None
    if found is None:
        for rank in ranks:
            _floor(rank, look)
        found = split([rank.curve() for rank in ranks], limits)
    if found is None:
        raise Refused(_too_little(ranks, limits))
    for _ in range(ROUNDS):
        for rank, budget in zip(ranks, found.budgets, strict=True):
            sizes = sorted(rank.found)
            at = sizes.index(budget)
            for neighbour in sizes[max(0, at - 1) : at + 2]:
                middle = (neighbour + budget) // 2
                if middle not in rank.found:
                    look(rank, middle)
        found = split([rank.curve() for rank in ranks], limits) or found
    return found


def _floor(rank: Rank, look: Callable[[Rank, int], None]) -> None:
    """The smallest budget that fits, by bisection."""
    fits = [size for size, seconds in rank.found.items() if seconds is not None]
    high = min(fits, default=rank.need_bytes)
    if not fits:
        look(rank, high)
    low = max((size for size, seconds in rank.found.items() if seconds is None and size < high), default=0)
    for _ in range(FLOOR_ROUNDS):
        middle = (low + high) // 2
        look(rank, middle)
        low, high = (middle, high) if rank.found[middle] is None else (low, middle)


def _too_little(ranks: Sequence[Rank], limits: Sequence[Limit]) -> str:
    floors = [rank.curve().floor_bytes for rank in ranks]
    for limit in limits:
        least = sum(floors[i] for i in limit.ranks)
        if least > limit.size_bytes:
            each = ", ".join(f"rank {ranks[i].number} {show_floor(floors[i])}" for i in limit.ranks)
            return f"{show_size(limit.size_bytes)} are less than what fits, {show_floor(least)}: {each}"
    raise AssertionError("the floors fit, and no split was found")  # a bug of memmgr


# ---- output


def _slowest(ranks: Sequence[Rank], budgets: Sequence[int]) -> float | None:
    seconds = [rank.curve().seconds(budget) for rank, budget in zip(ranks, budgets, strict=True)]
    there = [one for one in seconds if one is not None]
    return max(there) if len(there) == len(seconds) else None


def _as_json(
    ranks: Sequence[Rank], limits: Sequence[Limit], budgets: Sequence[int], evenly: Sequence[int], transfer: float
) -> dict[str, Any]:
    best, same = _slowest(ranks, budgets), _slowest(ranks, evenly)
    return {
        "limits": [{"ranks": [ranks[i].number for i in one.ranks], "bytes": one.size_bytes} for one in limits],
        "step_seconds": None if best is None else best + transfer,
        "equal_step_seconds": None if same is None else same + transfer,
        "unmanaged_step_seconds": max(rank.own_seconds for rank in ranks) + transfer,
        "ranks": [
            {
                "rank": rank.number, "host": rank.host, "trace": str(rank.path), "need_bytes": rank.need_bytes,
                "unmanaged_seconds": rank.own_seconds, "waits_seconds": rank.waits,
                "budget_bytes": budget, "seconds": rank.curve().seconds(budget),
                "equal_bytes": even, "equal_seconds": rank.curve().seconds(even), "curve": rank.curve().points,
            }
            for rank, budget, even in zip(ranks, budgets, evenly, strict=True)
        ],
    }  # fmt: skip


def _show(
    ranks: Sequence[Rank], limits: Sequence[Limit], budgets: Sequence[int], evenly: Sequence[int], transfer: float
) -> None:
    def time(seconds: float | None) -> str:
        return "does not fit" if seconds is None else show_seconds(seconds)

    rows = [
        [
            str(rank.number), show_size(rank.need_bytes), show_seconds(rank.own_seconds),
            show_size(even), time(rank.curve().seconds(even)), show_size(budget), time(rank.curve().seconds(budget)),
        ]
        for rank, budget, even in zip(ranks, budgets, evenly, strict=True)
    ]  # fmt: skip
    steps = [_slowest(ranks, evenly), _slowest(ranks, budgets)]
    told = [time(None if step is None else step + transfer) for step in steps]
    unmanaged = max(rank.own_seconds for rank in ranks) + transfer
    rows.append(
        [
            "step", show_size(sum(rank.need_bytes for rank in ranks)), show_seconds(unmanaged),
            show_size(sum(evenly)), told[0], show_size(sum(budgets)), told[1],
        ]
    )  # fmt: skip
    table(["rank", "need", "unmanaged", "equal", "time", "best", "time"], rows)
    waits = f" and the {show_seconds(transfer)} that every rank waits" if transfer else ""
    print(f"step: the time of its slowest rank{waits}, as ranks that meet once a step. In a pipeline it is no less.")
    cases = " ".join(
        f"{r.number}) export MEMMGR_BUDGET={budget // 1000}kB;;" for r, budget in zip(ranks, budgets, strict=True)
    )
    print(f"In a wrapper of your launcher:\n  case $RANK in {cases} esac")
