"""A convnet on a GPU, deterministic: `python -P gpu_training.py ORDER [BUDGET]`. Prints one line of JSON.

ORDER: native, environment, first, or late (the model is made before memmgr is imported).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from typing import Any


def train(order: str, budget_bytes: int) -> dict[str, Any]:
    """Three steps; the digest is of all parameters and buffers."""
    import torch
    from torch import nn

    if order == "first":
        import memmgr
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for index in range(6):
        layers += [nn.Conv2d(3 if index == 0 else 32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Dropout(0.1), nn.Linear(2048, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if order == "late":
        import memmgr
    opened: Any = contextlib.nullcontext()
    if order in ("first", "late"):
        opened = memmgr.budget(budget_bytes, quiet=True)
    losses = []
    with opened:
        for step in range(3):
            torch.manual_seed(step)
            batch = torch.randn(32, 3, 64, 64, device="cuda")
            target = torch.randint(0, 10, (32,), device="cuda")
            loss = nn.functional.cross_entropy(model(batch), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    stats = {}
    if "memmgr.api.budget" in sys.modules:
        stats = {key: value for key, value in sys.modules["memmgr"].stats().items() if isinstance(value, int | float)}
    return {
        "digest": digest.hexdigest(),
        "losses": losses,
        "allocator": torch.cuda.get_allocator_backend(),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_peak_bytes": torch.cuda.max_memory_reserved(),
        "stats": stats,
    }


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1], int([*sys.argv, 0][2]))))
