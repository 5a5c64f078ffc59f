"""accelerate: a tracker opens the budget with the others, and closes it; every process has its own.

    pip install accelerate
    python examples/with_accelerate.py --budget 60MB
    accelerate launch --num_processes 2 --cpu examples/with_accelerate.py --budget 60MB

The summary is printed by the main process alone. Trackers behind it ("tensorboard", "wandb") get its figures with the loss.
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from memmgr.integrations import MemmgrTracker

parser = argparse.ArgumentParser()
parser.add_argument("--budget", default="60MB")
args = parser.parse_args()

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, log_with=[MemmgrTracker(args.budget)])
accelerator.init_trackers("example")
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(6)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(8192, 256)), batch_size=2048)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for step, (x,) in enumerate(loader):
    loss = (model(x) - x).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"loss": loss.item()}, step)
    accelerator.print(f"step {step}: loss {loss.item():.6f}")
accelerator.end_training()
