"""Compiled programs and their bits. Run as a script: `programs.py LIMIT POLICY` prints those of a training, and how many of its
graphs came from the cache on disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 3


class Attention(nn.Module):
    """A block of a language model, with dropout."""

    def __init__(self, width: int = 32, heads: int = 2, words: int = 64) -> None:
        super().__init__()
        self.heads = heads
        self.words = nn.Embedding(words, width)
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.words(x)
        batch, length, width = y.shape
        q, k, v = self.qkv(self.norm(y)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        y = y + F.dropout(self.out(a), 0.1, self.training)
        y = y + F.dropout(self.down(F.gelu(self.up(y))), 0.1, self.training)
        return F.cross_entropy(self.head(y)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


class Convolutions(nn.Module):
    """With batch norm, whose statistics its graph writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.second(F.relu(self.norm(self.first(x)))))
        return self.head(y.mean((2, 3))).square().mean()


class Broken(nn.Module):
    """Two graphs, the second for any batch size, and eager code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.first(x))
        torch._dynamo.graph_break()
        return self.second(y * y.detach().abs().amax().item()).sigmoid().sum()


def words() -> torch.Tensor:
    return torch.randint(0, 64, (8, 32))


def images() -> torch.Tensor:
    return torch.randn(8, 3, 16, 16)


def rows() -> torch.Tensor:
    return torch.randn(96 + 32 * int(torch.randint(0, 3, ())), 32)


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], bool | None]] = {
    "attention": (Attention, words, False),
    "convolutions": (Convolutions, images, False),
    "broken": (Broken, rows, True),
}


def bits(tensors: Iterable[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()


class Training:
    """A compiled program. `run` trains it from its beginning, so that it is compiled once."""

    def __init__(self, name: str) -> None:
        make, self.batch, dynamic = PROGRAMS[name]
        torch.manual_seed(0)
        self.model = make()
        self.begins = {key: value.clone() for key, value in self.model.state_dict().items()}
        self.model.compile(dynamic=dynamic)

    def run(
        self,
        opened: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
        steps: int = STEPS,
        each: Callable[[], None] = lambda: None,
    ) -> str:
        """The bits of its losses, parameters, buffers and states after some steps."""
        self.model.load_state_dict(self.begins)
        self.model.zero_grad()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        losses = []
        with opened():
            for i in range(steps):
                torch.manual_seed(i)
                loss = self.model(self.batch())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
                del loss
                each()
        states = [value for state in optimizer.state.values() for value in state.values()]
        return bits([*losses, *self.model.state_dict().values(), *states])


def main(limit: str, policy: str) -> None:
    import memmgr

    torch.set_num_threads(1)
    training = Training("attention")
    print(training.run(lambda: memmgr.budget(f"{limit}B", policy=policy, quiet=True)))
    print(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])


if __name__ == "__main__":
    main(*sys.argv[1:])
