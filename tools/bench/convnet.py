"""A small residual convnet with batch norm and dropout: with the GPT, the two models whose bits are compared.

Imports nothing of ours, for the reason that `gpt.py` gives.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """Two convolutions with batch norm, added to the input; batch norm's running stats are a hidden write (rule 4)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, width, height, height) to the same shape."""
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(x + self.norm2(self.conv2(y)))


class ConvNet(nn.Module):
    """Residual blocks in stages of halving resolution, then a linear head over ten classes."""

    def __init__(self, width: int = 32, stages: int = 2, blocks: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
        for stage in range(stages):
            here = width << stage
            layers += [Residual(here) for _ in range(blocks)]
            if stage + 1 < stages:
                layers.append(nn.Conv2d(here, 2 * here, 2, stride=2))
        self.body = nn.Sequential(*layers)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width << (stages - 1), 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean loss, a scalar, for images (batch, 3, height, height) and labels (batch,)."""
        features = self.body(images).mean(dim=(2, 3))
        return F.cross_entropy(self.head(self.dropout(features)), labels)
