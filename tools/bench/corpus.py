"""Training text that every Python carries: the standard library's own source files.

Imports nothing of ours, for the reason that `gpt.py` gives.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def standard_library(limit_bytes: int = 4_000_000) -> bytes:
    """The standard library's top-level modules, in the order of their names, at most `limit_bytes` of them.

    The same bytes on every call of one Python; another Python version has another library. Raises `FileNotFoundError`:
    this Python came without its sources (some embedded builds).
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    if not text:
        raise FileNotFoundError(f"no Python sources in {folder}: this Python came without its standard library's text")
    return bytes(text[:limit_bytes])


class Batches:
    """Random windows of a text, drawn from a generator of its own so that the model's RNG stream stays apart.

    `text`: the bytes to draw from; longer than `time` + 1. `time`: bytes per window. `batch`: windows per draw. `seed`:
    the same seed gives the same windows. `device`: where the windows go.
    """

    def __init__(self, text: bytes, batch: int, time: int, seed: int, device: str = "cpu") -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._batch = batch
        self._time = time
        self._device = device
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self) -> tuple[Tensor, Tensor]:
        """The next tokens and their targets, both int64 (batch, time)."""
        starts = torch.randint(len(self._text) - self._time - 1, (self._batch, 1), generator=self._generator)
        windows = self._text[starts + torch.arange(self._time + 1)].long().to(self._device)
        return windows[:, :-1], windows[:, 1:]
