"""A budget that is a share of the run's need: measured in its first passes, then set once.

The need is the most that a pass would have held without memmgr. The very first pass has no optimizer states yet, so the
need is known when a pass has not raised it and no state is still missing.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memmgr.common.say import say
from memmgr.common.threads import Stopped
from memmgr.config.sizes import Need, show_floor, show_size
from memmgr.observe.memory_inventory import missing_states
from memmgr.observe.passes import Pass
from memmgr.observe.progress import MeasuringBar
from memmgr.policies.plan.knee import Knee

from . import planner_process
from .planner_process import Failed
from .plans import Plans
from .timeline import Noted

if TYPE_CHECKING:
    from memmgr.native._pager import Pager, PeriodInfo

    from .config import Config

MOST_PASSES = 8  # of one kind or another: gradient accumulation may have no step of an optimizer for long
USUAL_PASSES = 3  # for a share of the need; its knee takes two more
SAME = 1.01  # two passes that differ by less need the same
PATIENCE_SECONDS = 60.0


class Sizing:
    """Measures one run, then sets its limit.

    `need`: the share that the limit becomes. `asked`: its `limit_bytes` is set. `native`: the pager. `plans`: predict
    the cost of a budget, and get the new limit. `happened`: called with the limit (`Telemetry.happened`).
    """

    def __init__(self, need: Need, asked: Config, native: Pager, plans: Plans, happened: Callable[..., None]) -> None:
        self._need = need
        self._asked = asked
        self._native = native
        self._plans = plans
        self._happened = happened
        self._lock = threading.Lock()
        self._passes = 0
        self._need_bytes = 0
        self._known = False
        self._thread: threading.Thread | None = None
        self._executor = planner_process.executor(native)
        self._knee: Knee | None = None
        self._why = ""  # there is no knee
        self._bar = MeasuringBar(not asked.quiet, USUAL_PASSES if need.share is not None else USUAL_PASSES + 2)
        self._timer = threading.Timer(PATIENCE_SECONDS, self._say_that_it_waits)
        self._timer.daemon = True
        self.done = False

    def start(self) -> None:
        """The budget has opened."""
        self._timer.start()

    @property
    def wants_period(self) -> bool:
        """Is the next pass to be noted op by op? Only the knee has to know more than bytes."""
        return self._need.share is None and self._thread is None and not self.done

    def period_ended(self, info: PeriodInfo, note: Callable[[bool], Noted]) -> None:
        """Handles a recorded pass. Without an equal one before it, the tensors that live on from pass to pass are not
        known.

        `info`: of the pass. `note`: returns the pass; its argument: the pass before was the same.
        """
        repeats = info["before"] == info["hash"]
        if not self._known or not (repeats or self._passes >= MOST_PASSES):
            return
        self._thread = threading.Thread(target=self._seek, args=(note(repeats),), name="memmgr-knee", daemon=True)
        self._thread.start()

    def _seek(self, found: Noted) -> None:
        try:
            floor_bytes = self._native.stats()["floor_bytes"]
            self._knee = self._plans.knee(self._executor, found, self._need_bytes, floor_bytes)
        except Stopped:
            return
        except Failed as error:  # as with a plan: the telemetry and the line say so
            self._why = str(error)
        except Exception as error:
            self._why = f"{type(error).__name__}: {error}"

    def ended(self, ended: Pass) -> bool:
        """A pass is over. In the thread that has run its backward, with nothing under way.

        Returns whether the limit has been set now.
        """
        if not ended.completed:
            return False
        with self._lock:
            if self.done:
                return False
            self._measure(ended.unmanaged_peak)
            chosen = self._choose() if self._known else None
            if chosen is None:
                self._bar.passed(self._passes)
                return False
            self.done = True
            self._set(*chosen)
            return True

    def _measure(self, peak_bytes: int) -> None:
        self._passes += 1
        grew = peak_bytes > SAME * self._need_bytes
        self._need_bytes = max(self._need_bytes, peak_bytes)
        if self._known or (grew and self._passes < MOST_PASSES):
            return
        # Not gradients: those of a model whose backward was another one are there in some passes only, and in its peak.
        missing = missing_states(self._native, self._asked.device, gradients=False)
        if not missing or self._passes >= MOST_PASSES:
            self._known = True
            self._need_bytes += missing

    def _choose(self) -> tuple[int, str] | None:
        """(limit, why it is that); None: not yet."""
        share = self._need.share
        if share is not None:
            return max(1, int(share * self._need_bytes)), f"{100 * share:.4g} % of it"
        if self._knee is not None:
            return self._knee.budget_bytes, (
                f"{100 * self._knee.budget_bytes / self._need_bytes:.0f} % of it, where a pass is predicted to take "
                f"{self._knee.slowdown:.2f}x of one without a limit"
            )
        if self._thread is not None and self._thread.is_alive():
            return None
        if not self._why and self._passes < 2 * MOST_PASSES:
            return None  # a pass like the one before it may come yet
        return self._need_bytes, f"all of it: what less would cost is not known ({self._why or 'no pass was noted'})"

    def _set(self, limit_bytes: int, why: str) -> None:
        self._timer.cancel()
        self._bar.stop()
        gc.collect()  # as when a budget opens: garbage must not be written to the tier
        self._asked.limit_bytes = limit_bytes
        self._plans.limit_bytes = limit_bytes
        self._native.set_limit(limit_bytes)
        self._native.settle()  # if bytes beyond the limit remain, the next request for memory reports it
        if limit_bytes < (floor := int(self._native.stats()["floor_bytes"])):
            why += (
                f", below the floor so far of {show_floor(floor)}, so the run will end with an error. "
                f"At least {100 * floor // self._need_bytes + 1} % are needed"
            )
        needs = f"the run needs {show_size(self._need_bytes)} ({self._passes} passes measured)"
        text = f"{needs}: the budget is now {show_size(limit_bytes)}, {why}"
        self._happened("limit", budget_bytes=limit_bytes, need_bytes=self._need_bytes, passes=self._passes, text=text)
        self._say(text)

    def _say(self, text: str) -> None:
        if not self._asked.quiet:
            say(text)

    def _say_that_it_waits(self) -> None:
        if not self._passes:
            self._say(
                f"no backward has ended in {PATIENCE_SECONDS:.0f} s, so what the run needs is not known and nothing is limited. "
                "Inference: name a budget in bytes"
            )

    def close(self, stats: dict[str, Any]) -> None:
        """The budget closes: says so where there never was a limit."""
        self._timer.cancel()
        self._bar.stop()
        self._executor.end(self._thread)
        if not self.done:
            held = show_size(stats["unmanaged_peak_bytes"])
            if self._known:
                why = f"the run needs {held}, and it ended while what less would cost was still being found"
            else:
                ended = f"{self._passes or 'no'} passes with a backward have ended, and measuring takes three or more"
                why = f"{ended}. The most that the run held: {held}"
            self._say(f"no limit was set: {why}")
