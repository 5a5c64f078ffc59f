"""Copies to a tier during a pass: when each is queued, and when a written storage is freed.

Writes follow one another in the order in which they are queued. A written storage is freed when its copy would be
complete if no op waited. Reads are queued as late as possible, so that they follow one another and each ends before its
use, or at an event that the caller names.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from memmgr.policies.simulate.decided import Accesses
from memmgr.policies.trace import TierLink, Trace
from memmgr.policies.trace.schedule import Do, Step


@dataclass(frozen=True)
class Swap:
    """A storage that is absent for a while."""

    storage: int
    out: int  # the event after which it is written
    back: int  # the event that reads it again
    # the event after which it is freed, if the copy is waited for then; None: when the copy is complete
    gone: int | None = None
    asked: int | None = None  # the event before which its read is queued; None: as late as possible
    by: int | None = None  # the event after which it is freed at the latest, however long that waits
    not_before: int = 0  # the event before which its read is queued at the earliest


def with_copies(trace: Trace, events: Sequence[Step], swaps: Sequence[Swap], tier: TierLink) -> list[Step]:
    """The events with these copies among them. A swap that would not be written before it is wanted is left out."""
    seconds = [trace.ops[e.target].seconds if e.do in (Do.COMPUTE, Do.RECOMPUTE) else 0.0 for e in events]
    start = [0.0, *accumulate(seconds)]
    before: dict[int, list[Step]] = defaultdict(list)
    after: dict[int, list[Step]] = defaultdict(list)
    busy = 0.0
    leaves: dict[int, int] = {}
    kept: list[Swap] = []
    for swap in sorted(swaps, key=lambda swap: swap.out):
        took = tier.latency_seconds + trace.storages[swap.storage].size_bytes / tier.write_bytes_per_second
        done = max(busy, start[swap.out + 1]) + took
        gone = bisect_left(start, done) - 1 if swap.gone is None else swap.gone
        gone = max(gone if swap.by is None else min(gone, swap.by), swap.out)
        if gone + 1 >= swap.back:
            continue
        busy = done
        kept.append(swap)
        leaves[len(kept) - 1] = gone
        after[swap.out].append(Step(Do.OFFLOAD, swap.storage))
        after[gone].append(Step(Do.FREE, swap.storage))
    free_from = float("inf")
    for number in sorted(range(len(kept)), key=lambda number: -kept[number].back):
        swap = kept[number]
        took = tier.latency_seconds + trace.storages[swap.storage].size_bytes / tier.read_bytes_per_second
        free_from = min(free_from, start[swap.back]) - took
        asked = bisect_right(start, max(free_from, 0.0)) - 1 if swap.asked is None else swap.asked
        before[min(max(asked, leaves[number] + 1, swap.not_before), swap.back)].insert(0, Step(Do.RELOAD, swap.storage))
    found: list[Step] = []
    for i, event in enumerate(events):
        found += before.get(i, ())
        found.append(event)
        found += sorted(after.get(i, ()), key=lambda step: step.do is Do.FREE)
    return found


def across(trace: Trace, accesses: Accesses, turn: int) -> dict[int, tuple[int, int]]:
    """Storages that forward makes and backward reads: the last op of forward that touches each, and the first of
    backward.
    """
    found = {}
    for s, storage in enumerate(trace.storages):
        if storage.maker < turn and s not in trace.constants and storage.size_bytes:
            pair = accesses.around(s, turn - 1)
            if pair is not None:
                found[s] = pair
    return found


def around_shortage(swaps: Iterable[Swap], used_bytes: Sequence[int], budget_bytes: int) -> list[Swap]:
    """The same swaps, each absent wherever memory is short between its uses. Swaps that never help are left out."""
    over = [k for k, used in enumerate(used_bytes) if used > budget_bytes]
    found = []
    for swap in swaps:
        first, last = bisect_right(over, swap.out), bisect_left(over, swap.back) - 1
        if first <= last:
            found.append(replace(swap, by=over[first] - 1, not_before=over[last] + 1))
    return found
