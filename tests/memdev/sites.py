"""Trainings whose blocks have sites (allocator/core/places.h), in the orders of the device's work other than virtual time's."""

import ctypes
import functools
import os
import random
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import Handles, scenarios
from .managed import _digest, _left, _start
from .scenarios import DEVICE

import memmgr  # isort: skip
from memmgr.native import binding  # isort: skip
from memmgr.native.build import load_core  # isort: skip

PAGE_BYTES, FRAME_BYTES = 1 << 14, 1 << 12
MODEL = functools.partial(scenarios.gpt, width=32, context=32, batch=8)  # tensors of 32 to 256 KiB
SHARE = 0.6  # of the peak without a limit
STEPS = (
    14  # a plan is followed from the fourth on, and its blocks have sites from the seventh on, or under the next plan
)
FEW = 3


def _aliases(handles: Handles) -> int:
    """Mappings beyond one for each piece of memory: only the frames that sites share are mapped at several addresses."""
    return scenarios.outstanding(handles, b"maps") - scenarios.outstanding(handles, b"handles")


def _disturb(model: torch.nn.Module, seed: int) -> None:
    """Outputs of modules leave at other moments than the plan's, by both ways in turn, and their sites are free meanwhile."""
    dice, native = random.Random(seed), binding.load()
    made: list[weakref.ref[Tensor]] = []

    def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
        made.append(weakref.ref(output[0] if isinstance(output, tuple) else output))
        for _ in range(2):
            found = made[dice.randrange(len(made))]()
            if found is not None:
                native.take_away(found, dice.randrange(2))
        del made[:-64]

    for module in model.modules():
        module.register_forward_hook(hook)


def _train(handles: Handles, steps: int, mm: Any = None, disturbed: int | None = None) -> dict[str, Any]:
    """Steps of a GPT. Nothing waits for the device between them. `aliases`: after each step."""
    torch.manual_seed(0)
    model, batch, loss_of = MODEL()
    model.to(DEVICE)
    if disturbed is not None:
        _disturb(model, disturbed)
    batch = [t.to(DEVICE) for t in batch]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[Tensor] = []
    aliases: list[int] = []
    for _ in range(steps):
        with sdpa_kernel(SDPBackend.MATH):
            loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        aliases.append(_aliases(handles))
        if mm is not None:
            mm._runtime.plans.wait()
    return {"digest": _digest([*losses, *model.parameters(), *model.buffers()]), "aliases": aliases}


def trains(
    mode: str, seed: int, policies: list[str], disturbed: int | None = None, leave_out: str = ""
) -> dict[str, Any]:
    """A GPT without memmgr, without a limit, and by each policy in a share of the need, on pages that are small beside its
    tensors. `torture` makes no plans, and trains for few steps. `leave_out`: the core leaves this wait out (``MEMMGR_CORE_LIB``
    is one that can)."""
    handles = _start(mode, seed)
    handles.fake.fake_set_granularity(ctypes.c_uint64(FRAME_BYTES))
    os.environ["MEMMGR_CUDA_PAGE"] = str(PAGE_BYTES)
    out: dict[str, Any] = {
        "plain": {str(steps): _train(handles, steps)["digest"] for steps in (FEW, STEPS)},
        "runs": {},
    }
    with memmgr.budget(None, device=DEVICE, quiet=True) as mm:
        out["free"] = _train(handles, FEW)["digest"]
    limit = int(mm.stats()["resident_bytes.peak"] * SHARE)
    assert not leave_out or load_core().mm_test_leave_out(leave_out.encode()) == 0
    for policy in policies:
        steps = FEW if policy == "torture" else STEPS
        with memmgr.budget(limit, device=DEVICE, policy=policy, quiet=True) as mm:
            run = _train(handles, steps, mm, disturbed)
            run["plan errors"] = mm._runtime.plans.errors()
        run["driver_errors"] = binding.load().device_stats()["driver_errors"]
        out["runs"][policy] = {**run, **mm.stats(), "right": run["digest"] == out["plain"][str(steps)]}
    out["left"] = _left(handles)
    return out
