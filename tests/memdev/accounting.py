"""Budgets on the device beside an allocator that memmgr does not own: what the tests run in processes of their own.

memdev keeps its own allocator (memory.h), which behaves as torch's caching one. That memmgr has none for memdev is what
`MEMMGR_DRIVER`, here unset, says.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from . import Handles, scenarios, start
from .managed import MODELS
from .scenarios import DEVICE

import memmgr  # isort: skip
from memmgr import _native_py  # isort: skip

WARNING = "The budget is kept by accounting before each op instead of in the allocator"
SHARES = {"mlp": 0.8, "gpt": 0.6, "convnet": 0.65}  # of what the run needs


def begin(mode: str, seed: int, **options: Any) -> Handles:
    """The device; memmgr has no allocator for it."""
    handles = start(mode=mode, seed=seed, **options)
    os.environ.pop("MEMMGR_DRIVER", None)
    _native_py.warned = True  # `says` is about the warning
    return handles


def reserved_peak() -> int:
    """The most that the device's own allocator took, since this was asked last."""
    module: Any = torch.get_device_module(DEVICE)
    peak = int(module.max_memory_reserved())
    torch.accelerator.synchronize()
    module.empty_cache()
    module.reset_peak_memory_stats()
    return peak


def trains(mode: str, seed: int, models: list[str], policies: list[str]) -> dict[str, Any]:
    """Each model without memmgr, without a limit, and under budgets: digests and figures."""
    begin(mode, seed)
    out: dict[str, Any] = {}
    for name in models:
        reserved_peak()
        plain = scenarios._train(MODELS[name], DEVICE)
        native_need = reserved_peak()
        with memmgr.budget(None, device=DEVICE, quiet=True) as mm:
            free = scenarios._train(MODELS[name], DEVICE)
        need = mm.stats()["resident_bytes.peak"]
        runs = {}
        reserved_peak()
        for policy in policies:
            share = 1.0 if policy == "torture" else SHARES[name]
            with memmgr.budget(int(need * share), device=DEVICE, policy=policy, quiet=True) as mm:
                digest = scenarios._train(MODELS[name], DEVICE)
                peak = reserved_peak()
            runs[policy] = {"digest": digest, "reserved": peak, **mm.stats()}
        out[name] = {"plain": plain, "free": free, "need": need, "reserved": native_need, "runs": runs}
    module: Any = torch.get_device_module(DEVICE)
    out["share"] = module.get_per_process_memory_fraction()
    return out
