"""Six small trainings: each function makes its model, optimizer and batch and returns one step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memmgr.tools._convnet import ConvNet
from memmgr.tools.gpt import GPT, GPTConfig

Step = Callable[[], object]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> Step:
    model.train()

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def gpt() -> Step:
    """The demo's GPT."""
    model = GPT(GPTConfig(layers=4, width=384, heads=6))
    tokens = torch.randint(0, 256, (8, 256))
    return _step(model, torch.optim.AdamW(model.parameters()), lambda: model(tokens, tokens))


def llama() -> Step:
    """transformers' Llama with grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=2048, hidden_size=384, intermediate_size=1024, num_hidden_layers=4,
            num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=512, use_cache=False,
        )
    )  # fmt: skip
    tokens = torch.randint(0, 2048, (4, 256))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return _step(model, optimizer, lambda: model(input_ids=tokens, labels=tokens).loss)


def bert() -> Step:
    """transformers' BERT with its masked tokens."""
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(
        BertConfig(vocab_size=2048, hidden_size=384, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=6)
    )
    tokens = torch.randint(0, 2048, (8, 128))
    optimizer = torch.optim.AdamW(model.parameters())
    return _step(model, optimizer, lambda: model(input_ids=tokens, labels=tokens).loss)


def convnet() -> Step:
    """The demo's residual convnet."""
    model = ConvNet(width=32, stages=3, blocks=2)
    images, labels = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return _step(model, optimizer, lambda: model(images, labels))


class _Double(nn.Sequential):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(
            nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(8, outside), nn.SiLU(),
            nn.Conv2d(outside, outside, 3, padding=1), nn.GroupNorm(8, outside), nn.SiLU(),
        )  # fmt: skip


class UNet(nn.Module):
    """Three levels with skips."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = (
            _Double(3, width),
            _Double(width, 2 * width),
            _Double(2 * width, 4 * width),
        )
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


def unet() -> Step:
    """A U-Net that learns to give back its input."""
    model = UNet()
    images = torch.randn(4, 3, 64, 64)
    return _step(model, torch.optim.Adam(model.parameters()), lambda: F.mse_loss(model(images), images))


class Recurrent(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self, width: int = 256, vocabulary: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss."""
        out, _ = self.lstm(self.embed(tokens))
        return F.cross_entropy(self.head(out).flatten(0, 1), tokens.flatten())


def lstm() -> Step:
    """An LSTM over 64 tokens."""
    model = Recurrent()
    tokens = torch.randint(0, 256, (64, 64))
    return _step(model, torch.optim.Adam(model.parameters()), lambda: model(tokens))


MODELS: dict[str, Callable[[], Step]] = {
    "GPT": gpt,
    "Llama": llama,
    "BERT": bert,
    "ResNet": convnet,
    "U-Net": unet,
    "LSTM": lstm,
}
