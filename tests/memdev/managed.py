"""What the tests of budgets on the device run in processes of their own (see child.py)."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
from typing import Any

import torch
from torch import Tensor

from . import Handles, scenarios, start
from .scenarios import DEVICE

import memmgr  # isort: skip
from memmgr import _shim  # isort: skip

SHARES = (0.75, 0.55)
POLICIES = ("auto", "evict", "offload", "torture")


def _start(mode: str, seed: int, **options: Any) -> Handles:
    handles = start(mode=mode, seed=seed, **options)
    os.environ["MEMMGR_DRIVER"] = str(handles.driver_path)
    return handles


def _wide_mlp() -> scenarios.Case:
    model = torch.nn.Sequential(
        *(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.LayerNorm(128), torch.nn.Dropout(0.1)),
        *(torch.nn.Linear(128, 128), torch.nn.GELU(), torch.nn.Linear(128, 10)),
    )
    batch = [torch.randn(512, 32), torch.randint(10, (512,))]
    return model, batch, lambda m, x, y: torch.nn.functional.cross_entropy(m(x), y)


def _gpt() -> scenarios.Case:
    config = scenarios.models._gpt.GPTConfig(layers=2, heads=2, width=32, context=32, dropout=0.1)
    tokens, targets = torch.randint(256, (8, 32)), torch.randint(256, (8, 32))
    return scenarios.models._gpt.GPT(config), [tokens, targets], lambda m, x, y: m(x, y)


def _convnet() -> scenarios.Case:
    images, labels = torch.randn(16, 3, 16, 16), torch.randint(10, (16,))
    return scenarios.models._convnet.ConvNet(width=8, stages=2, blocks=1), [images, labels], lambda m, x, y: m(x, y)


MODELS = {"mlp": _wide_mlp, "gpt": _gpt, "convnet": _convnet}


def trains(mode: str, seed: int, models: list[str], policies: list[str]) -> dict[str, Any]:
    """Each model without memmgr, without a limit, and under budgets: digests and figures."""
    _start(mode, seed)
    out: dict[str, Any] = {}
    for name in models:
        plain = scenarios._train(MODELS[name], DEVICE)
        with memmgr.budget(None, device=DEVICE, quiet=True) as mm:
            free = scenarios._train(MODELS[name], DEVICE)
        need = mm.stats()["resident_bytes.peak"]
        runs = {}
        for share in SHARES:
            for policy in policies:
                with memmgr.budget(int(need * share), device=DEVICE, policy=policy, quiet=True) as mm:
                    digest = scenarios._train(MODELS[name], DEVICE)
                runs[f"{policy} {share}"] = {"digest": digest, **mm.stats()}
        out[name] = {"plain": plain, "free": free, "need": need, "runs": runs}
    return out


def _digest(tensors: list[Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def two_streams(mode: str, seed: int, limit: int | None, leave_out: str = "") -> dict[str, Any]:
    """A saved tensor is read on a second stream, let go of by the program, and its memory wanted on the first."""
    _start(mode, seed)
    torch.manual_seed(0)
    n = 16384
    x, w, v = (torch.randn(n).to(DEVICE) for _ in range(3))
    w.requires_grad_()
    v.requires_grad_()
    main, side = torch.accelerator.current_stream(), torch.Stream(DEVICE)
    context = (
        contextlib.nullcontext() if limit is None else memmgr.budget(limit, device=DEVICE, policy="torture", quiet=True)
    )
    losses = []
    with context as mm:
        if leave_out:
            _shim.load().leave_out(leave_out)
        for _ in range(3):
            h = (x * w).sin()
            side.wait_stream(main)
            with side:
                b = torch.dot(h, w)  # its result is small: nothing else of this stream is where the first one allocates
            del h
            held = [v * (i + 2) for i in range(6)]  # more than there were free blocks: the one of h is among theirs
            main.wait_stream(side)
            loss = sum(held, v).sum() + b
            del held, b
            loss.backward()
            losses.append(loss.item())
        del loss
        grads = _digest([w.grad, v.grad])  # type: ignore[list-item]
    return {"grads": grads, "losses": losses, "stats": {} if limit is None else mm.stats()}


def remade_elsewhere(mode: str, seed: int, limit: int | None, leave_out: str = "") -> dict[str, Any]:
    """What backward makes again on one stream is read on the other one right after."""
    _start(mode, seed)
    torch.manual_seed(0)
    n = 16384
    x, w = (torch.randn(n).to(DEVICE) for _ in range(2))
    w.requires_grad_()
    main, side = torch.accelerator.current_stream(), torch.Stream(DEVICE)
    context = (
        contextlib.nullcontext() if limit is None else memmgr.budget(limit, device=DEVICE, policy="evict", quiet=True)
    )
    losses = []
    with context as mm:
        if leave_out:
            _shim.load().leave_out(leave_out)
        for _ in range(3):
            h = (x * w).sin()
            a = h.cos()  # saves h; its backward runs on the first stream
            side.wait_stream(main)
            with side:
                b = torch.dot(h, h)  # saves h too; its backward runs on the second, and before the other one
            main.wait_stream(side)
            del h
            held = [a * (i + 2) for i in range(8)]
            loss = sum(held, a).sum() + b
            del held, a, b
            loss.backward()
            losses.append(loss.item())
        del loss
        grads = _digest([w.grad])  # type: ignore[list-item]
    return {"grads": grads, "losses": losses, "stats": {} if limit is None else mm.stats()}


def freed_elsewhere(mode: str, seed: int, limit: int | None, leave_out: str = "") -> dict[str, Any]:
    """Backward reads a saved tensor on the second stream and lets go of it; the first one takes its memory."""
    _start(mode, seed)
    torch.manual_seed(0)
    n = 16384
    x, w, v = (torch.randn(n).to(DEVICE) for _ in range(3))
    w.requires_grad_()
    v.requires_grad_()
    main, side = torch.accelerator.current_stream(), torch.Stream(DEVICE)
    context = contextlib.nullcontext() if limit is None else memmgr.budget(limit, device=DEVICE, quiet=True)
    losses = []
    with context as mm:
        if leave_out:
            _shim.load().leave_out(leave_out)
        for _ in range(3):
            y = v
            for _ in range(6):
                y = (y * 1.01).tanh()
            g = x * w
            side.wait_stream(main)
            with side:
                b = torch.dot(g, w)
            main.wait_stream(side)
            del g
            loss = y.sum() + b
            del y, b
            loss.backward()
            losses.append(loss.item())
        del loss
        grads = _digest([w.grad, v.grad])  # type: ignore[list-item]
    return {"grads": grads, "losses": losses, "stats": {} if limit is None else mm.stats()}


def comes_and_goes(mode: str, seed: int) -> dict[str, Any]:
    """Budgets one after the other, on the device and on the CPU; errors; what is left behind."""
    handles = _start(mode, seed)
    seen: dict[str, Any] = {}
    plain = scenarios._train(MODELS["mlp"], DEVICE)
    cpu = scenarios._train(MODELS["mlp"], "cpu")
    with memmgr.budget(None, device=DEVICE, quiet=True) as mm:
        scenarios._train(MODELS["mlp"], DEVICE)
    need = mm.stats()["resident_bytes.peak"]
    seen["default device"] = str(memmgr.budget("1GB", quiet=True)._device)
    try:
        with memmgr.budget(need // 8, quiet=True):
            scenarios._train(MODELS["mlp"], DEVICE)
    except memmgr.BudgetError as error:
        seen["error"] = str(error).splitlines()[0]
        seen["error floor"] = error.floor_bytes
    gc.collect()
    with memmgr.budget(need, device="cpu", quiet=True) as mm:
        seen["cpu after it"] = scenarios._train(MODELS["mlp"], "cpu") == cpu
    seen["cpu peak"] = mm.stats()["resident_bytes.peak"]
    with memmgr.budget(int(need * 0.6), device=DEVICE, quiet=True) as mm:
        seen["device again"] = scenarios._train(MODELS["mlp"], DEVICE) == plain
        outlives = (torch.ones(64, device=DEVICE) * 3).requires_grad_()
        loss = (outlives.sin() * outlives).sum()
    loss.backward()
    expected = torch.cos(torch.tensor(3.0)) * 3 + torch.sin(torch.tensor(3.0))
    seen["after the end"] = bool(torch.allclose(outlives.grad.cpu(), expected.expand(64)))  # type: ignore[union-attr]
    seen["need"], seen["peak"] = need, mm.stats()["resident_bytes.peak"]
    del outlives, loss
    gc.collect()
    native = _shim.load()
    seen["left"] = sum(state == 1 for _, _, state in native.arena_blocks())
    seen["driver errors"] = native.device_stats()["driver_errors"]
    seen["illegal"] = handles.fake.fake_illegal_uses() if hasattr(handles.fake, "fake_illegal_uses") else 0
    return seen


def two_devices(mode: str, seed: int) -> dict[str, Any]:
    """The budget is about one device; tensors of another one are none of its business."""
    _start(mode, seed, devices=2)
    torch.manual_seed(0)
    here, there = (torch.randn(256, 64).to(f"{DEVICE}:{i}") for i in range(2))
    out: dict[str, Any] = {}
    for managed in (False, True):
        context = (
            memmgr.budget(400_000, device=f"{DEVICE}:0", policy="torture", quiet=True)
            if managed
            else contextlib.nullcontext()
        )
        with context as mm:
            x = here.clone().requires_grad_()
            y = there.clone().requires_grad_()
            with torch.accelerator.device_index(1):
                other = (y.sin() * y).tanh().sum()
            one = (x.sin() * x).tanh().sum()
            one.backward()
            with torch.accelerator.device_index(1):
                other.backward()
        out["managed" if managed else "plain"] = _digest([x.grad, y.grad])  # type: ignore[list-item]
    out["evictions"] = mm.stats()["evictions"] + mm.stats()["offloads"]
    return out
