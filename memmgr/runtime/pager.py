"""One open budget over the pager: opening, leaving, figures, errors."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from memmgr._errors import BudgetError
from memmgr._sizes import UNLIMITED, show_size
from memmgr.native import pager as native
from memmgr.native.pager import SMALL_BYTES, Order, Pager
from memmgr.policies import Policy
from memmgr.policies.rules.filters import FILTERS
from memmgr.readers import Readers

from .plans import Plans

_ORDERS = {"lru": Order.LRU, "largest": Order.LARGEST, "delta": Order.DELTA}  # other filters: DTR's


@dataclass(frozen=True)
class PagerConfig:
    """What a budget was asked for, as the pager takes it."""

    limit_bytes: int
    folder: str | None
    disk_bytes: int
    policy: Policy
    verify: bool
    quiet: bool
    throttle: int = 0
    small_bytes: int = SMALL_BYTES
    plan: bool = True


def _nothing() -> None: ...


def _order(policy: Policy) -> Order:
    name = next((name for name, function in FILTERS.items() if function is policy.filter), "")
    return _ORDERS.get(name, Order.DTR)


class PagerRuntime:
    """One open budget.

    Known limitations: the CPU device only.
    """

    def __init__(self, config: PagerConfig) -> None:
        self.config = config
        self.native: Pager = native.load()
        self.plans = Plans(
            self.native,
            config.limit_bytes,
            recompute=config.policy.recomputes,
            offload=config.policy.offloads and config.folder is not None,
            disk_bytes=config.disk_bytes,
        )
        planned = config.plan and config.limit_bytes < UNLIMITED and not config.policy.torture
        self._readers = Readers(self.native, self.plans.end_of_period if planned else _nothing)
        self._final: dict[str, Any] | None = None
        self._begun = 0.0

    def start(self) -> None:
        """Opens the budget: what is there becomes pageable, and what is beyond the limit leaves.

        Raises:
            BudgetError: more is held than the limit, and it cannot leave.
        """
        config = self.config
        self._begun = time.perf_counter()
        self.native.set_budget_error(self._budget_error)
        self.native.open(
            limit=min(config.limit_bytes, UNLIMITED),
            folder=config.folder if config.policy.offloads else None,
            disk_bytes=config.disk_bytes,
            throttle=config.throttle,
            small_bytes=config.small_bytes,
            may_evict=config.policy.recomputes,
            may_offload=config.policy.offloads,
            torture=config.policy.torture,
            verify=config.verify,
            order=int(_order(config.policy)),
        )
        try:
            self._readers.install()
            self.native.adopt_all()
            beyond = self.native.settle()
            if beyond:
                need = self.native.stats()["resident_bytes.current"]
                raise self._budget_error(
                    f"memmgr: the budget is {show_size(config.limit_bytes)}, but {show_size(need)} are in use when it opens "
                    "and nothing more of that can leave."
                )
        except BaseException:
            self.close(failed=True)
            raise

    def _budget_error(self, text: str) -> BudgetError:
        error = BudgetError(text)
        error.budget_bytes = self.config.limit_bytes
        error.floor_bytes = self.native.stats().get("floor_bytes", 0)
        return error

    def close(self, *, failed: bool) -> None:
        """Everything comes back, and nothing of ours is left."""
        if self._final is not None:
            return
        final = self._collect()
        self._readers.remove()
        self.plans.close()
        self.native.close()
        self._final = final
        if not self.config.quiet and not failed:
            print(self.summary())

    def disable_in_child(self) -> None:
        """In a forked child: what its parent had away comes back when it is read; nothing else is managed.

        The readers stay, since they are what brings it back where no op reads.
        """
        self._final = self._final or {}

    def stats(self) -> dict[str, Any]:
        """The flat dict that `memmgr.stats()` returns."""
        return dict(self._final) if self._final is not None else self._collect()

    def _collect(self) -> dict[str, Any]:
        figures: dict[str, Any] = dict(self.native.stats())
        figures["recomputes"] = figures["rematerialized_ops"]
        figures["recompute_seconds"] = figures.pop("remat_ns") * 1e-9
        figures["stall_seconds"] = figures.pop("stall_ns") * 1e-9
        figures["wall_seconds"] = time.perf_counter() - self._begun
        figures["plans"] = self.plans.made
        figures["plan_seconds"] = self.plans.seconds
        figures["planned_passes"] = figures["planned_periods"]
        figures["passes"] = self._readers.backwards
        figures["escaped"] = self._readers.escaped()
        return figures

    def summary(self) -> str:
        """One line."""
        s = self.stats()
        wall = max(s["wall_seconds"], 1e-9)
        limit = s["budget_bytes"]
        of = (
            f" of {show_size(limit)} ({show_size(s['unmanaged_peak_bytes'])} unmanaged)"
            if limit < UNLIMITED
            else " without a limit"
        )
        return (
            f"memmgr: peak {show_size(s['resident_bytes.peak'])}{of}, {s['passes']} passes; evicted {s['evictions']} "
            f"({show_size(s['evicted_bytes'])}), offloaded {s['offloads']} ({show_size(s['offload_bytes'])}); "
            f"rematerializing {100 * s['recompute_seconds'] / wall:.1f} %, stalled {100 * s['stall_seconds'] / wall:.1f} % "
            f"of {wall:.1f} s"
        )
