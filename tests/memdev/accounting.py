"""Budgets on the device beside an allocator that memmgr does not own: what the tests run in processes of their own.

memdev keeps its own allocator (memory.h), which behaves as torch's caching one. That memmgr has none for memdev is what
`MEMMGR_DRIVER`, here unset, says.
"""

from __future__ import annotations

import gc
import os
import warnings
from typing import Any

import torch

from . import Handles, managed, scenarios, start
from .managed import MODELS
from .scenarios import DEVICE

import memmgr  # isort: skip
from memmgr import _budget, _native_py  # isort: skip

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


def _left(handles: Handles) -> dict[str, int]:
    scenarios.settle()
    native = _native_py.module()
    native.forget_all()
    gc.collect()
    return {
        "live": int(handles.lib.memdev_live_bytes()),
        "page-locked": scenarios.outstanding(handles, b"host"),
        "cells": len(native.handled()),
    }


def _refuses(need: int, plain: str) -> dict[str, Any]:
    """Half of the device's memory goes to somebody whom nobody sees, in the middle of a run."""
    module: Any = torch.get_device_module(DEVICE)
    with memmgr.budget(need, device=DEVICE, quiet=True) as mm:
        native = _budget.current().native  # type: ignore[union-attr]
        refusals = []
        real = native._made_native_room

        def counted(*args: Any) -> bool:
            refusals.append(args[1])
            return bool(real(*args))

        native._made_native_room = counted
        module.set_per_process_memory_fraction(0.75 * need / module.mem_get_info()[1])
        right = scenarios._train(MODELS["gpt"], DEVICE) == plain
        del native._made_native_room
    return {"refusals": len(refusals), "right": right, "released": mm.stats()["evictions"] + mm.stats()["offloads"]}


def comes_and_goes(mode: str, seed: int) -> dict[str, Any]:
    """Budgets one after the other, on the device and on the CPU; what they say, count and leave behind."""
    handles = begin(mode, seed)
    _native_py.warned = False
    seen: dict[str, Any] = {}
    plain, cpu = (scenarios._train(MODELS["gpt"], device) for device in (DEVICE, "cpu"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with memmgr.budget(None, device=DEVICE, quiet=True) as mm:
            scenarios._train(MODELS["gpt"], DEVICE)
            seen["device native"] = type(_budget.current().native).__name__  # type: ignore[union-attr]
        need = mm.stats()["resident_bytes.peak"]
        with memmgr.budget(None, device=DEVICE, quiet=True):
            pass
    seen["said"] = [str(each.message) for each in said]
    try:
        with memmgr.budget(need // 8, device=DEVICE, quiet=True):
            scenarios._train(MODELS["gpt"], DEVICE)
    except memmgr.BudgetError as error:
        seen["error"], floor = str(error), error.floor_bytes
    gc.collect()
    for _ in range(20):
        try:
            with memmgr.budget(int(floor * 1.15), device=DEVICE, quiet=True):
                seen["at the floor"] = scenarios._train(MODELS["gpt"], DEVICE) == plain
            break
        except memmgr.BudgetError as error:
            assert error.floor_bytes > floor
            floor = error.floor_bytes
    gc.collect()
    with memmgr.budget("100MB", device="cpu", policy="torture", quiet=True):
        seen["cpu after it"] = scenarios._train(MODELS["gpt"], "cpu") == cpu
        seen["cpu native"] = _budget.current().native.__name__  # type: ignore[union-attr]
    with memmgr.budget(int(need * 0.7), device=DEVICE, quiet=True):
        seen["device again"] = scenarios._train(MODELS["gpt"], DEVICE) == plain
        moment = memmgr.manage(torch.arange(4096.0).to(DEVICE))
        outlives = (torch.ones(64, device=DEVICE) * 3).requires_grad_()
        loss = (outlives.sin() * outlives).sum()
    with memmgr.budget("100MB", device="cpu", quiet=True):
        seen["managed tensor"] = bool((moment.add(1).cpu() == torch.arange(1.0, 4097.0)).all())
    loss.backward()
    expected = torch.cos(torch.tensor(3.0)) * 3 + torch.sin(torch.tensor(3.0))
    seen["after the end"] = bool(torch.allclose(outlives.grad.cpu(), expected.expand(64)))  # type: ignore[union-attr]
    del moment, outlives, loss
    gc.collect()
    seen["refused"] = _refuses(need, plain)
    # What is there before: seen by Python, and held by a graph alone, of which no tensor is left that Python sees.
    held = torch.ones(1 << 16, device=DEVICE)
    x = torch.ones(1 << 17, device=DEVICE, requires_grad=True)
    edge = torch.autograd.graph.get_gradient_edge(x.exp().sum())
    with memmgr.budget("100MB", device=DEVICE, quiet=True) as mm:
        native = _budget.current().native  # type: ignore[union-attr]
        seen["unseen"], seen["hidden"] = native._unseen, x.nbytes
        seen["held"] = held.nbytes + x.nbytes
        seen["outside"] = native._outside - native._unseen
        torch.autograd.backward((edge,), (torch.ones((), device=DEVICE),))
        del edge
        gc.collect()
        (held * 2).requires_grad_().sum().backward()  # the end of a pass: looked at again
        seen["unseen after"] = native._unseen
    del held, x, native, mm
    seen["left"] = _left(handles)
    return seen


PROGRAMS = [name for name in managed.PROGRAMS if name != "verify"]


def programs(mode: str, seed: int) -> dict[str, Any]:
    """What programs do beside plain training (`managed`), each with and without memmgr."""
    begin(mode, seed, memory_bytes=1 << 23)
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)

    def run() -> str:
        return scenarios._train(MODELS["mlp"], DEVICE)

    out: dict[str, Any] = {}
    for name in PROGRAMS:
        program, options = managed.PROGRAMS[name]
        plain = program(run)
        with memmgr.budget("1.7MB", device=DEVICE, quiet=True, **options) as mm:
            digest = program(run)
        stats = mm.stats()
        out[name] = {"plain": plain, "managed": digest, "left": stats["evictions"] + stats["offloads"]}
        out[name]["over"] = max(0, stats["resident_bytes.peak"] - stats["budget_bytes"])
    return out
