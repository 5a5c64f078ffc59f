"""What the benchmarks train: models, their optimizers and one batch each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memmgr.tools._convnet import ConvNet
from memmgr.tools.gpt import GPT, GPTConfig


@dataclass
class Run:
    """A model, its optimizer and one batch."""

    model: nn.Module
    loss: Callable[[], Tensor]
    optimizer: torch.optim.Optimizer

    def step(self) -> None:
        """Forward, backward, update."""
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def run_of(model: nn.Module, loss: Callable[[], Tensor]) -> Run:
    return Run(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-4))


def demo_gpt(quick: bool, checkpointed: bool = False) -> Run:
    """The demo's GPT; `checkpointed` recomputes each block, which is full activation checkpointing."""
    torch.manual_seed(0)
    config = GPTConfig(layers=2, heads=4, width=128, context=64) if quick else GPTConfig()
    model = GPT(config)
    if checkpointed:
        for block in model.blocks:
            block.forward = _checkpointed(block.forward)  # type: ignore[method-assign]
    batch = 8 if quick else 16
    tokens, targets = (torch.randint(256, (batch, config.context)) for _ in range(2))
    return run_of(model, lambda: model(tokens, targets))


def _checkpointed(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(forward, x, use_reentrant=False)  # type: ignore[no-any-return]


def heavy(quick: bool) -> Run:
    """Every op takes 100 us or more: wide layers, a large batch."""
    torch.manual_seed(0)
    width, batch = (256, 512) if quick else (1024, 1024)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(width, 16))
    x, y = torch.randn(batch, width), torch.randint(16, (batch,))
    return run_of(model, lambda: F.cross_entropy(model(x), y))


def launch_bound(quick: bool) -> Run:
    """Hundreds of ops that take microseconds each: torch's own overhead is what it costs."""
    torch.manual_seed(0)
    cell, head = nn.GRUCell(16, 16), nn.Linear(16, 4)
    time_steps = 10 if quick else 60
    x, y = torch.randn(time_steps, 4, 16), torch.randint(4, (4,))
    model = nn.ModuleList([cell, head])

    def loss() -> Tensor:
        h = x.new_zeros(4, 16)
        for t in range(time_steps):
            h = torch.tanh(cell(x[t], h) * 0.5 + h)
        return F.cross_entropy(head(h), y)

    return run_of(model, loss)


def small_ops(quick: bool) -> Run:
    """A GPT so narrow that its ops take about ten microseconds, which is what launching one on a GPU takes."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2 if quick else 4, heads=2, width=96, context=64))
    tokens, targets = (torch.randint(256, (4, 64)) for _ in range(2))
    return run_of(model, lambda: model(tokens, targets))


def convnet(quick: bool) -> Run:
    """A residual convnet with batch norm and dropout."""
    torch.manual_seed(0)
    width, batch, height = (8, 8, 16) if quick else (48, 64, 32)
    model = ConvNet(width=width, stages=2, blocks=2 if quick else 4)
    images, labels = torch.randn(batch, 3, height, height), torch.randint(10, (batch,))
    return run_of(model, lambda: model(images, labels))


MODELS = {"100 us ops": heavy, "10 us ops": small_ops, "launch-bound": launch_bound}
TIGHT = {"the demo's GPT": demo_gpt, "a convnet": convnet}
"""Those that are trained in less than they need."""
