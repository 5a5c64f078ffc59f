"""Measure, then plan: what was seen in one pass decides the next ones that save the same (design §5; Capuchin, ASPLOS '20).

A pass is measured, a thread makes a plan of it while training goes on with the dynamic policies, and from then on passes
that save the same sizes in the same order follow the plan: nobody ranks, nobody searches. A plan supplies decisions, never
recipes, so the moment reality deviates (plan.cpp) the dynamic policies finish the pass, as exact as ever.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from memmgr.policies import Action
from memmgr.policies.plan.planner import plan
from memmgr.policies.published.capuchin import choose, triggers
from memmgr.policies.published.delta import knapsack
from memmgr.policies.simulate.decided import ON_DEMAND, Accesses, Decision
from memmgr.policies.trace import TierLink, Trace
from memmgr.policies.trace.live_terms import EFFORT, Made, budgets, bursts, decisions, in_triggers
from memmgr.policies.trace.plan import Plan
from memmgr.policies.trace.smooth import smoothed

from ._recorder import MAX_ROOM
from ._sizes import UNLIMITED

if TYPE_CHECKING:
    from ._manager import Manager
    from ._trace import Measured

MOST_PLANS = 16  # signatures that are remembered; variable shapes have several
MOST_MEASURED = 32  # passes that are measured in all
MOST_MET = 256  # signatures that are remembered although nothing was measured: one that comes again is worth it
WARM_PASSES = 1  # the first pass compiles and proves its kinds; optimizer state comes after it
MOST_TRIES = 4  # plans that run short, each with twice the margin
MOST_FEEDBACK = 12  # passes after which triggers stay where they are

# Of a pass: how many cells it saved, the hash of their sizes, the id of the plan that it followed to the end or -1, at which
# save it left one or -1, whether malloc found too little, the sizes as int64, the saves that backward had to wait for.
Ended = tuple[int, int, int, int, bool, bytes, list[int]]


Planner = Callable[[Trace, int, TierLink | None, bool, bool], Made | None]


def _ours(trace: Trace, budget_bytes: int, link: TierLink | None, recompute: bool, solve: bool) -> Made | None:
    made = plan(trace, budget_bytes, link=link, recompute=recompute, effort=EFFORT, solve=solve)
    return Made.of(trace, made) if made.feasible else None


def _decided(decisions: Sequence[Decision]) -> Made:
    return Made([(d.storage, d.action, d.back_access if d.trigger == ON_DEMAND else d.trigger) for d in decisions])


def _capuchin(trace: Trace, budget_bytes: int, link: TierLink | None, recompute: bool, solve: bool) -> Made | None:
    accesses = Accesses.of(trace)
    chosen = choose(trace, accesses, budget_bytes, link)
    return _decided(triggers(trace, accesses, budget_bytes, link, chosen, {}))


def _taco(trace: Trace, budget_bytes: int, link: TierLink | None, recompute: bool, solve: bool) -> Made | None:
    return _decided(knapsack(trace, budget_bytes, link))


PLANNERS: dict[str, Planner] = {"plan": _ours, "capuchin": _capuchin, "delta_taco": _taco}
"""By `Policy.planner`."""


@dataclass
class _Known:
    """A signature that was measured."""

    measured: Measured
    sizes: bytes
    id: int
    tries: int = 0
    made: Made | None = None
    earlier: dict[int, int] = field(default_factory=dict)  # of a save: by how many uses its way back begins earlier
    feedback: int = 0
    seconds: float = 0.0  # that the planning took
    error: str = ""  # why there is no plan, where that is not the budget
    waiting: bool = False  # for the thread


@dataclass
class PlanCounts:
    """What happened so far; `stats()` shows some of it."""

    measured: int = 0
    made: int = 0
    followed: int = 0
    short: int = 0
    seconds: float = 0.0


class Plans:
    """The plans of one budget: which pass to measure, who makes them, which are followed.

    Args:
        manager: whose passes they are.
        allowed: False: nothing is ever measured, and so nothing planned.
    """

    def __init__(self, manager: Manager, allowed: bool) -> None:
        self._manager = manager
        self.allowed = allowed and manager.config.limit_bytes < UNLIMITED
        self.known: OrderedDict[int, _Known] = OrderedDict()
        self._met: OrderedDict[int, None] = OrderedDict()  # signatures that came and have no plan
        self._next_id = 0
        self._done: list[_Known] = []
        self.thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._ends = threading.RLock()  # two threads that train may end a pass at once
        self._seen = 0
        self.counts = PlanCounts()

    # -- at the end of a pass, in the thread that ran its backward --

    def end_of_pass(self, ended: Ended, measured: Measured | None) -> None:
        """The pass that ends is accounted for, and the next one prepared.

        Args:
            ended: what `begin_pass` says of it.
            measured: what was seen, if this pass was measured.
        """
        if ended[0]:
            with self._ends:
                self._account(ended, measured)

    def _account(self, ended: Ended, measured: Measured | None) -> None:
        _, signature, followed, _, short, sizes, late = ended
        self._seen += 1
        known = self.known.get(signature)
        if known is not None:
            self.known.move_to_end(signature)
        if followed >= 0 and known is not None:
            self.counts.followed += 1
            if short:
                self.counts.short += 1
                self._again(known)
            elif late and known.feedback < MOST_FEEDBACK and not known.waiting:
                known.feedback += 1
                for save in late:
                    known.earlier[save] = known.earlier.get(save, 0) + 1
                self._follow(known)
        if measured is not None and known is None:
            known = self._remember(signature, _Known(measured, sizes, self._next_id))
            self._next_id += 1
            self.counts.measured += 1
            self._submit(known)
        self._adopt()
        if self._worth_measuring(signature):
            self._manager.measuring.want()

    def _worth_measuring(self, signature: int) -> bool:
        """Is the next pass likely one that a plan could be made of and is not known?"""
        manager = self._manager
        if self._seen <= MAX_ROOM and manager.recorder.no_room:
            return False  # the next pass may prove more kinds, and a plan is only made of what can be dropped
        if self._seen < WARM_PASSES or manager.sleeper.asleep or self.counts.measured >= MOST_MEASURED:
            return False
        if signature in self.known or not manager.pressed:
            return False
        # The first of all; later only what has come before: where no pass is like another, measuring them buys nothing.
        before = signature in self._met
        self._met[signature] = None
        self._met.move_to_end(signature)
        while len(self._met) > MOST_MET:
            self._met.popitem(last=False)
        return before or not self.known

    def _remember(self, signature: int, known: _Known) -> _Known:
        self.known[signature] = known
        while len(self.known) > MOST_PLANS:
            _, old = self.known.popitem(last=False)
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
        for known in done:
            known.waiting = False
            if known.made is None:
                self._manager.native.drop_plans(known.id)
                why = known.error or "no schedule fits"
                self._manager.telemetry.happened("no_plan", ops=len(known.measured.trace.ops), text=why)
                continue
            actions = self._follow(known)
            self.counts.made += 1
            predicted = known.made.plan
            self._manager.telemetry.happened(
                "plan",
                ops=len(known.measured.trace.ops),
                rematerialize=int((actions == Action.EVICT).sum()),
                offload=int((actions == Action.OFFLOAD).sum()),
                took_seconds=round(known.seconds, 3),
                **(
                    {"overhead": round(predicted.overhead, 4), "lower_bound": round(predicted.lower_bound, 4)}
                    if predicted is not None
                    else {}
                ),
            )

    def _follow(self, known: _Known) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """From the next pass on; returns what happens to each save."""
        assert known.made is not None
        native = self._manager.native
        sizes = np.frombuffer(known.sizes, dtype=np.int64)
        of, index = known.measured.trace, known.measured.save_index
        actions = decisions(known.made, index, len(sizes))
        native.drop_plans(known.id)
        triggers = in_triggers(known.made, of, index, actions, known.earlier)
        native.add_plan(known.id, sizes, actions, triggers, *bursts(known.made, of, index, actions))
        return actions

    # -- the thread --

    def _submit(self, known: _Known) -> None:
        known.waiting = True
        self._wait()  # one at a time; a signature that is new while another is planned is rare
        self.thread = threading.Thread(target=self._make, args=(known,), name="memmgr-plan", daemon=True)
        self.thread.memmgr_own = True  # type: ignore[attr-defined]
        self.thread.start()

    def _make(self, known: _Known) -> None:
        begun = time.perf_counter()
        manager = self._manager
        try:
            planner = PLANNERS[manager.policy.planner]
            limits = budgets(manager.config.limit_bytes, known.tries)
            # On the CPU device a solver's own memory is what the budget is about.
            solve = manager.device.type != "cpu"
            trace = smoothed(known.measured.trace)
            plans = (planner(trace, limit, manager.tier(), manager.may_evict, solve) for limit in limits)
            made = next((made for made in plans if made is not None), None)
            if made is None and known.made is not None:
                known.tries = MOST_TRIES  # a plan that runs short is better than none
            else:
                known.made = made
        except Exception as error:  # a plan that cannot be made costs speed, not correctness; telemetry says so
            known.tries = MOST_TRIES  # the plan that there is, if any, stays
            known.error = f"{type(error).__name__}: {error}"
        known.seconds = time.perf_counter() - begun
        self.counts.seconds += known.seconds
        with self._lock:
            self._done.append(known)

    def _wait(self) -> None:
        if self.thread is not None:
            with contextlib.suppress(RuntimeError):  # Ctrl-C came before it had begun
                self.thread.join()

    def close(self) -> None:
        """Waits for the thread and forgets everything."""
        self._wait()
        self.thread = None
        self.known.clear()
        self._done.clear()
        if self.allowed:
            self._manager.native.drop_plans(-1)

    # -- reports --

    def latest(self) -> Plan | None:
        """The plan that was followed or made last."""
        for known in reversed(self.known.values()):
            if known.made is not None and known.made.plan is not None:
                return known.made.plan
        return None

    def leads(self) -> bool:
        """Is a plan being followed?"""
        return self.allowed and bool(self._manager.native.plan_leads())

    def settle(self) -> None:
        """Between two ops of a replay: what the plan lets go and nobody uses any more may go."""
        if self.allowed:
            self._manager.native.plan_settle()

    def brings_back(self) -> bool:
        """Does the plan that is followed say when what was written out comes back, so that nobody else need?"""
        return self.allowed and bool(self._manager.native.plan_brings_back())
