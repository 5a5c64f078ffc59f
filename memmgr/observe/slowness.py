"""Explains a slow run in words: the shares of its time, and the one change that would help most."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memmgr.config.sizes import UNLIMITED, show_size

from .advice import WORTH_SAYING, advice, handed_out, more_budget, states_change

WHERE = "where the time went: "
REMOVED = 0.8
"""The share of the recomputing and waiting that the budget of `more_budget` removes."""
LIKELY = 0.1
"""The share of the passes without a plan from which they are a cause."""
FEW_PASSES = 12
"""A run of fewer passes often ends before its plan is made: a plan is of a pass that came twice."""
FIRST_PASSES = 5
"""Passes that are measured before a plan can be followed: no cause."""


@dataclass(frozen=True)
class Losses:
    """Shares of the run's time, 0 to 1; those of several threads add up.

    Attributes:
        recompute: ops ran again.
        reads: ops waited for bytes to be read back.
        room: ops waited for room.
        copies: copies to and from the tier: of the processors' time, all cores together. Time that the processors lost
            (`lost_seconds`) counts as theirs. 0 on an accelerator.
        per_op: the pager's own work for each op, as measured in one op of 64.
        lost: the part of `copies` that no thread had.
    """

    recompute: float
    reads: float
    room: float
    copies: float
    per_op: float
    lost: float = 0.0

    @property
    def whole(self) -> float:
        """The share of the time; copies run beside the ops, and are not in it."""
        return self.recompute + self.reads + self.room + self.per_op

    @property
    def text(self) -> str:
        """All of them in words."""
        return (
            f"recomputing {self.recompute:.1%}, waiting {self.reads:.1%} for reads and {self.room:.1%} for room, "
            f"copies {self.copies:.1%} of the cores, per-op cost {self.per_op:.1%}"
        )


def losses(stats: Mapping[str, Any], cores: int | None = None) -> Losses:
    """Where the time went.

    Args:
        stats: `memmgr.stats()`.
        cores: that the process may use; default those of `stats`, else of this machine.
    """
    wall = max(float(stats.get("wall_seconds", 0.0)), 1e-9)
    room = float(stats.get("room_seconds", 0.0))
    cores = cores or int(stats.get("cores", 0)) or len(os.sched_getaffinity(0))
    lost = float(stats.get("lost_seconds", 0.0))
    return Losses(
        float(stats["recompute_seconds"]) / wall,
        max(0.0, float(stats["stall_seconds"]) - room) / wall,
        room / wall,
        (float(stats.get("copy_seconds", 0.0)) + lost) / wall / cores,
        float(stats.get("own_seconds", 0.0)) / wall,
        lost / wall / cores,
    )


def unplanned(stats: Mapping[str, Any], reason: str = "") -> str:
    """The passes without a plan and why, in words; empty where they are few.

    Args:
        stats: `memmgr.stats()`.
        reason: why there is no plan, or why passes leave it, where that is known.
    """
    passes, planned = int(stats["passes"]), int(stats.get("planned_passes", 0))
    left = int(stats.get("left_passes", 0))
    without = passes - planned
    if (
        passes <= FIRST_PASSES
        or without < LIKELY * passes
        or int(stats["unmanaged_peak_bytes"]) <= int(stats["budget_bytes"])
    ):
        return ""
    if not reason and not left and planned > without:
        return ""  # passes that were measured, before there was a plan
    if reason:
        why = reason
    elif left:
        why = f"{left:,} did other ops than the plan"
    elif int(stats.get("plans", 0)):
        why = "they ended before the plan was made, or are unlike the planned ones"
    else:
        why = "no plan was made" + (" (a run of so few often ends before its plan)" if passes < FEW_PASSES else "")
    return f"{without:,} of {passes:,} passes followed no plan to its end: {why}"


def best_change(stats: Mapping[str, Any], *, binary: bool = False) -> tuple[str, float] | None:
    """The one change that would help most, and the share of the time that it would save: an estimate. None: there is none.

    Args:
        stats: `memmgr.stats()`.
        binary: sizes in powers of two.
    """
    size = functools.partial(show_size, binary=binary)
    if int(stats["budget_bytes"]) >= UNLIMITED:
        return None
    found = losses(stats)
    changes: list[tuple[float, str]] = []
    knob = states_change(dict(stats), binary=binary)
    more = more_budget(dict(stats), REMOVED)
    if knob is not None:
        changes.append(knob)
    elif more is not None:
        then = size(int(stats["budget_bytes"]) + more)
        changes.append((REMOVED * (found.whole - found.per_op), f"+{size(more)} of budget ({then})"))
    if found.per_op > WORTH_SAYING:
        changes.append((found.per_op / 2, "twice the batch: the cost of an op does not depend on its size"))
    if found.lost > WORTH_SAYING:
        changes.append((found.lost, "memory to spare as --host: copies to this disk take time from the processors"))
    if not changes:
        return None
    saved, text = max(changes)
    return text, min(saved, 1.0)


HELPS = "what would help most: "
CYCLE = "a reference cycle"
"""A leak's keeper, where no variable leads to it."""
LEAKED = "an end of the leak: more budget only delays it"
_ENDS = (
    (CYCLE, ""),  # it names its own end
    ("one tensor grows", ". Keep only the part of it that is needed"),
    ("kept in the dict", ". Remove entries that are no longer needed, or keep numbers in place of tensors"),
    ("in the backward", ". Keep numbers, as grad.norm().item() makes them, and not the tensor"),
    ("", ". Keep numbers, as loss.item() makes them, and not the tensor"),
)
"""Words of a leak's sentence, and how such a leak ends; the first that is met."""


def end_of_leak(leaks: Sequence[str]) -> str:
    """The change that would help a run that leaks.

    Args:
        leaks: sentences about them, the largest first.
    """
    return HELPS + LEAKED + next(end for words, end in _ENDS if words in leaks[0])


def wants_budget(leaks: Sequence[str], ended_by: str) -> bool:
    """More budget may be advised: not beside a leak, and not after a `BudgetError`, which names a budget itself.

    Args:
        leaks: sentences about them.
        ended_by: the class of the exception that ended the run; empty: none.
    """
    return not leaks and ended_by != "BudgetError"


def lines(
    stats: Mapping[str, Any], *, binary: bool = False, reason: str = "", leaks: Sequence[str] = (), ended_by: str = ""
) -> list[str]:
    """Where the time went, passes without a plan, the change that would help most, exported tensors: one to four lines.

    Args:
        stats: `memmgr.stats()`.
        binary: sizes in powers of two.
        reason: as in `unplanned`.
        leaks, ended_by: as in `wants_budget`.
    """
    parts = [WHERE + losses(stats).text, unplanned(stats, reason)]
    best = best_change(stats, binary=binary) if wants_budget(leaks, ended_by) else None
    if leaks:
        parts.append(end_of_leak(leaks))
    elif best is not None:
        parts.append(f"{HELPS}{best[0]}, about {best[1]:.0%} less time (an estimate)")
    return [part for part in (*parts, *handed_out(stats, binary=binary)) if part]


def why_slow(stats: Mapping[str, Any], **options: Any) -> str:
    """`lines` as one sentence, with the same options."""
    return "; ".join(lines(stats, **options))


def is_slow(stats: Mapping[str, Any]) -> bool:
    """The losses are worth a line. Where all tensors fitted they are not: more budget would change nothing."""
    found = losses(stats)
    fitted = int(stats["unmanaged_peak_bytes"]) <= int(stats["budget_bytes"])
    return not fitted and max(found.whole, found.copies) >= WORTH_SAYING


def more_advice(stats: dict[str, Any], *, binary: bool = False, leaks: Sequence[Any] = ()) -> list[str]:
    """The advice that the summary of a run does not have yet.

    Args:
        stats: `memmgr.stats()`.
        binary: sizes in powers of two.
        leaks: those that go on: a run that leaks needs more with every step, so no size is advised.
    """
    found = [] if leaks else advice(stats, binary=binary)
    return found[:1] if is_slow(stats) else found  # the summary of a slow run has the change that would help most
