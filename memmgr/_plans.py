"""Measure, then plan: what was seen in one pass decides the next ones that save the same (design §5; Capuchin, ASPLOS '20).

A pass is measured, a thread makes a plan of it while training goes on with the dynamic policies, and from then on passes
that save the same sizes in the same order follow the plan: nobody ranks, nobody searches. A plan supplies decisions, never
recipes, so the moment reality deviates (plan.cpp) the dynamic policies finish the pass, as exact as ever.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from memmgr.policies import Action
from memmgr.policies.planner import Plan, plan
from memmgr.policies.trace import TierLink

from ._sizes import UNLIMITED

if TYPE_CHECKING:
    from ._manager import Manager
    from ._trace import Measured

MOST_PLANS = 16  # signatures that are remembered; variable shapes have several
MOST_MEASURED = 32  # passes that are measured in all: where every pass is new, measuring them buys nothing
WARM_PASSES = 1  # the first pass compiles, proves its kinds and makes the gradients
EFFORT = 100_000  # steps of the planner's search: about a third of a second
# Of the budget, what a plan leaves free: bytes that no trace shows (alignment, what kernels take for themselves). A pass that
# ran short all the same takes that much more off, so often.
MARGIN = 0.01
STRICTER = 0.03
MOST_TRIES = 4


# Of a pass: how many cells it saved, the hash of their sizes, the id of the plan that it followed to the end or -1, at which
# save it left one or -1, whether malloc found too little, the sizes as int64.
Ended = tuple[int, int, int, int, bool, bytes]


@dataclass
class _Known:
    """A signature that was measured."""

    measured: Measured
    sizes: bytes
    id: int
    tries: int = 0
    plan: Plan | None = None
    seconds: float = 0.0  # that the planning took
    followed: int = 0
    waiting: bool = False  # for the thread


@dataclass
class PlanCounts:
    """Figures for `stats()`."""

    measured: int = 0
    made: int = 0
    infeasible: int = 0
    followed: int = 0
    left: int = 0
    short: int = 0
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)


class Plans:
    """The plans of one budget: which pass to measure, who makes them, which are followed.

    Args:
        manager: whose passes they are.
        allowed: False: nothing is ever measured, and so nothing planned.
    """

    def __init__(self, manager: Manager, allowed: bool) -> None:
        self._manager = manager
        self.allowed = allowed and manager.config.limit_bytes < UNLIMITED
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._next_id = 0
        self._done: list[_Known] = []
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._seen = 0
        self._stop = False
        self.counts = PlanCounts()

    # -- at the end of a pass, in the thread that ran its backward --

    def end_of_pass(self, ended: Ended, measured: Measured | None) -> None:
        """The pass that ends is accounted for, and the next one prepared.

        Args:
            ended: what `begin_pass` says of it.
            measured: what was seen, if this pass was measured.
        """
        saves, signature, followed, left_at, short, sizes = ended
        if not self.allowed or not saves:
            return
        self._seen += 1
        known = self._known.get(signature)
        if known is not None:
            self._known.move_to_end(signature)
        if followed >= 0 and known is not None:
            known.followed += 1
            self.counts.followed += 1
            if short:
                self.counts.short += 1
                self._again(known)
        elif left_at >= 0:
            self.counts.left += 1
        if measured is not None and known is None:
            known = self._remember(signature, _Known(measured, sizes, self._next_id))
            self._next_id += 1
            self.counts.measured += 1
            self._submit(known)
        self._adopt()
        if self._worth_measuring(signature):
            self._manager.measure_next_pass()

    def _worth_measuring(self, signature: int) -> bool:
        """Is the next pass likely one that a plan could be made of and is not known?"""
        manager = self._manager
        if self._seen <= WARM_PASSES or manager.sleeper.asleep or self.counts.measured >= MOST_MEASURED:
            return False
        return signature not in self._known and manager.under_pressure()

    def _remember(self, signature: int, known: _Known) -> _Known:
        self._known[signature] = known
        while len(self._known) > MOST_PLANS:
            _, old = self._known.popitem(last=False)
            self._manager.native.drop_plans(old.id)
        return known

    def _again(self, known: _Known) -> None:
        """A pass that followed this plan ran short: the next one asks for less."""
        if known.waiting or known.tries >= MOST_TRIES:
            return
        known.tries += 1
        self._submit(known)

    def _adopt(self) -> None:
        """Plans that the thread has made since are followed from the next pass on."""
        with self._lock:
            done, self._done = self._done, []
        native = self._manager.native
        for known in done:
            known.waiting = False
            native.drop_plans(known.id)
            if known.plan is None or not known.plan.feasible:
                self.counts.infeasible += 1
                continue
            sizes = np.frombuffer(known.sizes, dtype=np.int64)
            actions = decisions(known.plan, known.measured, len(sizes))
            native.add_plan(known.id, sizes, actions)
            self.counts.made += 1
            self._manager.telemetry.happened(
                "plan",
                saves=len(sizes),
                evict=int((actions == Action.EVICT).sum()),
                offload=int((actions == Action.OFFLOAD).sum()),
                overhead=round(known.plan.overhead, 4),
                lower_bound=round(known.plan.lower_bound, 4),
                seconds=round(known.seconds, 3),
            )

    # -- the thread --

    def _submit(self, known: _Known) -> None:
        known.waiting = True
        if self._thread is not None:
            self._thread.join()  # one at a time; a signature that is new while another is planned is rare
        self._thread = threading.Thread(target=self._make, args=(known,), name="memmgr-plan", daemon=True)
        self._thread.memmgr_own = True  # type: ignore[attr-defined]
        self._thread.start()

    def _make(self, known: _Known) -> None:
        begun = time.perf_counter()
        manager = self._manager
        try:
            share = 1.0 - MARGIN - STRICTER * known.tries
            link = manager.link()
            tier = None
            if manager.may_offload and link.write_bytes_per_second and link.read_bytes_per_second:
                tier = TierLink("below", link.write_bytes_per_second, link.read_bytes_per_second, link.latency_seconds)
            known.plan = plan(
                known.measured.trace,
                int(manager.config.limit_bytes * share),
                link=tier,
                recompute=manager.may_evict,
                effort=EFFORT,
            )
        except Exception as error:  # a plan that cannot be made costs speed, not correctness; kept for the report
            known.plan = None
            self.counts.errors.append(f"{type(error).__name__}: {error}")
        known.seconds = time.perf_counter() - begun
        self.counts.seconds += known.seconds
        with self._lock:
            self._done.append(known)

    def close(self) -> None:
        """Waits for the thread and forgets everything."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._known.clear()
        self._done.clear()
        if self.allowed:
            self._manager.native.drop_plans(-1)

    # -- reports --

    def latest(self) -> Plan | None:
        """The plan that was followed or made last."""
        for known in reversed(self._known.values()):
            if known.plan is not None:
                return known.plan
        return None


def decisions(made: Plan, measured: Measured, saves: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What the plan does with each cell that a pass saves, in the order of saving: `Action` as uint8, shape (saves,).

    A storage's first absence decides; what was made again leaves, if it has to, by the dynamic policies.
    """
    actions = np.full(saves, int(Action.KEEP), dtype=np.uint8)
    decided: set[int] = set()
    for absence in made.absences:
        if absence.storage in decided:
            continue
        decided.add(absence.storage)
        index = measured.save_index.get(absence.storage)
        if index is not None and index < saves:
            actions[index] = int(Action.OFFLOAD if absence.offloaded else Action.EVICT)
    return actions
