"""Measure, then plan, then follow (design section 5; Capuchin, ASPLOS 2020): one period decides the next ones like it.

A thread makes the plan while training goes on with malloc's own order. The pager follows it by position and identity; where
a period deviates, malloc's order finishes it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

from memmgr.native.pager import Pager
from memmgr.policies.plan.planner import plan
from memmgr.policies.trace import TierLink
from memmgr.policies.trace.live_terms import EFFORT, budgets
from memmgr.policies.trace.plan import Plan
from memmgr.policies.trace.smooth import smoothed

from .timeline import Measured, measured, rows

MOST_PLANS = 16  # sequences that are remembered; variable shapes have several
MOST_MET = 256  # sequences that are known by their hash alone: one that comes again is worth a plan
FIRST_PLANS = 3  # sequences that are planned although they were met once
MOST_TRIES = 4  # plans that run short, each with twice the margin


@dataclass
class _Known:
    """A sequence of ops that was measured."""

    of: Measured
    trials: int  # kinds that were being tried when it was measured: later more of it may run again
    tries: int = 0
    waiting: bool = False
    plan: Plan | None = None
    error: str = ""


class Plans:
    """The plans of one budget.

    Args:
        pager: the native half.
        limit_bytes: the budget.
        recompute: whether ops may run again.
        offload: whether there is a tier.
        disk_bytes: its room; 0: the file system's.
        allowed: False: nothing is ever measured, and so nothing planned.
    """

    def __init__(
        self,
        pager: Pager,
        limit_bytes: int,
        *,
        recompute: bool,
        offload: bool,
        disk_bytes: int = 0,
        allowed: bool = True,
    ) -> None:
        self._pager = pager
        self._limit = limit_bytes
        self._recompute = recompute
        self._offload = offload
        self._disk_bytes = disk_bytes
        self._allowed = allowed
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._met: OrderedDict[int, None] = OrderedDict()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._noted = False
        self.made = 0
        self.seconds = 0.0

    def end_of_period(self) -> None:
        """An outermost backward has ended."""
        if not self._allowed:
            return
        with self._lock:
            pressed = self._pager.stats()["reclaims"] > 0
            ended = self._pager.next_period(pressed)
            noted, self._noted = self._noted, pressed
            if not noted or not ended["ops"] or ended["overflow"]:
                return
            self._account(ended["hash"], ended["trials"], ended["followed"], ended["short"])

    def _account(self, key: int, trials: int, followed: bool, short: bool) -> None:
        known = self._known.get(key)
        if known is None:
            before = key in self._met
            self._met[key] = None
            while len(self._met) > MOST_MET:
                self._met.popitem(last=False)
            # The first ones (the very first makes the optimizer's states, and never comes again); later only what has come
            # before: where no period is like another, planning buys nothing.
            if self._busy() or (len(self._known) >= FIRST_PLANS and not before):
                return
            known = self._known[key] = _Known(self._measured(), trials)
            while len(self._known) > MOST_PLANS:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
            if self._busy():
                return
            if trials < known.trials:
                known.of, known.trials = self._measured(), trials
            elif followed and short and known.tries < MOST_TRIES:
                known.tries += 1
            else:
                return
        self._thread = threading.Thread(target=self._make, args=(known,), name="memmgr-plan", daemon=True)
        self._thread.start()

    def _busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _measured(self) -> Measured:
        links: tuple[TierLink, ...] = ()
        if self._offload:
            write, read = self._pager.link()
            links = (TierLink("disk", 1 / write, 1 / read, 0.0, self._disk_bytes or None),)
        return measured(self._pager.timeline(), links)

    def _make(self, known: _Known) -> None:
        begun = time.perf_counter()
        try:
            trace = smoothed(known.of.trace)
            link = trace.links[0] if trace.links else None
            for limit in budgets(self._limit, known.tries):
                made = plan(trace, limit, link=link, recompute=self._recompute, effort=EFFORT, solve=False)
                if made.feasible:
                    known.plan = made
                    self._pager.add_plan(known.of.hashes, *rows(known.of, made).packed())
                    self.made += 1
                    break
        except Exception as error:  # a plan that cannot be made costs speed, not correctness; the telemetry says so
            known.error = f"{type(error).__name__}: {error}"
            known.tries = MOST_TRIES
        self.seconds += time.perf_counter() - begun

    def latest(self) -> Plan | None:
        """The plan that was made last."""
        return next((k.plan for k in reversed(self._known.values()) if k.plan is not None), None)

    def errors(self) -> list[str]:
        """Why there are no plans, where that is not the budget."""
        return [k.error for k in self._known.values() if k.error]

    def close(self) -> None:
        """Waits for the thread."""
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):  # Ctrl-C came before it had begun
                self._thread.join()
