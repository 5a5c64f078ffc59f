"""ResNet-18 and ResNet-50 (He et al., arXiv 1512.03385), with the stride of a bottleneck in its 3x3 convolution.

The layers are torchvision's, so that sizes and times compare with published ones; weights start as torch's modules start.
Like its neighbour `gpt.py` the file imports nothing of ours: an unmanaged run never sees memmgr.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def _conv(inside: int, outside: int, size: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inside, outside, size, stride, size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outside))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions."""

    expansion = 1

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList([_conv(inside, width, 3, stride), _conv(width, width, 3)])
        self.short = _conv(inside, width, 1, stride) if stride > 1 or inside != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for i, part in enumerate(self.parts):
            y = part(y) if i == 0 else part(F.relu(y, inplace=True))
        return F.relu(y + self.short(x), inplace=True)


class Bottleneck(BasicBlock):
    """1x1, 3x3 and 1x1 convolutions."""

    expansion = 4

    def __init__(self, inside: int, width: int, stride: int) -> None:
        nn.Module.__init__(self)
        parts = [_conv(inside, width, 1), _conv(width, width, 3, stride), _conv(width, 4 * width, 1)]
        self.parts = nn.ModuleList(parts)
        self.short = _conv(inside, 4 * width, 1, stride) if stride > 1 or inside != 4 * width else nn.Identity()


class ResNet(nn.Module):
    """For images of 224 x 224 and 1,000 classes. `depth`: 18 or 50."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        block, counts = {18: (BasicBlock, (2, 2, 2, 2)), 50: (Bottleneck, (3, 4, 6, 3))}[depth]
        self.stem = nn.Sequential(_conv(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        blocks: list[nn.Module] = []
        inside = 64
        for stage, count in enumerate(counts):
            width = 64 << stage
            for index in range(count):
                blocks.append(block(inside, width, 2 if stage > 0 and index == 0 else 1))
                inside = width * block.expansion
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inside, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.stem(images))
        out: Tensor = self.head(x.mean((2, 3)))
        return out
