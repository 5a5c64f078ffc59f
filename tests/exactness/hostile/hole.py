"""Ways that were found, or feared, to get wrong bits out of a memory manager without an error. One file a rule.

A *hole* is ``fn(step, w, s) -> loss`` or ``-> (loss, between)``: ``between`` runs after forward and before backward.  It is
called for nine steps of plain SGD on one parameter; ``s`` keeps state from step to step.  Where a hole can be switched,
it stays closed for the first four steps (``s.bad`` is false), so that its ops have earned trust (rule 8) before it opens.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from exactness.harness import CaseFunction, Record, Scope

Hole = Callable[[int, nn.Parameter, SimpleNamespace], Any]
HOLES: dict[str, CaseFunction] = {}
ERRORS: dict[str, CaseFunction] = {}
MODES = ("torture", "auto@50", "evict@50", "offload@50")

WIDTH = 64
STEPS = 9
TRUSTED_AFTER = 4


def drive(f: Hole) -> CaseFunction:
    def fn(seed: int, scope: Scope) -> Record:
        record = Record()
        w = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        s = SimpleNamespace(record=record, bad=False, step=0)
        with scope():
            for step in range(STEPS):
                s.step, s.bad = step, step >= TRUSTED_AFTER
                result = f(step, w, s)
                loss, between = result if isinstance(result, tuple) else (result, None)
                del result
                if between is not None:
                    between()
                del between
                loss.backward()
                record.losses(loss.detach())
                del loss
                record.put(f"grad[{step}]", w.grad)
                with torch.no_grad():
                    if w.grad.layout == torch.strided:
                        w -= 0.01 * w.grad
                    else:
                        w.add_(w.grad, alpha=-0.01)
                w.grad = None
        record.put("w", w)
        for key, value in vars(s).items():
            if isinstance(value, torch.Tensor | int | float):
                record.put(f"s.{key}", value)
            elif isinstance(value, torch.Generator):
                record.put(f"s.{key}", value.get_state())
        record.rng()
        return record

    return fn


def hole(f: Hole) -> Hole:
    HOLES[f.__name__] = drive(f)
    return f


def error(f: Hole) -> Hole:
    ERRORS[f.__name__] = drive(f)
    return f


def whole(f: CaseFunction) -> CaseFunction:
    """A hole that needs its own loop."""
    HOLES[f.__name__] = f
    return f


def some() -> torch.Tensor:
    return torch.randn(WIDTH, WIDTH)
