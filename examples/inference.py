"""Inference: the budget is a limit that is kept, and says what a run takes.

    python examples/inference.py --budget 40MB

Without a backward nothing is saved, so there is nothing that memmgr could let go: what does not fit is a
`memmgr.BudgetError` that says who holds what. Here it is met by halving the batch.
"""

import argparse

import torch
from torch import nn

import memmgr

parser = argparse.ArgumentParser()
parser.add_argument("--budget", default="40MB")
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6))).eval()
x = torch.randn(8192, 256)

with memmgr.budget(args.budget) as budget, torch.no_grad():
    rows = len(x)
    while True:
        try:
            mean = sum(model(part).sum().item() for part in x.split(rows)) / x.numel()
            break
        except memmgr.BudgetError as error:
            if rows <= 16:
                raise
            rows //= 2
            print(f"{str(error).splitlines()[0]} Trying {rows} rows")
print(f"mean {mean:.6f} with {rows} rows at a time, peak {budget.stats()['resident_bytes.peak'] / 1e6:.1f} MB")
