"""Lightning's Trainer with a callback and nothing else: the same losses and parameters as without it."""

from __future__ import annotations

import csv
import hashlib
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forkserver
import pytest
import torch

from memmgr.api import budget as budgets

pl = pytest.importorskip("lightning.pytorch", reason="the package lightning is not installed (the extra `lightning`)")

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
    "ignore:.*isinstance.treespec, LeafSpec.. is deprecated:FutureWarning",
)
THREE = {"memmgr/peak_gb", "memmgr/recompute_percent", "memmgr/stall_percent"}


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    yield
    manager = budgets.current()
    if manager is not None:  # of a test that failed; the next one shall not
        manager.close(report=False, failed=True)
        budgets._current = None


class Autoencoder(pl.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = (
            torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in range(4)
        )
        self.model = torch.nn.Sequential(*blocks)
        self.fails_at = fails_at

    def _loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return (self.model(batch[0]) - batch[0]).square().mean()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        if index == self.fails_at:
            raise KeyError("gone")
        loss = self._loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("val_loss", self._loss(batch))

    def test_step(self, batch: list[torch.Tensor], index: int) -> None:
        assert budgets.current() is not None
        self.log("test_loss", self._loss(batch))

    def predict_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        assert budgets.current() is not None
        return self._loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _loader(batches: int = 8) -> Any:
    data = torch.randn(batches * 512, 64, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=512)


def _trainer(folder: Path, callbacks: list[Any], **changed: Any) -> Any:
    settings = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "accumulate_grad_batches": 2,
        "log_every_n_steps": 2,
        "val_check_interval": 4,
        "logger": pl.loggers.CSVLogger(folder),
        "default_root_dir": folder,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**{**settings, **changed}, callbacks=callbacks)


def _run(folder: Path, callbacks: list[Any]) -> tuple[list[dict[str, float]], str, Any]:
    """The logged figures, and the bits at the end."""
    module, trainer = Autoencoder(), _trainer(folder, callbacks)
    trainer.fit(module, _loader(), _loader(1))
    bits = b"".join(p.detach().contiguous().numpy().tobytes() for p in module.parameters())
    with (Path(trainer.logger.log_dir) / "metrics.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return rows, hashlib.sha256(bits).hexdigest(), (module, trainer)


def test_the_same_bits_and_three_figures_on_lines_of_training_only(tmp_path: Path) -> None:
    from memmgr.integrations import MemmgrLightningCallback

    plain, want, _ = _run(tmp_path / "plain", [])
    measured = MemmgrLightningCallback(None, quiet=True)
    _run(tmp_path / "measured", [measured])
    need, floor = measured.stats()["unmanaged_peak_bytes"], measured.stats()["floor_bytes"]
    callback = MemmgrLightningCallback(int(floor + 0.4 * (need - floor)), quiet=True)
    rows, got, (module, trainer) = _run(tmp_path / "managed", [callback])
    assert got == want and budgets.current() is None
    stats = callback.stats()
    assert stats["evictions"] + stats["offloads"] > 0
    assert stats["resident_bytes.peak"] <= stats["budget_bytes"]
    assert [{k: v for k, v in row.items() if k not in THREE} for row in rows] == plain
    lines = [row for row in rows if "loss" in row]
    assert len(lines) == 2 and all(set(row) >= THREE for row in lines)
    assert not [row for row in rows if "val_loss" in row and set(row) & THREE]
    shares = [row["memmgr/recompute_percent"] + row["memmgr/stall_percent"] for row in lines]
    assert all(0 <= share <= 100 for share in shares) and any(shares)
    # Each of these is a budget of its own.
    trainer.test(module, _loader(1), verbose=False)
    assert budgets.current() is None and callback.stats()["passes"] == 0
    assert len(trainer.predict(module, _loader(2))) == 2 and budgets.current() is None


def test_a_training_that_fails_leaves_no_budget_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from memmgr.integrations import MemmgrLightningCallback

    callback = MemmgrLightningCallback("1GB")
    trainer = _trainer(tmp_path, [callback], logger=False, enable_checkpointing=False)
    with pytest.raises(KeyError):
        trainer.fit(Autoencoder(fails_at=3), _loader())
    assert budgets.current() is None and callback.stats()["passes"] == 3
    assert capsys.readouterr().err.count("memmgr: ") == 1, "advice after a failure"
    again = _trainer(tmp_path, [callback], logger=False, enable_checkpointing=False)
    again.fit(Autoencoder(), _loader())
    assert callback.stats()["passes"] == 8 and "everything fitted" in capsys.readouterr().err


@pytest.mark.filterwarnings(
    "ignore:The .train_dataloader. does not have many workers", "ignore:.*smaller than the logging interval.*"
)
def test_a_batch_size_that_fits_is_found(tmp_path: Path, beyond: Callable[[str], int]) -> None:
    """Lightning's own search recognizes our error as out of memory."""
    from lightning.pytorch.tuner import Tuner

    from memmgr.integrations import MemmgrLightningCallback

    class Sized(Autoencoder):
        batch_size = 1

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(_loader().dataset, batch_size=self.batch_size)

        def val_dataloader(self) -> Any:
            return _loader(1)

    callback = MemmgrLightningCallback(beyond("6MB"), quiet=True, disk=False)
    trainer = _trainer(tmp_path, [callback], logger=False, accumulate_grad_batches=1, val_check_interval=1.0)
    found = Tuner(trainer).scale_batch_size(Sized(), mode="power", init_val=256, steps_per_trial=1, max_trials=6)
    assert found is not None and 256 <= found < 256 * 2**6 and budgets.current() is None


def test_it_can_be_sent_to_processes_that_are_started() -> None:
    from memmgr.integrations import MemmgrLightningCallback

    copied = pickle.loads(pickle.dumps(MemmgrLightningCallback("1GB", policy="evict")))
    assert copied.stats() == {}


RANKS = """
import hashlib, sys, torch, lightning.pytorch as pl
from memmgr.api import budget as budgets
from memmgr.integrations import MemmgrLightningCallback
class Module(pl.LightningModule):
    def __init__(self, managed):
        super().__init__()
        torch.manual_seed(0)
        self.managed = managed
        self.blocks = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in range(4)))
    def training_step(self, batch, index):
        assert (budgets.current() is not None) == self.managed
        return (self.blocks(batch) - batch).square().mean()
    def on_train_end(self):
        bits = b"".join(p.detach().clone().numpy().tobytes() for p in self.parameters())
        stats = budgets.stats() or {"evictions": 0, "offloads": 0}
        line = f"{self.managed} {self.trainer.global_rank} {hashlib.sha256(bits).hexdigest()} {stats['evictions'] + stats['offloads'] > 0}\\n"
        sys.stdout.write(line); sys.stdout.flush()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
if __name__ == "__main__":
    data = torch.utils.data.DataLoader(torch.randn(4096, 64, generator=torch.Generator().manual_seed(0)), batch_size=512)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    for strategy, callbacks in (("ddp_fork", []), (sys.argv[1], [MemmgrLightningCallback("6MB")])):
        trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, callbacks=callbacks, **quiet)
        trainer.fit(Module(bool(callbacks)), data)
"""


# Processes that are started import torch and Lightning, 15 s of a processor. That the callback can be sent to them is tested above.
@pytest.mark.parametrize("strategy", ["ddp_fork", pytest.param("ddp_spawn", marks=pytest.mark.slow)])
def test_each_process_of_a_strategy_has_a_budget_and_one_gives_advice(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "train.py").write_text(RANKS)
    command = [sys.executable, str(tmp_path / "train.py"), strategy]
    done = forkserver.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    plain, managed = (sorted(row[1:] for row in rows if row[0] == kind) for kind in ("False", "True"))
    assert [row[:2] for row in managed] == [row[:2] for row in plain] and len(plain) == 2
    assert [row[2] for row in managed] == ["True", "True"], rows
    assert done.stderr.count("the floor (no smaller") == 1, done.stderr


def test_the_library_under_its_older_name(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning", reason="the package pytorch-lightning is not installed")
    code = """
import sys, torch
sys.modules["lightning"] = None  # not installed
import pytorch_lightning as pl
from memmgr.integrations import MemmgrLightningCallback
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def training_step(self, batch, index):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
callback = MemmgrLightningCallback("1GB", quiet=True)
trainer = pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, callbacks=[callback])
trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(4, 8)))
print(callback.stats()["passes"])
"""
    done = forkserver.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "4", done.stderr


def test_neither_package_is_imported_until_it_is_asked_for() -> None:
    code = (
        "import sys, memmgr.integrations as found; found.log_stats; "
        "print({'lightning', 'pytorch_lightning', 'transformers', 'accelerate', 'wandb', 'mlflow'} & set(sys.modules))"
    )
    done = forkserver.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "set()\n"
