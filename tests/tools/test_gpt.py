"""The demo's model and its text."""

from __future__ import annotations

import math

import pytest
import torch

from memmgr.tools.bench.corpus import Batches, standard_library
from memmgr.tools.bench.gpt import GPT, GPTConfig
from memmgr.tools.verbs.demo import FULL

TINY = GPTConfig(layers=2, heads=2, width=32, context=16)


def test_the_demo_model_has_at_least_ten_million_parameters() -> None:
    assert GPT(GPTConfig(**FULL.sizes)).parameter_count() >= 10_000_000


def test_it_starts_knowing_nothing() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    tokens = torch.randint(256, (4, 16))
    assert model(tokens, tokens).item() == pytest.approx(math.log(256), abs=0.1)


def test_it_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    model = GPT(TINY).eval()
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :9], after[0, :9])
    assert not torch.equal(before[0, 9:], after[0, 9:])


def test_it_learns() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = Batches(standard_library(100_000), batch=8, time=16, seed=0)
    losses = []
    for _ in range(60):
        loss = model(*draw())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5


def test_the_text_is_bounded_and_the_same_on_every_call() -> None:
    text = standard_library(50_000)
    assert len(text) == 50_000
    assert text == standard_library(50_000)
    assert b"import" in text


def test_batches_are_windows_with_what_follows_them() -> None:
    text = bytes(range(200))
    tokens, targets = Batches(text, batch=4, time=8, seed=1)()
    assert tokens.shape == targets.shape == (4, 8)
    assert torch.equal(targets, tokens + 1)


def test_batches_leave_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    draw = Batches(bytes(1000), batch=4, time=8, seed=1)
    draw()
    assert torch.equal(before, torch.get_rng_state())


def test_a_python_without_sources_is_told_so(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memmgr.tools.bench.corpus.sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="sources"):
        standard_library()
