"""Copies of the model, and nothing that is kept alive (rule 9)."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .hole import WIDTH, hole, some


@hole
def saved_copied_pickled_between(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    layer = nn.Linear(WIDTH, WIDTH)
    h = F.dropout((layer(some()) @ w).tanh(), 0.1)
    held = h.exp()
    y = held.sin() * h

    def between() -> None:
        buffer = io.BytesIO()
        torch.save({"w": w, "layer": layer.state_dict(), "held": held.detach()}, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)
        twin = copy.deepcopy(layer)
        again = pickle.loads(pickle.dumps(held.detach()))
        s.record.put(
            f"copies[{s.step}]",
            loaded["w"].double().sum()
            + twin.weight.double().sum()
            + again.double().sum()
            + loaded["held"].double().sum(),
        )
        assert type(loaded["w"]) in (torch.Tensor, nn.Parameter) and type(again) is torch.Tensor

    return y.square().mean(), between


@hole
def nothing_kept_alive(step: int, w: nn.Parameter, s: SimpleNamespace) -> Any:
    """Tensors and storages die when they would have died: recording holds no Python object of the user's."""
    a = torch.randn(WIDTH, WIDTH)
    b = w + a
    c = b * 1.0
    dead = [weakref.ref(t) for t in (a, b, c)]
    loss = (c + 1).sum() + w.exp().sum()
    del a, b, c
    s.record.put(f"alive[{step}]", sum(r() is not None for r in dead))
    return loss
