"""The one table of the figures of `memmgr.stats()`. The dict, Prometheus' metrics and the API reference are made of it.

A new counter of the pager is a line here, and a counter in C++. `source` has its name there where it is another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Measure = Literal["counter", "gauge"]


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        name: its key in `memmgr.stats()`; `_bytes` and `_seconds` are units; a name with neither is a count.
        kind: a "counter" never falls until the next budget opens; a "gauge" may.
        meaning: one sentence, without its full stop.
        source: where `stats()` reads it: "pager", "arena" or "tier", with a colon and the counter's name where that differs.
            Empty: the figure is not one counter alone, and `PagerFigures` computes it.
        followed: the dashboard and the report compare it between samples.
    """

    name: str
    kind: Measure
    meaning: str
    source: str = ""
    followed: bool = False

    def read(self, counters: Mapping[str, Mapping[str, int]]) -> float:
        """The figure from the counters of each source; 0 where there is no such source. Nanoseconds become seconds."""
        source, _, name = self.source.partition(":")
        value = counters[source][name or self.name] if counters[source] else 0
        return value * 1e-9 if name.endswith(("_ns", "_nanoseconds")) else value


FIGURES: tuple[Figure, ...] = (
    # Memory.
    Figure("budget_bytes", "gauge", "the budget; 2^64 - 1 where there is no limit"),
    Figure("resident_bytes.current", "gauge", "bytes that torch holds on the device now", "pager"),
    Figure(
        "resident_bytes.peak",
        "gauge",
        "the most that torch held on the device at once, since the limit was set where it is a share of the need",
    ),
    Figure(
        "measuring_bytes.peak",
        "gauge",
        "the most that torch held in the passes that measured the need, before the limit was set; 0 without such passes",
    ),
    Figure("unmanaged_peak_bytes", "gauge", "the most that it would have held without memmgr"),
    Figure("floor_bytes", "gauge", "the smallest budget that the run could have had so far"),
    Figure(
        "fixed_bytes.peak",
        "gauge",
        "the most bytes that could not be evicted: small tensors, and those whose address was handed out; pins do not count",
    ),
    Figure(
        "outside_bytes",
        "gauge",
        "bytes that count against the budget and were allocated elsewhere, before it opened for example",
        "arena",
    ),
    Figure(
        "committed_bytes.peak",
        "gauge",
        "the most memory that the arena had behind its addresses",
        "arena:committed_peak_bytes",
    ),
    Figure(
        "fragmentation", "gauge", "1 - longest run / free bytes, of the addresses that are used without remap; 0 to 1"
    ),
    # By role. Tensors under 64 KiB are other.
    Figure("resident_bytes.parameters", "gauge", "parameters: on the device now", "pager"),
    Figure("resident_bytes.gradients", "gauge", "gradients: on the device now", "pager"),
    Figure("resident_bytes.optimizer_states", "gauge", "optimizer states: on the device now", "pager"),
    Figure("resident_bytes.other", "gauge", "all else, activations mostly: on the device now"),
    Figure("offloaded_bytes.parameters", "gauge", "parameters: offloaded now", "pager"),
    Figure("offloaded_bytes.gradients", "gauge", "gradients: offloaded now", "pager"),
    Figure("offloaded_bytes.optimizer_states", "gauge", "optimizer states: offloaded now", "pager"),
    Figure("offloaded_bytes.other", "gauge", "all else, activations mostly: offloaded now"),
    Figure(
        "moved_bytes.parameters",
        "counter",
        "parameters: written to the tier and read back",
        "pager",
        followed=True,
    ),
    Figure("moved_bytes.gradients", "counter", "gradients: written to the tier and read back", "pager", followed=True),
    Figure(
        "moved_bytes.optimizer_states",
        "counter",
        "optimizer states: written to the tier and read back",
        "pager",
        followed=True,
    ),
    Figure(
        "moved_bytes.other",
        "gauge",
        "all else, activations mostly: written to the tier and read back",
        followed=True,
    ),
    Figure(
        "kept_gradient_bytes",
        "gauge",
        "the most bytes of gradients that were set to zero, and not to None, before a backward",
    ),
    Figure(
        "link_bytes_per_second",
        "gauge",
        "measured rate of the link to the tier, one way at a time; 0 without a tier",
    ),
    # Evictions and restores.
    Figure("evictions", "counter", "tensors that were dropped, to be made again", "pager"),
    Figure("evicted_bytes", "counter", "bytes of the evictions", "pager"),
    Figure("offloads", "counter", "tensors that were written to the tier, ahead of need included", "pager"),
    Figure("offload_bytes", "counter", "bytes of the offloads", "pager"),
    Figure("write_backs", "counter", "offloads that were written ahead of need, or tried to be", "pager:writes_ahead"),
    Figure("clean_drops", "counter", "tensors offloaded without a write: the tier had a copy", "pager"),
    Figure("packed", "counter", "tensors of two values that were packed: one bit an element is kept", "pager"),
    Figure("reloads", "counter", "tensors that were read back", "pager"),
    Figure("reload_bytes", "counter", "bytes of the reloads", "pager"),
    Figure("reads_ahead", "counter", "reads that began before an op needed the bytes", "pager"),
    Figure("late_reads", "counter", "prefetches that an op had to wait for", "pager"),
    Figure("prefetch_hits", "gauge", "prefetches that no op had to wait for, running ones included"),
    Figure("tier_bytes.peak", "gauge", "the most that lay in the tier", "tier:used_peak_bytes"),
    Figure(
        "tier_file_bytes",
        "gauge",
        "length of the tier's file; from an accelerator: bytes moved on from host memory",
        "tier:file_bytes",
    ),
    Figure("tier_errors", "counter", "writes and reads of the tier that failed", "pager"),
    Figure("recomputes", "counter", "ops that ran again", "pager:rematerialized_ops"),
    Figure("rematerializations", "counter", "times that something was made again; each may run several ops", "pager"),
    # Time.
    Figure("wall_seconds", "counter", "since the budget opened, or while it was open"),
    Figure("recompute_seconds", "counter", "running ops again", "pager:remat_ns", followed=True),
    Figure("stall_seconds", "counter", "waiting for reads and for room", "pager:stall_ns", followed=True),
    Figure("room_seconds", "counter", "of stall_seconds, waiting for room; the rest is for reads", "pager:room_ns"),
    Figure(
        "own_seconds",
        "counter",
        "the pager's own work for each op, measured in one op of 64; ops that it hands on at once are not in it",
        "pager:own_ns",
    ),
    Figure(
        "copy_seconds",
        "counter",
        "processor time of the copies to and from the tier, on the CPU device",
        "tier:cpu_nanoseconds",
    ),
    Figure(
        "locking_seconds",
        "counter",
        "page-locking host memory for the tier: a little of it when the budget opens, the rest mostly in the background",
        "tier:lock_nanoseconds",
    ),
    Figure(
        "lost_seconds",
        "counter",
        "time that interrupts and a virtual machine's host took from the processors: at most 2 ns for each byte that was copied, "
        "0 without copies and on an accelerator",
    ),
    Figure("cores", "gauge", "processors that the process may use"),
    Figure("host_ahead", "gauge", "1 on an accelerator, which hides the host's work for each op; 0 on the CPU"),
    Figure("search_seconds", "counter", "choosing victims by address, where a search does", "arena:search_nanoseconds"),
    Figure(
        "checkpoint_seconds",
        "counter",
        "running ops that the program itself ran again inside backward, as checkpointing does",
    ),
    Figure("watched_seconds", "counter", "of all passes together", followed=True),
    # Passes and plans.
    Figure(
        "passes",
        "counter",
        "backwards that ended, a pass goes from the end of one to the end of the next; without one, equal turns of a loop",
        followed=True,
    ),
    Figure(
        "planned_passes", "counter", "passes that followed a plan to its end", "pager:planned_periods", followed=True
    ),
    Figure(
        "left_passes",
        "counter",
        "passes that followed no plan to its end although there were plans",
        "pager:left_periods",
    ),
    Figure(
        "steps",
        "counter",
        "steps of the optimizer that has taken most; one of torch's, or a subclass: others are not seen",
        followed=True,
    ),
    Figure("short_periods", "counter", "planned passes in which malloc had to choose for itself", "pager"),
    Figure("plans", "counter", "plans that were made"),
    Figure("plan_seconds", "counter", "making plans, beside the training"),
    Figure("rankings", "counter", "times that a policy ranked"),
    Figure("reclaims", "counter", "times that malloc asked for room", "arena"),
    # Ops.
    Figure("ops", "counter", "ops that the pager's kernel saw, views included", "pager"),
    Figure("recorded_ops", "counter", "ops that are known well enough to run again", "pager"),
    Figure("trials", "counter", "ops that ran twice, to be compared at the first use of their kind", "pager"),
    Figure("refused_kinds", "counter", "kinds of ops that did not reproduce: copied, never run again", "pager"),
    Figure("cut_recipes", "counter", "recipes that were given up to keep all of them small", "pager"),
    Figure("recipe_bytes", "gauge", "memory of recipes now, with the values kept for them", "pager"),
    Figure("retries", "counter", "ops that found no room and were tried again alone", "pager"),
    Figure(
        "slices",
        "counter",
        "pieces in which list ops over many tensors ran, since all at once would take too much room",
        "pager",
    ),
    Figure(
        "pending_slices", "counter", "slices of optimizers' steps that waited until an op needed their results", "pager"
    ),
    Figure(
        "unseen_ops",
        "counter",
        "first ops of threads that C++ started, or that are older than `import memmgr`",
        "pager",
    ),
    # Tensors.
    Figure("cells", "gauge", "storages that the pager knows now", "pager"),
    Figure("absent_cells", "gauge", "cells whose bytes are absent now", "pager"),
    Figure("pinned_cells", "gauge", "cells that something keeps in memory now, without small ones", "pager"),
    Figure("adopted_bytes", "counter", "bytes of adopted tensors", "pager"),
    Figure("escapes", "counter", "storages whose address was handed out for good", "pager"),
    Figure("escaped_bytes", "gauge", "bytes of escaped storages that live", "pager"),
    Figure(
        "mapped_bytes",
        "gauge",
        "bytes of tensors that are mapped from a file which is their copy: none was written",
        "pager",
    ),
    Figure(
        "fixed_bytes.library",
        "gauge",
        "bytes of tensors over memory of another library's (NumPy, Arrow, DLPack): it counts and is fixed",
        "pager",
    ),
    Figure(
        "fixed_bytes.shared",
        "gauge",
        "bytes of tensors in memory that processes share: it counts and is fixed",
        "pager",
    ),
    Figure(
        "fixed_bytes.mapped_file",
        "gauge",
        "bytes of tensors over files that another library has mapped: the kernel takes their pages back, they do not count",
        "pager",
    ),
)
"""All of them but `escapes.FILE:LINE`, which says how often a place in the program handed an address out."""

FOLLOWED = tuple(figure.name for figure in FIGURES if figure.followed)
