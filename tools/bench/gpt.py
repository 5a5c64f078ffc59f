"""A byte-level GPT in one sitting: the model of the demo and of the benchmarks.

Decoder-only, pre-norm, learned positions, GELU, dropout, untied head; attention through
`F.scaled_dot_product_attention`. Nothing in it knows of memmgr, and the file imports nothing of ours: an unmanaged run
can load it without loading memmgr.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT."""

    layers: int = 6  # number of blocks
    heads: int = 6  # attention heads per block; divides `width`
    width: int = 384  # features per token
    context: int = 256  # the longest sequence, in bytes
    vocabulary: int = 256  # token values; 256 for bytes
    dropout: float = 0.1  # probability, after the embedding, in attention and at the end of both halves of a block


class Attention(nn.Module):
    """Causal self-attention, all heads in one projection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, time, width) to the same shape."""
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        y = self.out(y.transpose(1, 2).reshape(batch, time, width))
        return F.dropout(y, self.dropout, self.training)


class Block(nn.Module):
    """Attention and a four times wider MLP, each added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
            nn.Dropout(config.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, time, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class GPT(nn.Module):
    """The model. `forward` gives logits, or the mean cross-entropy in nats when targets are given."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Weights that end a residual branch start smaller, so that the stream's variance does not grow with
                # depth.
                ends_branch = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * config.layers) if ends_branch else 1.0))
            elif "norm" not in name:
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (batch, time, vocabulary), or with `targets` (batch, time) the mean loss in nats, a scalar.

        `tokens`: int64 (batch, time), time at most `config.context`. `targets`: the same shape; the token that follows
        each.
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = F.dropout(self.token(tokens) + self.position(places), self.config.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def parameter_count(self) -> int:
        """Number of trained scalars."""
        return sum(p.numel() for p in self.parameters())
