"""accelerate's `Accelerator`."""

from __future__ import annotations

from typing import Any

from accelerate.state import PartialState
from accelerate.tracking import GeneralTracker

from ._callback_budget import CallbackBudget


class MemmgrTracker(GeneralTracker):  # type: ignore[misc]  # accelerate has no types
    """Trains under a budget: `Accelerator(log_with=[MemmgrTracker("12GB"), "tensorboard"])`, and nothing else changes.

    The budget opens in `accelerator.init_trackers`, on the accelerator's device, and closes in
    `accelerator.end_training`; each process has its own, and the main one prints the summary. Lines that
    `accelerator.log` hands to the trackers after this one get `memmgr/peak_gb` (so far, in 10^9 bytes),
    `memmgr/recompute_percent` and `memmgr/stall_percent` (of the time since the line before). Under `memmgr run` or
    `MEMMGR_BUDGET` that budget counts, and the tracker prints that once.

    Args:
        limit: as in `memmgr.budget`.
        options: the other arguments of `memmgr.budget`.

    Known limitations: trackers before this one see the lines without our figures. A training that ends by an exception
    ends no tracker, so the budget stays open until `finish`, the next `init_trackers`, or the end of the process.
    """

    name = "memmgr"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, limit: int | str | None, **options: Any) -> None:
        super().__init__()
        self._limit, self._options = limit, options
        self._budget = CallbackBudget(limit, options)  # errors in the options are raised now

    @property
    def tracker(self) -> MemmgrTracker:
        """The object that `accelerator.get_tracker("memmgr", unwrap=True)` returns."""
        return self

    def stats(self) -> dict[str, Any]:
        """The figures of the training under way, or of the last one."""
        return self._budget.stats()

    # -- called by the Accelerator --

    def start(self) -> None:
        """Opens the budget."""
        state = PartialState()
        self.finish(failed=True)  # of a training that ended without a word
        self._budget = CallbackBudget(self._limit, {"device": state.device, **self._options})
        self._budget.open(speaks=state.is_main_process)
        self._budget.step_begins()

    def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        """Adds our figures to the line, for the trackers to come."""
        self._budget.step_ends()
        values.update(self._budget.figures())
        self._budget.step_begins()

    def finish(self, failed: bool = False) -> None:
        """Closes the budget, and prints one or two lines of advice."""
        self._budget.close(failed)
