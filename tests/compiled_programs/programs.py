"""Compiled programs and their bits. Run as a script: `programs.py NAME POLICY:BYTES...` prints those of a training in each of these
budgets, a line each ("plain:0": in none), and then how many of its graphs came from the cache on disk."""

import contextlib
import hashlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 3
DEPTH = 4  # of models of which a step in 35 % of the memory is possible


class Block(nn.Module):
    """Attention and a perceptron, with dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        batch, length, width = y.shape
        q, k, v = self.qkv(self.norm(y)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        y = y + F.dropout(self.out(a), 0.1, self.training)
        return y + F.dropout(self.down(F.gelu(self.up(y))), 0.1, self.training)


class Attention(nn.Module):
    """A language model."""

    def __init__(self, depth: int = 1, width: int = 32, heads: int = 2, words: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = nn.Linear(width, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.blocks(self.words(x))
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


class Adapted(nn.Module):
    """peft's LoRA on the linear layers of a block: the rest is frozen, and its own dropout draws."""

    def __init__(self) -> None:
        super().__init__()
        import peft

        targets = ["qkv", "out", "up", "down"]
        self.inner = peft.get_peft_model(
            Attention(DEPTH), peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=targets)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def words() -> torch.Tensor:
    return torch.randint(0, 64, (8, 32))


def sentences() -> torch.Tensor:
    """Sentences whose length changes with each step."""
    return torch.randint(0, 64, (8, 24 + 4 * (torch.initial_seed() % 3)))


def images() -> torch.Tensor:
    return torch.randn(8, 3, 16, 16)


def rows() -> torch.Tensor:
    return torch.randn(96 + 32 * int(torch.randint(0, 3, ())), 32)


class Program(NamedTuple):
    """A program, and the way in which it is compiled.

    Attributes:
        make: the model, which returns the loss.
        batch: the data of a step.
        dynamic: as in `torch.compile`.
        bfloat16: the forward runs in autocast.
        update: the optimizer's step is compiled, too.
        backward: autograd's graph is compiled, too.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]
    dynamic: bool | None = False
    bfloat16: bool = False
    update: bool = False
    backward: bool = False


def deep() -> nn.Module:
    return Attention(DEPTH)


PROGRAMS = {
    "attention": Program(Attention, words),
    "convolutions": Program(Convolutions, images),
    "broken": Program(Broken, rows, dynamic=True),
    "lora": Program(Adapted, words),
    "any length": Program(deep, sentences, dynamic=True),
    "length found to vary": Program(deep, sentences, dynamic=None),
    "autocast": Program(deep, words, bfloat16=True),
    "optimizer": Program(deep, words, update=True),
    "autograd": Program(deep, words, backward=True),
}


def bits(tensors: Iterable[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()


_drawing = threading.Lock()  # threads share the generator


class Training:
    """A compiled program. `run` trains it from its beginning, so that it is compiled once."""

    def __init__(self, name: str) -> None:
        self.program = PROGRAMS[name]
        torch.manual_seed(0)
        self.model = self.program.make()
        self.begins = {key: value.clone() for key, value in self.model.state_dict().items()}
        self.model.compile(dynamic=self.program.dynamic)
        self.optimizer = self._optimizer()
        self.update = torch.compile(self.optimizer.step) if self.program.update else None
        self.backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward
        if self.program.backward:
            with torch._dynamo.config.patch(compiled_autograd=True):
                self.backward = torch.compile(lambda loss: loss.backward())

    def _optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-2)

    def run(
        self,
        opened: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
        steps: int = STEPS,
        each: Callable[[], None] = lambda: None,
    ) -> str:
        """The bits of its losses, parameters, buffers and states after some steps."""
        self.model.load_state_dict(self.begins)
        self.model.zero_grad()
        if self.update is None:
            self.optimizer = self._optimizer()
        for state in states(self.optimizer):  # a compiled step is of one optimizer; its states begin as zeros
            state.zero_()
        losses = []
        with opened():
            for i in range(steps):
                with _drawing:
                    torch.manual_seed(i)
                    batch = self.program.batch()
                with torch.autocast("cpu", torch.bfloat16, enabled=self.program.bfloat16):
                    loss = self.model(batch)
                self.backward(loss)
                (self.update or self.optimizer.step)()
                self.optimizer.zero_grad()
                losses.append(loss.detach())
                del loss
                each()
        return bits([*losses, *self.model.state_dict().values(), *states(self.optimizer)])


def states(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (value for state in optimizer.state.values() for value in state.values())


def main(name: str, *budgets: str) -> None:
    import memmgr

    torch.set_num_threads(1)
    training = Training(name)
    for policy, _, limit in (budget.partition(":") for budget in budgets):
        if policy == "plain":
            print(training.run())
        else:
            print(training.run(lambda: memmgr.budget(f"{limit}B", policy=policy, quiet=True)))
    print(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])


if __name__ == "__main__":
    main(*sys.argv[1:])
