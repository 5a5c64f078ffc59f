"""The models: ten in two sizes, each with its optimizer and one batch.

Imports nothing of ours but models, for the reason that `gpt.py` gives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .convnet import ConvNet
from .gpt import GPT, GPTConfig

Around = Callable[[], contextlib.AbstractContextManager[object]]


@dataclass
class Training:
    """A model, its optimizer and one batch.

    `blocks`: the modules that activation checkpointing wraps, in the order of forward. `step`: forward, backward,
    update; the losses, detached. `around`: entered around everything that autograd saves tensors in.
    """

    model: nn.Module
    blocks: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    losses: Callable[[Training], list[Tensor]]
    around: Around = field(default=contextlib.nullcontext)

    def step(self) -> list[Tensor]:
        """Forward, backward, update; the losses, detached."""
        return self.losses(self)

    def state_bytes(self) -> int:
        """Bytes of parameters, as many of gradients, and of the optimizers' states."""
        kept = [t for o in self.optimizers for entry in o.state.values() for t in entry.values()]
        return 2 * sum(p.nbytes for p in self.model.parameters()) + sum(t.nbytes for t in kept if torch.is_tensor(t))


def _simple(
    model: nn.Module, blocks: Iterable[nn.Module], optimizer: torch.optim.Optimizer, loss_of: Callable[[], Tensor]
) -> Training:
    model.train()

    def losses(training: Training) -> list[Tensor]:
        with training.around():
            loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach()]

    return Training(model, list(blocks), [optimizer], losses)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


# ---- transformers


def gpt(tiny: bool, batch: int) -> Training:
    """The demo's GPT, with dropout."""
    sizes = GPTConfig(2, 2, 64, 32) if tiny else GPTConfig(6, 4, 192, 128)
    model = GPT(sizes)
    tokens = torch.randint(0, 256, (batch, sizes.context))
    return _simple(model, model.blocks, _adamw(model), lambda: model(tokens, tokens))


def llama(tiny: bool, batch: int) -> Training:
    """transformers' Llama with grouped queries and a fused AdamW."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, length = (64, 2, 32) if tiny else (192, 6, 128)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1024, hidden_size=width, intermediate_size=11 * width // 4, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, use_cache=False,
            bos_token_id=0, eos_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip
    tokens = torch.randint(0, 1024, (batch, length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return _simple(model, model.model.layers, optimizer, lambda: model(input_ids=tokens, labels=tokens).loss)


def bert(tiny: bool, batch: int) -> Training:
    """transformers' BERT with its masked tokens and dropout."""
    from transformers import BertConfig, BertForMaskedLM

    width, layers, length = (64, 2, 32) if tiny else (192, 6, 128)
    model: Any = BertForMaskedLM(
        BertConfig(
            vocab_size=1024, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=4
        )
    )  # fmt: skip
    tokens = torch.randint(0, 1024, (batch, length))
    return _simple(model, model.bert.encoder.layer, _adamw(model), lambda: model(input_ids=tokens, labels=tokens).loss)


def vit(tiny: bool, batch: int) -> Training:
    """transformers' ViT with dropout."""
    from transformers import ViTConfig, ViTForImageClassification

    width, layers = (64, 2) if tiny else (192, 6)
    sizes: dict[str, Any] = {
        "image_size": 32, "patch_size": 8 if tiny else 4, "hidden_size": width, "intermediate_size": 4 * width,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_labels": 10, "hidden_dropout_prob": 0.1,
    }  # fmt: skip
    model: Any = ViTForImageClassification(ViTConfig(**sizes))
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    return _simple(model, blocks, _adamw(model), lambda: model(pixel_values=images, labels=labels).loss)


# ---- convolutions


def resnet(tiny: bool, batch: int) -> Training:
    """The demo's residual convnet: batch norm, dropout, SGD with momentum."""
    model = ConvNet(width=8 if tiny else 32, stages=2 if tiny else 3, blocks=1 if tiny else 3)
    size = 16 if tiny else 32
    images, labels = torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return _simple(model, model.body, optimizer, lambda: model(images, labels))


class _Double(nn.Sequential):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(
            nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(8, outside), nn.SiLU(),
            nn.Conv2d(outside, outside, 3, padding=1), nn.GroupNorm(8, outside), nn.SiLU(),
        )  # fmt: skip


class UNet(nn.Module):
    """Three levels with skips."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down1, self.down2 = _Double(3, width), _Double(width, 2 * width)
        self.middle = _Double(2 * width, 4 * width)
        self.raise2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.raise1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up2, self.up1 = _Double(4 * width, 2 * width), _Double(2 * width, width)
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images to images."""
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        three = self.middle(F.max_pool2d(two, 2))
        two = self.up2(torch.cat([two, self.raise2(three)], 1))
        one = self.up1(torch.cat([one, self.raise1(two)], 1))
        out: Tensor = self.last(one)
        return out


def unet(tiny: bool, batch: int) -> Training:
    """A U-Net that learns to give back its input."""
    model = UNet(8 if tiny else 32)
    size = 16 if tiny else 64
    images = torch.randn(batch, 3, size, size)
    blocks = [model.down1, model.down2, model.middle, model.up2, model.up1]
    return _simple(model, blocks, torch.optim.Adam(model.parameters()), lambda: F.mse_loss(model(images), images))


class _Dense(nn.Module):
    """Batch norm, activation and convolution over all that the block has made so far."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(width)
        self.conv = nn.Conv2d(width, growth, 3, padding=1, bias=False)

    def forward(self, *parts: Tensor) -> Tensor:
        out: Tensor = self.conv(F.relu(self.norm(torch.cat(parts, 1))))
        return out


class DenseNet(nn.Module):
    """Three dense blocks with transitions of half the resolution."""

    def __init__(self, growth: int, depth: int, levels: int = 3) -> None:
        super().__init__()
        width = 2 * growth
        self.first = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.levels, self.down = nn.ModuleList(), nn.ModuleList()
        for _ in range(levels):
            self.levels.append(nn.ModuleList(_Dense(width + i * growth, growth) for i in range(depth)))
            width += depth * growth
            self.down.append(nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1)))
            width //= 2
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean loss."""
        x = self.first(images)
        layers: Any
        for layers, down in zip(self.levels, self.down, strict=True):
            parts = [x]
            for layer in layers:
                parts.append(layer(*parts))
            x = F.avg_pool2d(down(torch.cat(parts, 1)), 2)
        return F.cross_entropy(self.head(x.mean(dim=(2, 3))), labels)


def densenet(tiny: bool, batch: int) -> Training:
    """A DenseNet: cheap concatenations, expensive memory."""
    model = DenseNet(*((4, 3, 2) if tiny else (16, 6)))
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    blocks = [m for m in model.modules() if isinstance(m, _Dense)] + list(model.down)
    return _simple(model, blocks, optimizer, lambda: model(images, labels))


# ---- recurrent


class Recurrent(nn.Module):
    """A language model of four LSTM layers, each one op."""

    def __init__(self, width: int, vocabulary: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstms = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(4))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss."""
        out = self.embed(tokens)
        for lstm in self.lstms:
            out, _ = lstm(out)
        return F.cross_entropy(self.head(out).flatten(0, 1), tokens.flatten())


def lstm(tiny: bool, batch: int) -> Training:
    """An LSTM over 64 tokens."""
    model = Recurrent(32 if tiny else 128)
    tokens = torch.randint(0, 256, (batch, 16 if tiny else 64))
    return _simple(model, model.lstms, torch.optim.Adam(model.parameters()), lambda: model(tokens))


class _Join(nn.Module):
    """The cell of a tree LSTM: two children's (h, c) to one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * width, 5 * width)

    def forward(self, lh: Tensor, lc: Tensor, rh: Tensor, rc: Tensor) -> tuple[Tensor, Tensor]:
        i, lf, rf, o, u = self.gates(torch.cat([lh, rh], -1)).chunk(5, -1)
        c = torch.sigmoid(lf) * lc + torch.sigmoid(rf) * rc + torch.sigmoid(i) * torch.tanh(u)
        return torch.sigmoid(o) * torch.tanh(c), c


class TreeLSTM(nn.Module):
    """Leaves joined two by two up to one root."""

    def __init__(self, width: int, features: int = 32) -> None:
        super().__init__()
        self.leaf, self.join = nn.Linear(features, width), _Join(width)

    def forward(self, leaves: Tensor) -> Tensor:
        """Maps (leaves, batch, features) to the root's h, (batch, width)."""
        row = [(torch.tanh(self.leaf(x)), x.new_zeros(len(x), self.leaf.out_features)) for x in leaves]
        while len(row) > 1:
            row = [self.join(*left, *right) for left, right in zip(row[::2], row[1::2], strict=True)]
        return row[0][0]


def tree_lstm(tiny: bool, batch: int) -> Training:
    """A tree LSTM over full binary trees: many small ops."""
    model = TreeLSTM(32 if tiny else 192)
    leaves = torch.randn(4 if tiny else 32, batch, 32)
    return _simple(
        model, [model.join], torch.optim.Adam(model.parameters()), lambda: model(leaves).square().mean()
    )  # fmt: skip


# ---- double backward


def gan(tiny: bool, batch: int) -> Training:
    """A GAN whose critic pays for its gradient's norm (WGAN-GP): a backward through a backward, two optimizers."""
    width, deep = (32, 2) if tiny else (384, 5)

    def layers(inside: int, outside: int) -> nn.Sequential:
        first, last = nn.Sequential(nn.Linear(inside, width), nn.Softplus()), nn.Linear(width, outside)
        return nn.Sequential(
            first, *(nn.Sequential(nn.Linear(width, width), nn.Softplus()) for _ in range(deep)), last
        )  # fmt: skip

    g, d = layers(64, 256), layers(256, 1)
    og, od = (torch.optim.Adam(m.parameters(), betas=(0.5, 0.9)) for m in (g, d))
    real, noise = torch.randn(batch, 256), torch.randn(batch, 64)

    def losses(training: Training) -> list[Tensor]:
        with training.around():
            fake = g(noise)
            share = real.new_empty(batch, 1).uniform_()
            between = (share * real + (1 - share) * fake.detach()).requires_grad_()
            (slope,) = torch.autograd.grad(d(between).sum(), between, create_graph=True)
            d_loss = d(fake.detach()).mean() - d(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
        d_loss.backward()
        od.step()
        od.zero_grad()
        with training.around():
            g_loss = -d(fake).mean()
        g_loss.backward()
        og.step()
        og.zero_grad()
        od.zero_grad()
        return [d_loss.detach(), g_loss.detach()]

    return Training(nn.ModuleList([g, d]), [*g, *d], [og, od], losses)


Make = Callable[[bool, int], Training]
MODELS: dict[str, tuple[Make, int]] = {
    "GPT": (gpt, 6),
    "Llama": (llama, 6),
    "BERT": (bert, 6),
    "ResNet": (resnet, 16),
    "U-Net": (unet, 4),
    "DenseNet": (densenet, 16),
    "ViT": (vit, 12),
    "LSTM": (lstm, 32),
    "TreeLSTM": (tree_lstm, 96),
    "GAN": (gan, 512),
}
"""Name: how it is made, and the batch."""


def make(name: str, tiny: bool = False, batch: int | None = None) -> Training:
    """A training, on the default device, with torch's random numbers as they are.

    `name`: one of MODELS. `tiny`: for tests: milliseconds a step. `batch`: samples; by default the model's own (a
    quarter of it where `tiny`).
    """
    function, usual = MODELS[name]
    return function(tiny, batch or (max(2, usual // 4) if tiny else usual))
