"""Small trainings under a budget; prints what test_training.py compares. `python train.py MODEL POLICY FRACTION`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import memmgr


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(a), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.after(x)))), 0.1)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 64), nn.Linear(64, 64)
        self.blocks = nn.Sequential(*(Block(64) for _ in range(4)))

    def forward(self, step: int) -> torch.Tensor:
        x = torch.randint(0, 64, (8, 65))
        return F.cross_entropy(self.head(self.blocks(self.embed(x[:, :-1]))).flatten(0, 1), x[:, 1:].flatten())


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i in range(4):
            layers += [nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(16, 10)

    def forward(self, step: int) -> torch.Tensor:
        h = F.max_pool2d(self.body(torch.randn(8, 3, 32, 32)), 2).mean((2, 3))
        return F.cross_entropy(self.head(h), torch.randint(0, 10, (8,)))


def train(kind: type[nn.Module], **budget: Any) -> tuple[str, list[float], dict[str, Any]]:
    """Bits of parameters, buffers and generator; losses; statistics."""
    torch.manual_seed(0)
    context = memmgr.budget(quiet=True, **budget) if budget else contextlib.nullcontext()
    losses = []
    with context as mm:
        model = kind()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            loss = model(step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            del loss
        digest = hashlib.sha256()
        for tensor in [*model.parameters(), *model.buffers(), torch.get_rng_state()]:
            digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest(), losses, mm.stats() if mm is not None else {}


def main() -> None:
    kind = {"gpt": GPT, "conv": Conv}[sys.argv[1]]
    policy, fraction = sys.argv[2], float(sys.argv[3])
    torch.set_num_threads(1)
    plain = train(kind)
    measured = train(kind, limit=None)
    limit = int(measured[2]["unmanaged_peak_bytes"] * fraction)
    managed = train(kind, limit=limit, policy=policy)
    print(json.dumps({"plain": plain, "measured": measured, "managed": managed, "limit": limit}))


if __name__ == "__main__":
    main()
