"""Small training runs whose memory the tests of this folder measure. Nothing here knows of memmgr.

Each entry of `MODELS` makes a `Training` of it: `step()` takes one optimizer step and returns the loss.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _load(name: str) -> ModuleType:
    """A module of `tools/bench/` by its file: importing it by its name would import memmgr into runs that do without."""
    path = Path(__file__).resolve().parents[2] / "tools" / "bench" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"_budget_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


_gpt, _convnet = _load("gpt"), _load("convnet")


class Training:
    """A model, its AdamW and one batch that is used again and again."""

    def __init__(self, model: nn.Module, loss: Callable[[], Tensor], lr: float = 1e-3) -> None:
        self.model = model
        self.loss = loss
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def step(self) -> float:
        """Forward, backward, update."""
        loss = self.loss()
        loss.backward()
        value = loss.item()
        del loss
        self.optimizer.step()
        self.optimizer.zero_grad()
        return value


def gpt(
    layers: int = 4, width: int = 128, context: int = 128, batch: int = 8, heads: int = 4, dropout: float = 0.1
) -> Training:
    """The demo's model, smaller."""
    config = _gpt.GPTConfig(layers=layers, heads=heads, width=width, context=context, dropout=dropout)
    model = _gpt.GPT(config)
    tokens = torch.randint(256, (batch, context))
    targets = torch.randint(256, (batch, context))
    return Training(model, lambda: model(tokens, targets))


def convnet(width: int = 16, stages: int = 2, blocks: int = 3, batch: int = 8, height: int = 32) -> Training:
    """The demo's residual convnet, smaller."""
    model = _convnet.ConvNet(width=width, stages=stages, blocks=blocks)
    images, labels = torch.randn(batch, 3, height, height), torch.randint(10, (batch,))
    return Training(model, lambda: model(images, labels))


def mlp(depth: int = 8, width: int = 256, batch: int = 2048) -> Training:
    """Linear and GELU in turns: no skip, nothing held."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    x, y = torch.randn(batch, width), torch.randint(10, (batch,))
    return Training(model, lambda: F.cross_entropy(model(x), y))


class UNet(nn.Module):
    """Three levels; `skips` is a Python list, which holds the encoder's activations until the decoder takes them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()

        def block(i: int, o: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.Conv2d(o, o, 3, padding=1), nn.ReLU()
            )

        w = width
        self.down = nn.ModuleList([block(3, w), block(w, 2 * w), block(2 * w, 4 * w)])
        self.middle = block(4 * w, 4 * w)
        self.up = nn.ModuleList([block(8 * w, 2 * w), block(4 * w, w), block(2 * w, w)])
        self.head = nn.Conv2d(w, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, 3, height, height) to (batch, 2, height, height)."""
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for level in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = level(torch.cat([x, skips.pop()], dim=1))
        out: Tensor = self.head(x)
        return out


def unet(width: int = 16, batch: int = 4, height: int = 64) -> Training:
    """Long skips."""
    model = UNet(width)
    x, y = torch.randn(batch, 3, height, height), torch.randint(2, (batch, height, height))
    return Training(model, lambda: F.cross_entropy(model(x), y))


class DenseBlock(nn.Module):
    """DenseNet's block: each layer reads the concatenation of all before it, so a list holds them all."""

    def __init__(self, layers: int = 8, growth: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d((i + 1) * growth),
                nn.ReLU(),
                nn.Conv2d((i + 1) * growth, 4 * growth, 1, bias=False),
                nn.BatchNorm2d(4 * growth),
                nn.ReLU(),
                nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
            )
            for i in range(layers)
        )
        self.stem = nn.Conv2d(3, growth, 3, padding=1)
        self.head = nn.Linear((layers + 1) * growth, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, 3, height, height) to (batch, 10)."""
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        out: Tensor = self.head(torch.cat(features, 1).mean(dim=(2, 3)))
        return out


def densenet(layers: int = 8, growth: int = 16, batch: int = 8, height: int = 32) -> Training:
    """A DenseNet block."""
    model = DenseBlock(layers, growth)
    x, y = torch.randn(batch, 3, height, height), torch.randint(10, (batch,))
    return Training(model, lambda: F.cross_entropy(model(x), y))


class LSTMLoop(nn.Module):
    """`nn.LSTMCell` in a Python loop that collects its outputs."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (time, batch, width) to (time, batch, 16)."""
        h = c = x.new_zeros(x.shape[1], x.shape[2])
        outputs = []
        for t in range(x.shape[0]):
            h, c = self.cell(x[t], (h, c))
            outputs.append(h)
        out: Tensor = self.head(torch.stack(outputs))
        return out


def lstm(width: int = 128, time: int = 48, batch: int = 64) -> Training:
    """The loop that holds a share of its saved tensors."""
    model = LSTMLoop(width)
    x, y = torch.randn(time, batch, width), torch.randint(16, (time * batch,))
    return Training(model, lambda: F.cross_entropy(model(x).flatten(0, 1), y))


MODELS: dict[str, Callable[[], Training]] = {
    "gpt": gpt,
    "mlp": mlp,
    "convnet": convnet,
    "unet": unet,
    "densenet": densenet,
    "lstm": lstm,
}
