"""A plain training loop under a budget: the same loop, one `with` around it.

    python examples/plain.py --budget 40MB
    memmgr run --budget 40MB examples/plain.py --budget none     # or without a line of memmgr in the script

The losses are the same to the last digit.
"""

import argparse

import torch
from torch import nn

import memmgr

parser = argparse.ArgumentParser()
parser.add_argument("--budget", default="40MB", help='as in memmgr.budget; "none" only measures')
parser.add_argument("--steps", type=int, default=10)
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(6)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randn(2048, 256)


def train() -> None:
    for step in range(args.steps):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.6f}")


if args.budget == "none":
    train()
else:
    with memmgr.budget(args.budget):
        train()
