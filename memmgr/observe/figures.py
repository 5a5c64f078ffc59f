"""What `memmgr.stats()` has: every figure by its name, with a sentence. The API reference prints this table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        name: its key in `memmgr.stats()`; `_bytes` and `_seconds` are units, what has neither is a count.
        meaning: one sentence, without its full stop.
    """

    name: str
    meaning: str


FIGURES: tuple[Figure, ...] = (
    # Memory.
    Figure("budget_bytes", "the budget; 2^64 - 1 where there is no limit"),
    Figure("resident_bytes.current", "what torch holds on the device now"),
    Figure("resident_bytes.peak", "the most that torch held on the device at once"),
    Figure("unmanaged_peak_bytes", "the most that it would have held without memmgr"),
    Figure("floor_bytes", "the smallest budget that the run could have had so far"),
    Figure("held_bytes.peak", "the most that could not leave"),
    Figure("outside_bytes", "what counts against the budget and was allocated elsewhere, before it opened for example"),
    Figure("committed_bytes.peak", "the most memory that the arena had behind its addresses"),
    Figure("fragmentation", "1 - longest run / free bytes, of the addresses that are used without remap; 0 to 1"),
    # What left, and came back.
    Figure("evictions", "tensors that were dropped, to be made again"),
    Figure("evicted_bytes", "bytes of the evictions"),
    Figure("offloads", "tensors that were written to the tier below, ahead of need included"),
    Figure("offload_bytes", "bytes of the offloads"),
    Figure("write_backs", "offloads that were written ahead of need"),
    Figure("clean_drops", "tensors that left without a write: the tier had a copy"),
    Figure("packed", "tensors of two values that left all but a bit an element"),
    Figure("reloads", "tensors that were read back"),
    Figure("reload_bytes", "bytes of the reloads"),
    Figure("reads_ahead", "reads that a plan began before an op needed the bytes"),
    Figure("late_reads", "reads ahead that somebody had to wait for"),
    Figure("prefetch_hits", "reads ahead that were in time"),
    Figure("tier_bytes.peak", "the most that lay on the tier below"),
    Figure("tier_errors", "writes and reads of the tier that failed"),
    Figure("recomputes", "ops that ran again"),
    Figure("rematerializations", "times that something was made again; each may run several ops"),
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
    Figure("short_periods", "planned passes in which malloc had to choose for itself"),
    Figure("plans", "plans that were made"),
    Figure("plan_seconds", "making plans, beside the training"),
    Figure("rankings", "times that a policy ranked"),
    Figure("reclaims", "times that malloc asked for room"),
    # Ops, and what was seen of them.
    Figure("ops", "ops that the pager's kernel saw, views included"),
    Figure("recorded_ops", "ops that are known well enough to run again"),
    Figure("trials", "ops that ran twice, to be compared at the first use of their kind"),
    Figure("refused_kinds", "kinds of ops that did not reproduce: copied, never run again"),
    Figure("copies_before_write", "old bytes that were copied because somebody still needs them"),
    Figure("cut_recipes", "recipes that were given up to keep all of them small"),
    Figure("recipe_bytes", "what recipes take now, with what is kept for them"),
    Figure("retries", "ops that found no room and were tried again alone"),
    Figure("trap_retries", "ops that asked for bytes that were away, and ran once more"),
    Figure("admission_waits", "ops that waited until others gave room"),
    Figure("unseen_ops", "first ops of threads that are older than the budget"),
    Figure("works_in_flight", "collectives that are not done"),
    # Tensors.
    Figure("cells", "storages that the pager knows now"),
    Figure("absent_cells", "cells whose bytes are away now"),
    Figure("pinned_cells", "cells that something keeps in memory now, without small ones"),
    Figure("orphans", "cells that the program has let go of and others are made from"),
    Figure("adopted", "storages of another allocator that the pager manages, from before the budget for example"),
    Figure("adopted_bytes", "bytes of what was adopted"),
    Figure("escapes", "storages whose address was handed out for good"),
    Figure("escaped_bytes", "bytes of escaped storages that live"),
    Figure("foreign_writes", "writes by C++ that no op announced"),
)
"""All of them but `escapes.MODULE:LINE`, which says how often a place in the program handed an address out."""
