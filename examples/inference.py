"""Inference with weights that are larger than the budget: they stream from the disk, layer by layer.

    python examples/inference.py --budget 10MB

The weights are 25 MB. If the largest op's working set does not fit, the run ends with a `memmgr.BudgetError`.
"""

import argparse

import torch
from torch import nn

import memmgr

parser = argparse.ArgumentParser()
parser.add_argument("--budget", default="10MB")
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)) for _ in range(6))).eval()
x = torch.randn(64, 512)

with torch.no_grad():
    plain = model(x).sum().item()
    with memmgr.budget(args.budget) as budget:
        managed = [model(x).sum().item() for _ in range(3)]
assert managed == [plain] * 3
weights = sum(p.nbytes for p in model.parameters())
print(f"the same result, weights {weights / 1e6:.1f} MB, peak {budget.stats()['resident_bytes.peak'] / 1e6:.1f} MB")
