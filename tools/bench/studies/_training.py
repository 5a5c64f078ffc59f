"""Trainings of the benchmarks: models, their optimizers and one batch each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memmgr.tools.bench.cell import digest_of
from memmgr.tools.bench.gpt import GPT, GPTConfig


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
    """Hundreds of ops that take microseconds each: torch's own overhead dominates."""
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
    """A GPT so narrow that its ops take about ten microseconds, as long as a launch on a GPU."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2 if quick else 4, heads=2, width=96, context=64))
    tokens, targets = (torch.randint(256, (4, 64)) for _ in range(2))
    return run_of(model, lambda: model(tokens, targets))


MODELS = {"100 us ops": heavy, "10 us ops": small_ops, "launch-bound": launch_bound}


SIZES = {
    "tiny": GPTConfig(layers=4, heads=4, width=128, context=64),
    "small": GPTConfig(vocabulary=4096),
    "large": GPTConfig(10, 10, 640, 256, vocabulary=8192),
}
"""1, 14 and 60 million parameters."""


class States:
    """A GPT with dropout and a fused AdamW. One turn is a step, on a batch of its own."""

    device = "cpu"
    micro_batches = 1
    shares: tuple[float, ...] = (0.5, 0.25)
    tiny_shares: tuple[float, ...] = shares

    def __init__(self, size: str, batch: int) -> None:
        torch.manual_seed(0)
        self.size, self.config = size, SIZES[size]
        self.batch, self.warm = batch, 3 if size == "tiny" else 7
        self.model: nn.Module = GPT(self.config).to(self.device)
        self.optimizer = self.optimizer_of(self.model.parameters())

    def optimizer_of(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=3e-4, fused=True)

    def limits(self, need: int) -> dict[str, int]:
        """Budgets, in bytes, of a step that needs so many."""
        shares = self.tiny_shares if self.size == "tiny" else self.shares
        return {f"{share:.0%}": int(need * share) for share in shares}

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens, targets)
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def turn(self) -> dict[str, float]:
        """Seconds: by the clock, and of the processor, which other work of the machine affects less."""
        shape = self.batch, self.config.context
        batches = [
            [torch.randint(self.config.vocabulary, shape).to(self.device) for _ in range(2)]
            for _ in range(self.micro_batches)
        ]
        begun, used = time.perf_counter(), time.process_time()
        for tokens, targets in batches:
            self.loss(tokens, targets).backward()
        self.update()
        return {"step": time.perf_counter() - begun, "processor": time.process_time() - used}

    def tensors(self) -> list[Tensor]:
        """All that training leaves behind."""
        states = [t for values in self.optimizer.state.values() for t in values.values()]
        return [*self.model.parameters(), *states, torch.get_rng_state()]

    def digest(self) -> str:
        return digest_of(self.tensors())

    def parameters_digest(self) -> str:
        return digest_of(self.tensors()[: len(list(self.model.parameters()))])


class FP32(States):
    """All in 32 bits."""

    shares = (0.75, 0.5, 0.25, 0.1)
    tiny_shares = (0.75, 0.5)


class AMP(States):
    """torch's autocast to bf16; parameters and states stay in 32 bits."""

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.device, dtype=torch.bfloat16):
            return super().loss(tokens, targets)


class BF16(States):
    """Parameters, activations and gradients in bf16; the optimizer keeps fp32 copies, moments and gradients."""

    def __init__(self, size: str, batch: int) -> None:
        super().__init__(size, batch)
        self.model.bfloat16()
        self.parameters = list(self.model.parameters())
        self.masters = [nn.Parameter(p.detach().float()) for p in self.parameters]
        self.optimizer = self.optimizer_of(self.masters)

    def update(self) -> None:
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        super().update()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)

    def tensors(self) -> list[Tensor]:
        return [*self.masters, *super().tensors()]


class LoRA(States):
    """Adapters of rank 8 on every projection of a frozen base; peft's. A quarter of the batch, since the base is the
    large part.
    """

    def __init__(self, size: str, batch: int) -> None:
        from peft import LoraConfig, get_peft_model

        super().__init__(size, max(1, batch // 4))
        self.base_bytes = sum(p.nbytes for p in self.model.parameters())
        targets = ["qkv", "out", "mlp.0", "mlp.2"]
        adapted = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1, target_modules=targets)
        self.model = get_peft_model(self.model, adapted)  # type: ignore[arg-type]
        self.optimizer = self.optimizer_of(p for p in self.model.parameters() if p.requires_grad)

    def limits(self, need: int) -> dict[str, int]:
        """Also a third of the base."""
        return super().limits(need) | {"base/3": self.base_bytes // 3}


class Accumulate(States):
    """The batch in four micro-batches; their gradients are clipped by their norm."""

    micro_batches = 4

    def __init__(self, size: str, batch: int) -> None:
        super().__init__(size, max(1, batch // self.micro_batches))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return super().loss(tokens, targets) / self.micro_batches

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        super().update()


VARIANTS: dict[str, type[States]] = {
    "train": FP32,
    "amp": AMP,
    "bf16": BF16,
    "lora": LoRA,
    "accumulate": Accumulate,
}
