"""Several processes with DistributedDataParallel: each has a budget of its own.

    torchrun --nproc-per-node 2 examples/ddp.py --budget 60MB

DDP's buckets count against the budget of their process.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memmgr

parser = argparse.ArgumentParser()
parser.add_argument("--budget", default="60MB")
parser.add_argument("--steps", type=int, default=4)
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
blocks = (nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(6))
model = DistributedDataParallel(nn.Sequential(*blocks))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randn(2048, 256, generator=torch.Generator().manual_seed(rank))

with memmgr.budget(args.budget, quiet=rank != 0):
    for step in range(args.steps):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.6f}")
dist.destroy_process_group()
