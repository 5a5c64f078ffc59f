"""Lightning's Trainer: a callback, and the module stays as it is.

    pip install '.[lightning]'
    python examples/with_lightning.py --budget 60MB

Validation and checkpoints inside `fit` are inside the budget.
"""

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from memmgr.integrations import MemmgrLightningCallback

parser = argparse.ArgumentParser()
parser.add_argument("--budget", default="60MB")
args = parser.parse_args()


class Autoencoder(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(6))
        self.model = nn.Sequential(*blocks)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = (self.model(batch[0]) - batch[0]).square().mean()
        print(f"step {index}: loss {loss.item():.6f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(0, verbose=False)
loader = DataLoader(TensorDataset(torch.randn(8192, 256)), batch_size=2048)
trainer = lightning.Trainer(
    accelerator="cpu",
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[MemmgrLightningCallback(args.budget)],
)
trainer.fit(Autoencoder(), loader)
