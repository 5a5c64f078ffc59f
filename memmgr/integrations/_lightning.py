"""Lightning's `Trainer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError as missing:
        try:
            from pytorch_lightning import Callback  # the same library under its older name
        except ModuleNotFoundError:
            raise missing from None

from ._callback_budget import CallbackBudget


class MemmgrLightningCallback(Callback):
    """`fit`, `validate`, `test` and `predict` under a budget: `Trainer(callbacks=[MemmgrLightningCallback("12GB")])`.

    The budget opens when one of them begins, and closes when it ends or fails; validation and checkpoints inside `fit` are
    inside it. With the lines of training the Trainer's loggers get `memmgr/peak_gb` (so far, in 10^9 bytes),
    `memmgr/recompute_percent` and `memmgr/stall_percent` (of the batches since the line before). Under `memmgr run` or
    `MEMMGR_BUDGET` the budget of those counts, and the callback says so once.

    Args:
        limit: as in `memmgr.budget`.
        options: the other arguments of `memmgr.budget`; `device="cpu"` where the Trainer does not use the accelerator
            that there is.

    Known limitation: processes that a strategy forks can open a budget only where the process that forks them has had none.
    """

    def __init__(self, limit: int | str | None, **options: Any) -> None:
        self._budget = CallbackBudget(limit, options)
        self._steps_before = 0

    def stats(self) -> dict[str, Any]:
        """The figures of the open budget, or of the last one."""
        return self._budget.stats()

    # -- called by the Trainer --

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Opens the budget, before the model goes to its device."""
        self._budget.open(speaks=trainer.is_global_zero)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Closes the budget, and prints one or two lines of advice."""
        self._budget.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Closes the budget."""
        self._budget.close(failed=True)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """The shares are of batches: the time of validation and checkpoints is not in them."""
        self._steps_before = trainer.global_step
        self._budget.step_begins()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Adds our figures where the Trainer is about to log: after a step, not after each of the batches that it sums up."""
        self._budget.step_ends()
        stepped = trainer.global_step > self._steps_before
        # Lightning's own callbacks ask there, too; nothing public says when.
        if stepped and trainer.loggers and trainer._logger_connector.should_update_logs:
            pl_module.log_dict(self._budget.figures(), on_step=True, on_epoch=False)
