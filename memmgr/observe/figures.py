"""What `memmgr.stats()` has: every figure by its name, with a sentence. The API reference prints this table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Where = Literal["everywhere", "CPU", "devices"]


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        name: its key in `memmgr.stats()`; `_bytes` and `_seconds` are units, what has neither is a count.
        meaning: one sentence, without its full stop.
        where: whose budgets have it: the CPU device's, other devices', or both.
    """

    name: str
    meaning: str
    where: Where = "everywhere"


FIGURES: tuple[Figure, ...] = (
    # Memory.
    Figure("budget_bytes", "the budget; 2^64 - 1 where there is no limit"),
    Figure("resident_bytes.current", "what torch holds on the device now"),
    Figure("resident_bytes.peak", "the most that torch held on the device at once"),
    Figure("unmanaged_peak_bytes", "the most that it would have held without memmgr"),
    Figure("floor_bytes", "the smallest budget that the run could have had so far"),
    Figure("held_bytes.peak", "the most that could not leave; on devices what the program holds"),
    Figure("outside_bytes", "what counts against the budget and was allocated elsewhere, before it opened for example"),
    Figure("committed_bytes.peak", "the most memory that the arena had behind its addresses"),
    Figure("fragmentation", "1 - longest run / free bytes, of the addresses that are used without remap; 0 to 1"),
    Figure("recorded_peak_bytes", "`unmanaged_peak_bytes` of the passes that were recorded", "devices"),
    # What left, and came back.
    Figure("evictions", "tensors that were dropped, to be made again"),
    Figure("evicted_bytes", "bytes of the evictions"),
    Figure("offloads", "tensors that were written to the tier below, ahead of need included"),
    Figure("offload_bytes", "bytes of the offloads"),
    Figure("write_backs", "offloads that were written ahead of need"),
    Figure("clean_drops", "tensors that left without a write: the tier had a copy"),
    Figure("packed", "tensors of two values that left all but a bit an element", "CPU"),
    Figure("binarized", "tensors of two values that left all but a bit an element", "devices"),
    Figure("binarized_bytes", "bytes of what was binarized", "devices"),
    Figure("unranked_releases", "tensors that malloc took in need, without a ranking", "devices"),
    Figure("reloads", "tensors that were read back"),
    Figure("reload_bytes", "bytes of the reloads"),
    Figure("reads_ahead", "reads that a plan began before an op needed the bytes", "CPU"),
    Figure("late_reads", "reads ahead that somebody had to wait for", "CPU"),
    Figure("prefetch_hits", "reads ahead that were in time"),
    Figure("prefetch_misses", "reads that began only when the bytes were needed", "devices"),
    Figure("tier_bytes.peak", "the most that lay on the tier below"),
    Figure("tier_errors", "writes and reads of the tier that failed"),
    Figure("recomputes", "ops that ran again"),
    Figure("rematerializations", "times that something was made again; each may run several ops", "CPU"),
    # Time.
    Figure("wall_seconds", "since the budget opened, or while it was open"),
    Figure("recompute_seconds", "running ops again"),
    Figure("stall_seconds", "waiting for reads and for room"),
    Figure("search_seconds", "choosing who leaves by address, where a search does"),
    Figure(
        "checkpoint_seconds", "running ops that the program itself ran again inside backward, as checkpointing does"
    ),
    Figure("watched_seconds", "of all passes together"),
    # Passes and plans.
    Figure("passes", "backwards that ended; a pass goes from the end of one to the end of the next"),
    Figure("planned_passes", "passes that followed a plan to its end"),
    Figure("short_periods", "planned passes in which malloc had to choose for itself", "CPU"),
    Figure("plans", "plans that were made"),
    Figure("plan_seconds", "making plans, beside the training"),
    Figure("rankings", "times that a policy ranked"),
    Figure("reclaims", "times that malloc asked for room"),
    # Ops, and what was seen of them.
    Figure("ops", "ops that the pager's kernel saw, views included", "CPU"),
    Figure("recorded_ops", "ops that are known well enough to run again"),
    Figure("saved_tensors", "tensors that autograd saved", "devices"),
    Figure("trials", "ops that ran twice, to be compared at the first use of their kind", "CPU"),
    Figure("refused_kinds", "kinds of ops that did not reproduce: copied, never run again", "CPU"),
    Figure("copies_before_write", "old bytes that were copied because somebody still needs them", "CPU"),
    Figure("cut_recipes", "recipes that were given up to keep all of them small", "CPU"),
    Figure("recipe_bytes", "what recipes take now, with what is kept for them", "CPU"),
    Figure("retries", "ops that found no room and were tried again alone", "CPU"),
    Figure("trap_retries", "ops that asked for bytes that were away, and ran once more", "CPU"),
    Figure("admission_waits", "ops that waited until others gave room", "CPU"),
    Figure("unseen_ops", "first ops of threads that are older than the budget", "CPU"),
    Figure("works_in_flight", "collectives that are not done", "CPU"),
    # Tensors.
    Figure("cells", "storages that the pager knows now", "CPU"),
    Figure("absent_cells", "cells whose bytes are away now", "CPU"),
    Figure("pinned_cells", "cells that something keeps in memory now, without small ones", "CPU"),
    Figure("orphans", "cells that the program has let go of and others are made from", "CPU"),
    Figure(
        "adopted", "storages of another allocator that the pager manages, from before the budget for example", "CPU"
    ),
    Figure("adopted_bytes", "bytes of what was adopted", "CPU"),
    Figure("escapes", "storages whose address was handed out for good", "CPU"),
    Figure("escaped_bytes", "bytes of escaped storages that live", "CPU"),
    Figure("foreign_writes", "writes by C++ that no op announced", "CPU"),
)
"""All of them but `escapes.MODULE:LINE`, which says how often a place in the program handed an address out."""
