"""transformers' `Trainer`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ._callback_budget import CallbackBudget


class MemmgrCallback(TrainerCallback):
    """Trains under a budget: `Trainer(..., callbacks=[MemmgrCallback("12GB")])`, and nothing else changes.

    The budget opens when training begins and closes when it ends; evaluation and checkpoints in between are inside it.
    With `auto_find_batch_size=True` a budget that is too small makes the Trainer try a smaller batch, as any
    out-of-memory error does; the summary at the end says which were tried. Log lines of training get `memmgr/peak_gb`
    (so far, in 10^9 bytes), `memmgr/recompute_percent` and `memmgr/stall_percent` (of the steps since the line before).
    Under `memmgr run` or `MEMMGR_BUDGET` the budget of those counts, and the callback says so once.

    Args:
        limit: as in `memmgr.budget`.
        options: the other arguments of `memmgr.budget`.

    Known limitations: a training that ends by an exception ends no callback, so the budget stays open until the next
    training, until `close`, or until the process ends. Callbacks that come before this one see the lines without our
    figures, and those that `report_to` adds do: name the reporter's own callback behind this one instead.
    """

    def __init__(self, limit: int | str | None, **options: Any) -> None:
        self._budget = CallbackBudget(limit, options)

    def close(self, failed: bool = False) -> None:
        """Closes the budget, if it is open, and prints one or two lines of advice."""
        self._budget.close(failed)

    def stats(self) -> dict[str, Any]:
        """The figures of the training under way, or of the last one."""
        return self._budget.stats()

    # -- called by the Trainer --

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Opens the budget. `auto_find_batch_size` begins again here, without an end."""
        size = int(state.train_batch_size or 0) if args.auto_find_batch_size else 0
        self._budget.open(batch_size=size, speaks=state.is_world_process_zero)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """The shares are of steps: the time of evaluation and checkpoints is not in them."""
        self._budget.step_begins()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """The optimizer's step is over."""
        self._budget.step_ends()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Adds our figures to a line of training: not to one of evaluation, or to the sums at the end."""
        logs = more.get("logs")
        if logs is None or "loss" not in logs:
            return
        figures = self._budget.figures()
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)  # its copy of the line

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Closes the budget, and prints one or two lines of advice."""
        self._budget.close()
