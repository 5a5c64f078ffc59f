"""Summaries of a run: the one line at its end, and the figures of a table or a page."""

from __future__ import annotations

import atexit
import functools
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from memmgr.common.say import say
from memmgr.config.conf import parse_conf
from memmgr.config.sizes import UNLIMITED, is_binary, show_floor, show_seconds, show_size

from .advice import fixed_memory, own_checkpointing
from .slowness import FEW_PASSES

says_next = True
"""The summary names the next command when the process ends; `memmgr run` does that itself."""
_next = ""
_process = os.getpid()


def summary(s: dict[str, Any], *, binary: bool = False) -> str:
    """One line, as it is printed.

    Args:
        s: `memmgr.stats()`.
        binary: sizes in powers of two, as the user wrote the budget; below, too.
    """
    return "memmgr: " + _line(s, binary)


def _line(s: dict[str, Any], binary: bool) -> str:
    size = functools.partial(show_size, binary=binary)
    limit = s["budget_bytes"]
    of = f" of {size(limit)} ({size(s['unmanaged_peak_bytes'])} unmanaged)" if limit < UNLIMITED else " without a limit"
    planned = f" ({s['planned_passes']} by plan)" if s["planned_passes"] else ""
    factor = slowdown(s)
    if measuring := s.get("measuring_bytes.peak", 0):
        of += f", {size(measuring)} while it measured"
    slower = "" if factor is None else f", at least {factor:.2f}x of an unlimited run"
    if factor is not None and is_short(s):
        slower = ", too few to tell a slowdown"
    return (
        f"peak {size(s['resident_bytes.peak'])}{of}; {s['passes']} "
        f"pass{'' if s['passes'] == 1 else 'es'}{planned} in {show_seconds(s['wall_seconds'])}{slower}; "
        f"evicted {s['evictions']} ({size(s['evicted_bytes'])}), offloaded {s['offloads']} ({size(s['offload_bytes'])})"
    )


def slowdown(s: dict[str, Any]) -> float | None:
    """A lower bound on the run's time over that of one without a limit. The time without recomputing, without waiting and, on the
    CPU, without the pager's own work for each op is the most that the unlimited run would have taken.

    Args:
        s: `memmgr.stats()`.

    Returns:
        At least 1; None without a limit, before a pass has ended, and where the waits of several threads add up to all the
        time.

    Known limitation: the time that copies take from the cores that compute and from memory's bandwidth is not in it. On an
    accelerator the cost of an op is not either: the host runs ahead of the device, and hides it.
    """
    wall, lost = float(s["wall_seconds"]), float(s["recompute_seconds"]) + float(s["stall_seconds"])
    if not s.get("host_ahead", 1):
        lost += float(s.get("own_seconds", 0.0))
    known = s["budget_bytes"] < UNLIMITED and s.get("passes", 0) and lost < wall
    return wall / (wall - lost) if known else None


def is_short(s: dict[str, Any]) -> bool:
    """Tells if the run has few passes, most of them without a plan: the beginning of a budget is most of its cost then.

    Args:
        s: `memmgr.stats()`.
    """
    passes = int(s.get("passes", 0))
    return passes < FEW_PASSES and 2 * int(s.get("planned_passes", 0)) < passes


def main_figures(s: dict[str, Any], *, binary: bool = False) -> list[tuple[str, str]]:
    """The main figures of a run, each with its name.

    Args:
        s: `memmgr.stats()`.
    """
    size = functools.partial(show_size, binary=binary)
    wall = max(float(s["wall_seconds"]), 1e-9)
    limit = int(s["budget_bytes"])
    return [
        ("budget", "none" if limit >= UNLIMITED else size(limit)),
        ("peak", size(s["resident_bytes.peak"])),
        *(("peak while it measured", size(each)) for each in [s.get("measuring_bytes.peak", 0)] if each),
        ("unmanaged it would need", size(s["unmanaged_peak_bytes"])),
        ("smallest budget (floor)", show_floor(s["floor_bytes"], binary=binary)),
        ("passes", f"{s['passes']:,}"),
        ("of these by plan", f"{s.get('planned_passes', 0):,}"),
        ("time", show_seconds(wall)),
        *(
            ("slowdown", f"at least {factor:.2f}x")
            for factor in [slowdown(s)]
            if factor is not None and not is_short(s)
        ),
        ("recomputing", f"{s['recompute_seconds'] / wall:.1%}"),
        ("waiting", f"{s['stall_seconds'] / wall:.1%}"),
    ]


def spread(ranks: list[dict[str, Any]], *, binary: bool = False) -> list[str]:
    """How far the ranks of a job are apart, in one line; none where there is one.

    Args:
        ranks: `memmgr.stats()` of each.
    """
    if len(ranks) < 2:
        return []
    peaks = [s["resident_bytes.peak"] for s in ranks]
    factors = [factor for factor in map(slowdown, ranks) if factor is not None]
    slower = f"; at least {min(factors):.2f}x to {max(factors):.2f}x of an unlimited run" if factors else ""
    least, most = (show_size(peak, binary=binary) for peak in (min(peaks), max(peaks)))
    return [f"of {len(ranks)} ranks: peak {least} to {most}{slower}"]


def fixed(s: dict[str, Any], *, binary: bool = False) -> list[str]:
    """Fixed memory that counts though it is not torch's, in one line; none where it is less than a tenth of the budget.

    Args:
        s: `memmgr.stats()`.
    """
    parts = fixed_memory(s, s["budget_bytes"], binary=binary)
    return [f"of the peak fixed: {parts}; `.clone()` of such a tensor can be evicted"] if parts else []


def report(
    s: dict[str, Any],
    ranks: list[dict[str, Any]],
    *,
    log: str | os.PathLike[str] | None = None,
    binary: bool = False,
    more: Sequence[str] = (),
) -> None:
    """Prints the summary line, and further lines where there is something to report.

    Args:
        s: `memmgr.stats()`.
        ranks: the same of all ranks, if this rank is one of several and prints for all of them.
        log: the telemetry's; None: there is none.
        more: further lines.
    """
    lines = [*fixed(s, binary=binary), *more, *spread(ranks, binary=binary), *own_checkpointing(s, binary=binary)]
    global _next
    _next = next_command(log) if s["resident_bytes.peak"] else ""
    say(_line(s, binary), *lines)


def next_command(log: str | os.PathLike[str] | None) -> str:
    """Where to look closer."""
    if log is None:
        if "MEMMGR_BUDGET" in os.environ:
            return "to look closer:  the same command with MEMMGR_CONF=log:run.jsonl, then memmgr report run.jsonl"
        return 'to look closer:  log="run.jsonl" as an argument of the budget, then memmgr report run.jsonl'
    return "where the time and the memory went:  memmgr report " + shlex.quote(os.fspath(log))


def too_small(error: BaseException | None, given: str | None) -> str:
    """The command that works where the budget of MEMMGR_BUDGET was too small; empty where that is not the reason.

    Args:
        error: the exception that ended the program.
        given: MEMMGR_BUDGET; None: the budget is not the variable's.
    """
    raised: Any = error  # its class is not imported here: torch would be, too
    if given is None or type(error).__name__ != "BudgetError" or raised.tier_bytes:
        return ""
    budget = show_size(raised.enough_bytes, binary=is_binary(given)).replace(" ", "")  # it is rounded up already
    alone = "RANK" not in os.environ  # a rank's command is the launcher's
    command = shlex.join(sys.orig_argv) if alone else "the same command"
    return f"the budget was too small. Next:  MEMMGR_BUDGET={budget} {command}"


@atexit.register  # at the import, so after all budgets have closed; once, however many there were
def _say_next() -> None:
    if not says_next or os.getpid() != _process:
        return
    text = too_small(getattr(sys, "last_value", None), os.environ.get("MEMMGR_BUDGET"))
    if text and parse_conf(os.environ.get("MEMMGR_CONF", "")).get("quiet", False):
        return
    if text or _next:
        print(f"memmgr: {text or _next}", file=sys.stderr)


def fragmentation(arena: dict[str, Any]) -> float:
    """1 - longest run / free bytes, over the addresses that are used without remap; 0 when nothing is free."""
    free, longest = arena.get("placeable_bytes", 0), arena.get("longest_run_bytes", 0)
    return max(0.0, 1.0 - longest / free) if free else 0.0
