"""Systems that save memory: plain torch's, other packages', and memmgr by policy. Each is applied to a `Training`.

This module imports memmgr only where it is used: a process of an unmanaged training imports it, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import checkpoint as _checkpoint

from .models import Training

UNMANAGED, COMPILED = "unmanaged", "compile"
"""The references: plain torch, and its compiled model."""


class NotHere(Exception):
    """It cannot run; the text says why in a few words."""


@dataclass(frozen=True)
class System:
    """One way to train."""

    line: str  # its description
    # changes a training before its first step; raises `NotHere`
    apply: Callable[[Training], None] = lambda training: None
    policy: str = ""  # memmgr's, under a budget; empty: without memmgr
    plan: bool = True  # memmgr may make plans of measured passes
    reference: str = UNMANAGED  # the system that its time, bits and need are compared with

    @property
    def planned(self) -> bool:
        """memmgr makes plans."""
        if not (self.policy and self.plan):
            return False
        from memmgr.policies import parse_policy

        return bool(parse_policy(self.policy).planner)


def _wrap(training: Training, **options: Any) -> None:
    for block in training.blocks:
        block.forward = _recomputed(block.forward, options)


def _recomputed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: _checkpoint.checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


def _full(training: Training) -> None:
    _wrap(training)


_EXPENSIVE = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention_for_cpu",
         "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention")  # fmt: skip


def _selective(training: Training) -> None:
    """Outputs of products, convolutions and attention are kept, all else of a block is made again: the list of torch's own
    tutorial."""
    found = [getattr(torch.ops.aten, name).default for name in _EXPENSIVE if hasattr(torch.ops.aten, name)]
    _wrap(training, context_fn=lambda: _checkpoint.create_selective_checkpoint_contexts(found))


def _save_on_cpu(training: Training) -> None:
    pin = torch.get_default_device().type == "cuda"
    training.around = lambda: torch.autograd.graph.save_on_cpu(pin_memory=pin)


def _offload_activations(training: Training) -> None:
    if not torch.accelerator.is_available():
        raise NotHere("needs an accelerator: it offloads to the CPU")
    try:
        from trl.models.activation_offloading import OffloadActivations
    except ImportError:
        try:
            from torchtune.training import OffloadActivations
        except ImportError:
            raise NotHere("needs the package trl or torchtune") from None
    training.around = OffloadActivations


COMPILED_BUDGET = 0.5


def _compile(training: Training) -> None:
    import shutil

    if torch.get_default_device().type == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        raise NotHere("needs a C++ compiler")
    # A list of modules is never called: compiling it would be plain torch by another name.
    for called in training.model if isinstance(training.model, torch.nn.ModuleList) else [training.model]:
        called.compile()


def _compile_in_budget(training: Training) -> None:
    from torch._functorch import config

    config.activation_memory_budget = COMPILED_BUDGET
    _compile(training)


def _memmgr(policy: str, line: str, plan: bool = True) -> System:
    return System(line, policy=policy, plan=plan)


SYSTEMS: dict[str, System] = {
    UNMANAGED: System("plain torch"),
    "checkpoint": System("activation checkpointing of every block", _full),
    "selective": System("selective checkpointing: products, convolutions and attention are kept", _selective),
    "save_on_cpu": System("torch.autograd.graph.save_on_cpu around forward", _save_on_cpu),
    "offload_activations": System("OffloadActivations of TRL or torchtune", _offload_activations),
    COMPILED: System("torch.compile", _compile),
    "compile_budget": System(
        f"torch.compile with activation_memory_budget={COMPILED_BUDGET}", _compile_in_budget, reference=COMPILED
    ),
    "compiled": System("memmgr on the compiled model", _compile, policy="auto", reference=COMPILED),
    "auto": _memmgr("auto", "memmgr, both ways, by plan"),
    "online": _memmgr("auto", "memmgr, both ways, as it goes", plan=False),
    "evict": _memmgr("evict", "memmgr, recompute only"),
    "offload": _memmgr("offload", "memmgr, offload only"),
    "dtr": _memmgr("dtr", "memmgr with DTR"),
    "capuchin": _memmgr("capuchin", "memmgr with Capuchin's plan"),
    "delta_taco": _memmgr("delta_taco", "memmgr with DELTA's TACO"),
    "coop": _memmgr("coop", "memmgr with Coop's choice in a measured pass"),
    "vdnn": _memmgr("vdnn_all", "memmgr with vDNN's plan"),
}
"""By the name that `--systems` takes."""


@contextlib.contextmanager
def budget_of(system: System, budget_bytes: int | None, device: str) -> Iterator[Any]:
    """memmgr's budget, open, or None."""
    if not system.policy:
        yield None
        return
    import memmgr

    with memmgr.budget(
        budget_bytes, device=device, policy=system.policy, quiet=True, _plan=system.plan
    ) as managed:  # fmt: skip
        yield managed
