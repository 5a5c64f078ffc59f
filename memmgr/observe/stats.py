"""The figures of a run over the pager, for `memmgr.stats()` and for the telemetry."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from .figures import FIGURES
from .holdings import Explanation
from .passes import Passes
from .roles import Purposes
from .source_lines import show
from .states import STATE_PURPOSES
from .summary import fragmentation

if TYPE_CHECKING:
    from memmgr.native._pager import Pager
    from memmgr.runtime.config import Config


class Planned(Protocol):
    """The attributes that are used of the plans."""

    @property
    def made(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    def lost_seconds(self) -> float: ...


class PagerFigures:
    """A `memmgr.telemetry.publisher.About`, and the figures of `memmgr.stats()`.

    Args:
        escaped: says where addresses were handed out for good, and how often (rule 9).
        rankings: says how often a policy ranked.
        steps: says how often the optimizer stepped.
        leaks: a sentence about each leak.
        explain: finds the holders of memory.
    """

    def __init__(
        self,
        asked: Config,
        native: Pager,
        passes: Passes,
        plans: Planned,
        purposes: Purposes,
        escaped: Callable[[], dict[tuple[str, int], int]],
        rankings: Callable[[], int],
        steps: Callable[[], int],
        leaks: Callable[[], list[str]],
        explain: Callable[[], Explanation],
    ) -> None:
        self._asked = asked
        self._native = native
        self._passes = passes
        self._plans = plans
        self._purposes = purposes
        self._escaped = escaped
        self._rankings = rankings
        self._steps = steps
        self._leaks = leaks
        self.explain = explain
        self._begun = time.perf_counter()
        self._held_peak = 0
        self._last: dict[str, Any] | None = None
        self.device_type = asked.device.type

    def unevictable_bytes(self, now: dict[str, int]) -> int:
        """Bytes that can never be evicted: tensors smaller than a cell, and escaped ones. Pins do not count, since they end."""
        return max(0, now["resident_bytes.current"] - now["resident_cell_bytes"] + now["escaped_bytes"])

    def stats(self) -> dict[str, Any]:
        """The flat dict that `memmgr.stats()` returns."""
        now, arena, tier = self._native.stats(), self._native.arena_stats(), self._native.tier_stats()
        passes = self._passes
        self._held_peak = max(self._held_peak, self.unevictable_bytes(now))
        counters = {"pager": now, "arena": arena, "tier": tier}
        return {
            **{figure.name: figure.read(counters) for figure in FIGURES if figure.source},
            **self._rest(now),
            "budget_bytes": self._asked.limit_bytes,
            "resident_bytes.peak": max(arena["resident_peak_bytes"], passes.resident_peak),
            "measuring_bytes.peak": passes.measuring_peak,
            "fixed_bytes.peak": self._held_peak,
            "floor_bytes": max(now["floor_bytes"], self._held_peak),
            "unmanaged_peak_bytes": max(arena["unmanaged_peak_bytes"], passes.unmanaged_peak),
            "prefetch_hits": now["reads_ahead"] - now["late_reads"],
            "lost_seconds": self._plans.lost_seconds(),
            "cores": len(os.sched_getaffinity(0)),
            "host_ahead": int(self.device_type != "cpu"),
            "wall_seconds": time.perf_counter() - self._begun,
            "checkpoint_seconds": passes.checkpoint_seconds,
            "watched_seconds": passes.seconds,
            "passes": passes.count + now["loop_turns"],
            "steps": self._steps(),
            "plans": self._plans.made,
            "plan_seconds": self._plans.seconds,
            "rankings": self._rankings(),
            "fragmentation": fragmentation(arena),
            "kept_gradient_bytes": self._purposes.kept_bytes,
            "link_bytes_per_second": self._link_bytes_per_second() if tier else 0.0,
            **{f"escapes.{show(file)}:{line}": count for (file, line), count in self._escaped().items()},
        }

    def _link_bytes_per_second(self) -> float:
        link = self._native.link()
        return 2 / (link["write_seconds_per_byte"] + link["read_seconds_per_byte"])

    def _rest(self, now: dict[str, int]) -> dict[str, int]:
        """Resident and moved bytes of all tensors that are no model state."""
        whole = {
            "resident_bytes": now["resident_bytes.current"],
            "offloaded_bytes": now["offloaded_now_bytes"],
            "moved_bytes": now["offload_bytes"] + now["reload_bytes"],
        }
        # The figures are read one after the other, and other threads move bytes in between.
        return {
            f"{n}.other": max(0, size - sum(now[f"{n}.{kind}"] for kind in STATE_PURPOSES)) for n, size in whole.items()
        }

    def look(self) -> None:
        """Finds the owners of tensors, at a reader's request."""
        self._purposes.look()

    def owners(self) -> list[Any]:
        """The models and optimizers that are known."""
        return self._purposes.owners()

    def hello(self) -> dict[str, Any]:
        """The facts that do not change during the run."""
        asked = self._asked
        return {
            "device": str(asked.device),
            "budget_bytes": asked.limit_bytes,
            "binary": asked.binary,
            "policy": asked.policy.name,
            "disk_folder": asked.folder,
            "tier": ("disk" if self.device_type == "cpu" else "host") if self._native.tier_stats() else None,
        }

    def freeze(self) -> dict[str, Any]:
        """Fixes the figures before the budget closes and all tensors are restored. Later calls
        return these.

        Returns:
            `stats()`.
        """
        self._last = self.sample()
        return dict(self._last["total"])

    def sample(self) -> dict[str, Any]:
        """The figures that change."""
        if self._last is not None:
            return self._last
        now = self._native.stats()
        resident, evicted, offloaded = (
            now["resident_bytes.current"],
            now["evicted_now_bytes"],
            now["offloaded_now_bytes"],
        )
        return {
            "phase": "backward" if self._passes.in_backward else "forward",
            "budget_bytes": self._asked.limit_bytes,
            "resident_bytes": resident,
            "evictable_bytes": max(0, min(resident, now["resident_cell_bytes"] - now["escaped_bytes"])),
            "evicted_bytes": evicted,
            "offloaded_bytes": offloaded,
            "unmanaged_bytes": resident + evicted + offloaded,
            "tier_bytes": self._native.tier_stats().get("used_bytes", 0),
            "largest_request_bytes": now["largest_cell_bytes"],
            "leaks": self._leaks(),
            "total": self.stats(),
        }
