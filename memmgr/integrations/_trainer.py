"""transformers' `Trainer`."""

from __future__ import annotations

import atexit
import sys
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from memmgr._advice import advice
from memmgr._budget import budget

LOGGED = ("resident_bytes.peak", "evicted_bytes", "offload_bytes", "recompute_seconds", "stall_seconds")


class MemmgrCallback(TrainerCallback):
    """Trains under a budget: `Trainer(..., callbacks=[MemmgrCallback("12GB")])`, and nothing else changes.

    The budget opens when training begins and closes when it ends; evaluation and checkpoints in between are inside it.
    With `auto_find_batch_size=True` a budget that is too small makes the Trainer try a smaller batch, as any
    out-of-memory error does. What Trainer logs gets `memmgr/resident_bytes.peak`, `memmgr/recompute_seconds` and others.

    Args:
        limit: as in `memmgr.budget`.
        options: the other arguments of `memmgr.budget`.

    Known limitations: a training that ends by an exception ends no callback, so the budget stays open until the next
    training, until `close`, or until the process ends. Callbacks that come before this one (TensorBoard's, which
    `report_to` adds) see the logs without our figures; `log_stats` writes them from anywhere.
    """

    def __init__(self, limit: int | str | None, **options: Any) -> None:
        self._budget = budget(limit, **options)  # what is wrong with it is said now
        self._quiet = bool(options.get("quiet"))
        self._open = False

    def close(self, failed: bool = False) -> None:
        """Closes the budget, if it is open."""
        if self._open:
            self._open = False
            atexit.unregister(self._at_exit)
            self._budget.__exit__(RuntimeError if failed else None, None, None)

    def _at_exit(self) -> None:
        self.close(failed=True)

    def stats(self) -> dict[str, Any]:
        """The figures of the training under way, or of the last one."""
        return self._budget.stats()

    # -- what the Trainer calls --

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Opens the budget. An earlier training that failed is closed first: `auto_find_batch_size` begins again."""
        self.close(failed=True)
        self._budget.__enter__()
        self._open = True
        atexit.register(self._at_exit)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Adds our figures to what is logged."""
        if not self._open:
            return
        now = self._budget.stats()
        figures = {f"memmgr/{name}": float(now[name]) for name in LOGGED}
        for logs in (more.get("logs"), state.log_history[-1] if state.log_history else None):
            if logs is not None:
                logs.update(figures)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Closes the budget, and says in a line or two what to change."""
        if not self._open:
            return
        self.close()
        if not self._quiet:
            print(*("memmgr: " + line for line in advice(self._budget.stats())), sep="\n", file=sys.stderr)
