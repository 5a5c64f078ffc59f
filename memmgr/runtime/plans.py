"""Measure, then plan, then follow (Capuchin, ASPLOS 2020): one period decides the next ones like it.

Another process makes the plan while training goes on with malloc's own order. The pager follows it by position and identity;
where a period deviates, malloc's order finishes it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from memmgr.common.threads import Stopped, join
from memmgr.config.machine import lost_seconds
from memmgr.policies import Policy
from memmgr.policies.plan.knee import Knee
from memmgr.policies.trace import TierLink

from . import planner_process
from .left import UNNAMED, LeftPlans, ModuleNames
from .planner_process import Executor, Failed
from .planners import PLANNERS
from .planning import KneeJob, Made, PlanJob, find_knee, make
from .timeline import Measured, Noted, measured, seconds_of

if TYPE_CHECKING:
    from memmgr.native._pager import Pager, PeriodInfo

BESIDE = 0.25
"""The share of a copy's CPU time that ops lose even if they leave a core free: they share the memory's speed."""

LEAST_COPIED_BYTES = 64 << 20  # the kernel counts lost time in hundredths of a second: before this it says little
MOST_LOST = 2e-9
"""Seconds a byte: the most of the processors' lost time that counts as the copies'."""

MOST_PLANS = 16  # sequences that are remembered; variable shapes have several
MOST_MET = 256  # sequences that are known by their hash alone: one that comes again is worth a plan
FIRST_PLANS = 3  # sequences that are planned although they were met once
MOST_TRIES = 4  # plans that run short; each leaves more room where the period has shown why, else everywhere
SHORT_IN_A_ROW = 2  # periods
# the same on a device while no missing bytes are known: the third period maps the places of its blocks
SHORT_BEFORE_PLACES = 4
# share of the budget that a plan leaves free, for bytes that no trace shows (alignment, workspaces of kernels)
MARGIN = 0.01
PLAN_SECONDS, PLAN_SECONDS_PER_OP = 0.5, 2e-3  # assumed cost of a plan before it is made
LACKED = MARGIN / 4  # the least that a plan leaves free in addition where bytes for places were missing
WORSE = 1.25  # a plan that leaves memory for places may take so much longer than one that does not
FREE_PLANS = 8  # plans that are made without a check of their cost
PLANNING_SHARE = 0.25  # share of one processor, over the run's time, that later plans may take


def budgets(limit_bytes: int, tries: int = 0) -> list[int]:
    """The budgets to plan for, in bytes, the best first.

    `tries`: how many plans ran short so far for no reason that was seen; each time a plan leaves twice as much free.
    """
    found = [int(limit_bytes * (1.0 - MARGIN * 2**tries))]
    if not tries:
        found.append(limit_bytes)  # so near the floor a plan without a margin is better than none
    return found


@dataclass
class _Known:
    """A sequence of ops that was noted."""

    period: Noted
    trials: int  # kinds that were being tried when it was measured: later more of it may run again
    repeats: bool  # whether the period before it was the same
    tries: int = 0
    margin: int = 0  # tries for no reason that was seen
    lacked_bytes: int = 0  # missing for the places of blocks, beside the holes between long-lived ones
    first_overhead: float = float("inf")  # of the last plan that left nothing free for them
    short: int = 0  # periods in a row that followed the plan and ran short
    without: int = 0  # periods that came back since nothing fitted
    made: Made | None = None
    error: str = ""

    @property
    def of(self) -> Measured:
        """The trace that is planned; built anew each time."""
        return self.period.measured()


class Plans:
    """The plans of one budget.

    `policy`: the planner (`planner`), and if ops may run again. `planned`: plans are made at all; else no period is
    measured for them. `offload`: there is a tier. `below_bytes`: its room; 0: the file system's. `happened`: called for
    each plan (`Telemetry.happened`). `limit_bytes`: the budget that the next plans are for. `left`: why passes leave
    plans.
    """

    def __init__(
        self,
        pager: Pager,
        limit_bytes: int,
        *,
        policy: Policy,
        planned: bool,
        offload: bool,
        below_bytes: int = 0,
        device: str = "cpu",
        happened: Callable[..., None] = lambda what, **fields: None,
        modules: ModuleNames = UNNAMED,
    ) -> None:
        self._pager = pager
        self.limit_bytes = limit_bytes
        self._policy = policy
        self._planner = policy.planner if planned else ""
        assert not self._planner or self._planner in PLANNERS
        self._offload = offload
        self._below_bytes = below_bytes
        self._tier = "disk" if device == "cpu" else "host"
        self._device = device
        self._happened = happened
        self.left = LeftPlans(pager, modules, happened)
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._unlike = 0  # periods unlike all earlier ones
        self._met: OrderedDict[int, None] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._executor = planner_process.executor(pager)
        self._prepared = False
        self.made = 0
        self.seconds = 0.0
        self._cpu_seconds = 0.0
        self._opened = time.perf_counter()
        self._lost_at_opening = lost_seconds()

    @property
    def asked(self) -> bool:
        """Tells if plans are made at all."""
        return bool(self._planner)

    def wanted(self) -> bool:
        """Tells if the next period should be recorded: only once memory has been short. Prepares the executor then."""
        wanted = self.asked and self._pager.stats()["reclaims"] > 0
        if wanted and not self._prepared:
            self._prepared = True
            self._start(self._executor.prepare)
        return wanted

    def fits_none(self, key: int) -> bool:
        """Tells if no plan was found for the sequence with this hash."""
        known = self._known.get(key)
        return known is not None and known.made is None and bool(known.error)

    def period_ended(self, ended: PeriodInfo) -> None:
        """A period that was noted; its timeline is at hand. One thread at a time."""
        if not self.asked:
            return
        try:
            if known := self._known.get(ended["left_plan"]):
                self.left.note(ended, known.period)
        except Exception as error:  # it costs an explanation, and not the user's backward
            self._happened("left_plan", ops=ended["ops"], text=f"{type(error).__name__}: {error}")
        self._begin(ended, lambda: self._to_plan(ended))

    def loop_turned(self, ended: PeriodInfo) -> None:
        """A turn of a loop without a backward, the same as the one before, for which no plan was enough. One thread at
        a time. Its tensors may have grown (a cache), so it is measured anew each time.
        """
        if self._may_plan() and self._offload:  # without gradient nothing is recorded that could run again
            self._begin(ended, lambda: self._known_anew(ended, repeats=True))

    def _begin(self, ended: PeriodInfo, to_plan: Callable[[], _Known | None]) -> None:
        try:
            known = to_plan()
        except (
            Exception
        ) as error:  # as where plans are made: it costs one, and neither the user's backward nor our thread
            self._happened("no_plan", ops=ended["ops"], text=f"{type(error).__name__}: {error}")
            return
        if known is not None:
            self._start(lambda: self._make(known))

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="memmgr-plan", daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads can be had, or the interpreter ends
            self._thread = thread
            thread.start()

    def _known_anew(self, ended: PeriodInfo, *, repeats: bool) -> _Known:
        known = self._known[ended["hash"]] = _Known(self.noted(repeats=repeats), ended["trials"], repeats)
        self._known.move_to_end(ended["hash"])
        while len(self._known) > MOST_PLANS:
            self._known.popitem(last=False)
        return known

    def _to_plan(self, ended: PeriodInfo) -> _Known | None:
        key, trials = ended["hash"], ended["trials"]
        repeats = self._offload and ended["before"] == key  # without a tier, tensors that live on cannot be evicted
        known = self._known.get(key)
        if known is None:
            first, before = not self._met, key in self._met
            self._unlike += not before
            self._met[key] = None
            while len(self._met) > MOST_MET:
                self._met.popitem(last=False)
            # The first periods; later only a period that has occurred before: a plan for a period that does not recur
            # gains nothing.
            if not self._may_plan() or (len(self._known) >= FIRST_PLANS and not before):
                return None
            # Most optimizers make their states in the very first, which then never comes again: the next one's plan would
            # wait for its plan. A period that comes again at once gets a better plan, as a cycle. Short periods wait for it.
            if not before and (first or (self._offload and self._shorter_than_a_plan())):
                return None
            return self._known_anew(ended, repeats=repeats)
        self._known.move_to_end(key)
        if not self._may_plan():
            return None
        fresh = trials < known.trials or repeats > known.repeats
        if fresh or (known.made is None and self._is_tried_again(known)):
            known.period, known.trials, known.repeats = self.noted(repeats=repeats), trials, repeats
            # an earlier failure, or a plan that ran short, was of another plan
            known.tries = known.margin = known.short = known.lacked_bytes = 0
        elif ended["followed"] and self._runs_short(known, ended):
            self._make_room(known, ended["lacked_bytes"])
        else:
            return None
        return known

    def _is_tried_again(self, known: _Known) -> bool:
        """Nothing fitted it: the period may have been measured at a bad moment. After 1, 2, 4, 8 ... that come again."""
        known.without += 1
        return known.without & (known.without - 1) == 0

    def _runs_short(self, known: _Known, ended: PeriodInfo) -> bool:
        """Tells if the plan runs short repeatedly. The first period under a plan begins with the residency that another
        order has left.
        """
        known.short = known.short + 1 if ended["ran_short"] else 0
        explained = self._device == "cpu" or ended["lacked_bytes"] > 0
        return known.short >= (SHORT_IN_A_ROW if explained else SHORT_BEFORE_PLACES) and known.tries < MOST_TRIES

    def _make_room(self, known: _Known, lacked_bytes: int) -> None:
        """Adds room for memory that was missing for places, or that its ops needed this time and not when they were
        measured; if there is none, the margin. A cell that was two-valued then and is not now needs all of its bytes.
        """
        known.tries += 1
        known.short = 0
        if lacked_bytes:
            known.lacked_bytes += max(lacked_bytes, int(LACKED * self.limit_bytes))
            return
        now = self.noted(repeats=known.repeats).with_scratch_of(known.period)
        if now.scratch_bytes > known.period.scratch_bytes or now.two_valued < known.period.two_valued:
            known.period = now
        else:
            known.margin += 1

    @staticmethod
    def _gives_too_much(known: _Known, made: Made) -> bool:
        """Tells if the plan leaves memory for places, and is slower by too much for that."""
        return known.lacked_bytes > 0 and made.overhead > WORSE * known.first_overhead

    def _may_plan(self) -> bool:
        """Nothing is being planned, and planning has not taken too much of the run."""
        if (self._thread is not None and self._thread.is_alive()) or not self._executor.works:
            return False
        spent = PLANNING_SHARE * (time.perf_counter() - self._opened)
        return self.made < FREE_PLANS or self._cpu_seconds < spent

    def _shorter_than_a_plan(self) -> bool:
        columns = self._pager.timeline()
        return seconds_of(columns) < PLAN_SECONDS + PLAN_SECONDS_PER_OP * (len(columns["op"]) // 4)

    def links(self) -> tuple[TierLink, ...]:
        """The tier below, as it was measured."""
        if not self._offload:
            return ()
        rates = self._pager.link()
        cpu = rates["cpu_seconds_per_byte"]
        if (copied := self._copied_bytes()) >= LEAST_COPIED_BYTES:
            cpu += self.lost_seconds() / copied
        if self._device != "cpu":
            cpu = 0.0  # nothing of the ops' time
        elif torch.get_num_threads() < len(os.sched_getaffinity(0)):
            cpu *= BESIDE
        link = TierLink(
            self._tier,
            1 / rates["write_seconds_per_byte"],
            1 / rates["read_seconds_per_byte"],
            0.0,  # the latency is in the rates
            self._below_bytes or None,
            cpu,
        )
        # A disk that reads and writes moves no more than one that does either; a bus has both ways.
        return (replace(link, shared=self._tier == "disk"),)

    def _copied_bytes(self) -> int:
        tier = self._pager.tier_stats() if self._device == "cpu" else {}
        return tier.get("written_bytes", 0) + tier.get("read_bytes", 0)

    def lost_seconds(self) -> float:
        """Time that the processors lost since the budget opened, as far as copies may have taken it. 0 on an accelerator."""
        most = MOST_LOST * self._copied_bytes()
        return most and min(most, lost_seconds() - self._lost_at_opening)

    def noted(self, *, repeats: bool = False) -> Noted:
        """The period that was noted last; `repeats`: the one before it was the same."""
        return Noted(self._pager.timeline(), self.links(), self._device, repeats)

    def measured(self, *, repeats: bool = False, modules: Sequence[str] = ()) -> Measured:
        """The same as a trace, at once; `modules` as `timeline.measured` has it."""
        return measured(self._pager.timeline(), self.links(), self._device, repeats=repeats, modules=modules)

    def _make(self, known: _Known) -> None:
        """Makes a plan, which is followed from then on."""
        known.error = ""
        begun = time.perf_counter()
        made: Made | None = None
        try:
            limits = tuple(budgets(self.limit_bytes - known.lacked_bytes, known.margin))
            job = PlanJob(known.period, limits, self._planner, self._policy.recomputes)
            made, cpu_seconds = self._executor.run(make, job)
            if made is not None and self._gives_too_much(known, made):
                made, known.tries = None, MOST_TRIES
            elif made is not None:
                known.made = made
                if not known.lacked_bytes:
                    known.first_overhead = made.overhead
                self._pager.add_plan(hashes=known.period.hashes, **made.rows)
                self.made += 1
            elif known.lacked_bytes and known.made is not None:  # one that runs short is better than none
                known.tries = MOST_TRIES
            else:
                known.error = "no schedule fits"
        except Stopped:
            return
        except Failed as error:  # a plan that cannot be made costs speed, not correctness; the telemetry says so
            known.error, cpu_seconds = str(error), error.cpu_seconds
        except Exception as error:
            known.error, cpu_seconds = f"{type(error).__name__}: {error}", 0.0
        took = time.perf_counter() - begun
        self.seconds += took
        self._cpu_seconds += cpu_seconds
        if known.error:
            known.tries = MOST_TRIES
            self._happened("no_plan", ops=known.period.ops, text=known.error)
        elif made is not None:
            bound = made.lower_bound
            self._happened(
                "plan",
                ops=made.ops,
                rematerialize=made.rematerialized,
                offload=made.offloaded,
                took_seconds=round(took, 3),
                overhead=round(made.overhead, 4),
                **({} if bound is None else {"lower_bound": round(bound, 4)}),
            )

    def knee(self, executor: Executor, of: Noted, need_bytes: int, floor_bytes: int) -> Knee:
        """The budget below which runs get slow, predicted by the planner, or without one by the policy in the
        simulator.

        Raises `Failed`: it cannot be found; `Stopped`: the executor has been ended. `need_bytes`: of the run. Tensors
        that no op of the pass touches can be offloaded if there is a tier, and stay otherwise. `floor_bytes`: no budget
        below it works.
        """
        recompute = self._policy.recomputes
        job = KneeJob(of, need_bytes, floor_bytes, MARGIN, self._planner, self._policy.name, recompute, self._offload)
        return executor.run(find_knee, job)[0]

    def latest(self) -> Made | None:
        """The plan that was made last."""
        return next((k.made for k in reversed(self._known.values()) if k.made is not None), None)

    def why_unlike(self, passes: int) -> str:
        """Why few passes could be planned, where most of `passes` were unlike all earlier ones; else empty."""
        if self._unlike <= passes // 2:
            return ""
        return f"{self._unlike:,} were unlike all earlier ones (pad changing shapes to a few sizes)"

    def errors(self) -> list[str]:
        """Why there are no plans, where that is not the budget."""
        return [k.error for k in self._known.values() if k.error]

    def wait(self) -> None:
        """Until the plan that is being made is there."""
        join(self._thread)

    def close(self) -> None:
        """No plan is made from here on, and the one that is being made is given up."""
        self.left.close()
        self._executor.end(self._thread)
