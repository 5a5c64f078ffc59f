"""Scenarios of the tests of budgets on the device, each in a process of its own (see child.py)."""

import contextlib
import ctypes
import functools
import gc
import hashlib
import os
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from threads import in_threads
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from . import Handles, scenarios, start
from .scenarios import DEVICE

import memmgr  # isort: skip
from memmgr.native.build import load_core  # isort: skip
from memmgr.native import binding  # isort: skip
from memmgr.runtime.plans import Plans  # isort: skip

SHARES = {"mlp": (0.85, 0.75), "gpt": (0.75, 0.6), "convnet": (0.75, 0.62)}  # of the peak without a limit
SCRIBBLED = 64  # allocator/pager/pools/stream_rules.h
POLICIES = ("auto", "evict", "offload", "torture")


def _start(mode: str, seed: int, **options: Any) -> Handles:
    handles = start(mode=mode, seed=seed, **options)
    # As much as is asked for, at once, and untouched: the same calls in each run, and no gigabyte of this machine.
    load_core().mm_test_lock_pieces(ctypes.c_uint64(1 << 40), ctypes.c_uint64(0), 0)
    os.environ["MEMMGR_DRIVER"] = str(handles.driver_path)
    return handles


def _wide_mlp() -> scenarios.Case:
    model = torch.nn.Sequential(
        *(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.LayerNorm(128), torch.nn.Dropout(0.1)),
        *(torch.nn.Linear(128, 128), torch.nn.GELU(), torch.nn.Linear(128, 10)),
    )
    batch = [torch.randn(512, 32), torch.randint(10, (512,))]
    return model, batch, lambda m, x, y: torch.nn.functional.cross_entropy(m(x), y)


MODELS = {
    "mlp": _wide_mlp,
    "gpt": functools.partial(scenarios.gpt, width=32, context=32, batch=8),
    "convnet": functools.partial(scenarios.convnet, width=8, batch=16),
}


def trains(
    mode: str,
    seed: int,
    models: list[str],
    policies: list[str],
    piece: int = 0,
    loose: list[str] | None = None,
    fewer: dict[str, list[str]] | None = None,
) -> dict[str, Any]:
    """Each model without memmgr, without a limit, and under budgets: digests and figures. `piece`: bytes of host memory
    that are page-locked at a time. `loose`: the policies of the larger budget, where they are others. `fewer`: the policies of
    the smaller budget of a model, where they are others."""
    handles = _start(mode, seed)
    if piece:
        load_core().mm_test_lock_pieces(ctypes.c_uint64(piece // 8), ctypes.c_uint64(piece), 1)
    out: dict[str, Any] = {}
    for name in models:
        plain = scenarios._train(MODELS[name], DEVICE)
        with memmgr.budget(None, device=DEVICE, quiet=True) as mm:
            free = scenarios._train(MODELS[name], DEVICE)
        need = mm.stats()["resident_bytes.peak"]
        runs = {}
        tight = (fewer or {}).get(name, policies)
        for share, those in zip(SHARES[name], (policies if loose is None else loose, tight), strict=True):
            for policy in those:
                with memmgr.budget(int(need * share), device=DEVICE, policy=policy, quiet=True) as mm:
                    digest = scenarios._train(MODELS[name], DEVICE)
                    locked = [scenarios.outstanding(handles, what) for what in (b"host", b"host bytes")]
                errors = binding.load().device_stats()["driver_errors"]
                runs[f"{policy} {share}"] = {"digest": digest, "driver_errors": errors, "locked": locked, **mm.stats()}
        out[name] = {"plain": plain, "free": free, "need": need, "runs": runs}
    out["left"] = _left(handles)
    return out


def _digest(tensors: list[Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def _left(handles: Handles) -> dict[str, int]:
    """Remains of budgets: blocks, cells, page-locked memory, events that are not kept for reuse."""
    scenarios.settle()
    native = binding.load()
    native.drain()
    return {
        "bytes": native.arena_stats()["live_bytes"],
        "cells": len(native.cells()),
        "page-locked": scenarios.page_locked(handles),
        "events": max(0, scenarios.outstanding(handles, b"events") - 42),  # so many are kept, for reuse
        "driver errors": native.device_stats()["driver_errors"],
    }


def comes_and_goes(mode: str, seed: int) -> dict[str, Any]:
    """Budgets one after the other, on the device and on the CPU; errors; remains."""
    handles = _start(mode, seed)
    seen: dict[str, Any] = {}
    plain = scenarios._train(MODELS["mlp"], DEVICE)
    cpu = scenarios._train(MODELS["mlp"], "cpu")
    with memmgr.budget(None, device="cpu", quiet=True) as mm:
        scenarios._train(MODELS["mlp"], "cpu")
        grows_on_cpu = torch.ones(64)
    need_cpu = mm.stats()["resident_bytes.peak"]
    with memmgr.budget(None, device=DEVICE, quiet=True) as mm:
        scenarios._train(MODELS["mlp"], DEVICE)
    need = mm.stats()["resident_bytes.peak"]
    seen["default device"] = str(memmgr.budget("1GB", quiet=True)._device)
    try:
        with memmgr.budget(need // 8, quiet=True):
            scenarios._train(MODELS["mlp"], DEVICE)
    except memmgr.BudgetError as error:
        seen["error"], seen["error floor"] = str(error), error.floor_bytes
        floor = error.floor_bytes
    kept: list[torch.Tensor] = []
    try:
        with memmgr.budget("4MiB", policy="offload", host="1MiB", quiet=True):
            kept.extend(torch.ones(1 << 18, device=DEVICE) for _ in range(8))
    except memmgr.BudgetError as error:
        seen["full host"] = str(error)
    kept.clear()
    gc.collect()
    # The error names the floor so far: budgets of the floors that it names end at one that works.
    for tries in range(20):
        try:
            with memmgr.budget(int(floor * 1.1), quiet=True) as mm:
                seen["at the floor"] = scenarios._train(MODELS["mlp"], DEVICE) == plain
            seen["tries"], seen["floor"], seen["floor budget"] = tries, mm.stats()["floor_bytes"], int(floor * 1.1)
            break
        except memmgr.BudgetError as error:
            assert error.floor_bytes > floor
            floor = error.floor_bytes
    with memmgr.budget(int(need_cpu * 0.7), device="cpu", quiet=True) as mm:
        seen["cpu after it"] = scenarios._train(MODELS["mlp"], "cpu") == cpu
    seen["cpu peak"] = mm.stats()["resident_bytes.peak"] / mm.stats()["budget_bytes"]
    with memmgr.budget(int(need * 0.7), device=DEVICE, quiet=True) as mm:
        before = (
            binding.load().resident()
        )  # a storage remembers the allocator of its first bytes: here another budget's
        grows_on_cpu.resize_(1 << 16)
        seen["grown on the CPU"] = binding.load().resident() - before
        seen["device again"] = scenarios._train(MODELS["mlp"], DEVICE) == plain
        outlives = (torch.ones(64, device=DEVICE) * 3).requires_grad_()
        loss = (outlives.sin() * outlives).sum()
    loss.backward()
    expected = torch.cos(torch.tensor(3.0)) * 3 + torch.sin(torch.tensor(3.0))
    seen["after the end"] = bool(torch.allclose(outlives.grad.cpu(), expected.expand(64)))  # type: ignore[union-attr]
    seen["need"], seen["peak"] = need, mm.stats()["resident_bytes.peak"]
    del outlives, loss
    seen["left"] = _left(handles)
    return seen


def checksums(mode: str, seed: int, refused: bool) -> dict[str, Any]:
    """Driver calls of a determinism check and a checksum, with the core's kernels and where the driver refuses them."""
    handles = _start(mode, seed)
    names = ("cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize", "pageable bytes", "cuLaunchKernel")
    count = handles.fake.fake_call_count
    count.restype = ctypes.c_uint64
    if refused:
        handles.fake.fake_fail_next(b"cuModuleLoadData", 0, 222)

    def calls(act: Callable[[], Any]) -> dict[str, int]:
        before = [count(name.encode()) for name in names]
        act()
        return {name: count(name.encode()) - was for name, was in zip(names, before, strict=True)}

    plain = scenarios._train(MODELS["gpt"], DEVICE)
    with memmgr.budget(None, device=DEVICE, quiet=True) as mm:
        scenarios._train(MODELS["gpt"], DEVICE)
    out: dict[str, Any] = {}
    with memmgr.budget("64MB", device=DEVICE, quiet=True, host="8MB", verify=True, _plan=False) as opened:
        native = binding.load()
        x = torch.randn(1 << 18).to(DEVICE).requires_grad_()
        made: list[Tensor] = []
        out["trial"] = calls(lambda: made.append(x.sin()))
        out["trials"] = opened.stats()["trials"]
        torch.accelerator.synchronize()
        want = _digest(made)
        h = x.sin()
        out["leaves"] = calls(lambda: native.take_away(h, 1))
        out["left"] = opened.stats()["offloads"]
        out["returns"] = calls(lambda: made.append(h.detach() * 1))
        out["right"] = _digest([made[-1]]) == want
        del x, h, made
    # The first eviction of a budget is in the sample.
    for reads in (lambda h: h[0].item(), lambda h: h.cpu(), lambda h: None):
        told = []
        try:
            with memmgr.budget("64MB", device=DEVICE, quiet=True, host="8MB", _plan=False):
                h = torch.ones(1 << 18).to(DEVICE) * 2
                native.take_away(h, 1)
                handles.fake.fake_spoil_next_copy()
                out["sampled"] = calls(lambda h=h: h.mul_(1))  # type: ignore[misc]
                try:
                    reads(h)
                except memmgr.RecomputeError as error:
                    told.append(("in it", str(error)))
        except memmgr.RecomputeError as error:
            told.append(("at its end", str(error)))
        out.setdefault("told", []).append(told)
        del h
    limit = int(mm.stats()["resident_bytes.peak"] * SHARES["gpt"][-1])
    with memmgr.budget(limit, device=DEVICE, policy="torture", verify=True, quiet=True) as mm:
        digests: list[str] = []
        out["training"] = calls(lambda: digests.append(scenarios._train(MODELS["gpt"], DEVICE)))
    out["training right"] = digests == [plain]
    out["after it"] = _left(handles)
    return out


def gaps(mode: str, seed: int, refused: bool) -> dict[str, Any]:
    """An op that leaves half of its result as the memory was; `refused`: the driver refuses the core's kernels."""
    handles = _start(mode, seed)
    handles.lib.memdev_set_poison(0)  # new memory is as it was left, as on a GPU
    if refused:
        handles.fake.fake_fail_next(b"cuModuleLoadData", 0, 222)

    def writes_half(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out[: len(x) // 2] = x[: len(x) // 2]
        return out

    def junk_in_free_memory(value: int) -> None:
        junk = [torch.full((1 << 18,), value + i, dtype=torch.int32, device=DEVICE) for i in range(6)]
        del junk

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it replaces the device's own
        library.impl("erfinv", writes_half, "PrivateUse1")
    out: dict[str, Any] = {}
    with memmgr.budget("64MB", device=DEVICE, policy="evict", quiet=True, _plan=False) as mm:
        native = binding.load()
        x = torch.randn(1 << 18).to(DEVICE).requires_grad_()
        junk_in_free_memory(7)
        y = x.erfinv()
        before = y.detach().cpu()
        out["right"] = torch.equal(before[: 1 << 17], x.detach().cpu()[: 1 << 17])
        out["zeros"] = not before[1 << 17 :].view(torch.int32).any().item()
        out["left"] = native.take_away(y, 0) / y.nbytes
        junk_in_free_memory(70)
        out["same"] = torch.equal(y.detach().cpu().view(torch.int32), before.view(torch.int32))
        out["refused kinds"] = mm.stats()["refused_kinds"]
        graph: Any = torch.get_device_module(DEVICE).Graph()
        graph.capture_begin()
        z = x.erfinv()
        graph.capture_end()
        graph.replay()
        out["captured"] = torch.equal(z.detach().cpu()[: 1 << 17], x.detach().cpu()[: 1 << 17])
        del x, y, z, graph
    return out


def three_tiers(mode: str, seed: int, folder: str) -> dict[str, Any]:
    """Host memory for a part of the cells that are offloaded, and a file for the rest."""
    handles = _start(mode, seed)
    plain = scenarios._train(MODELS["gpt"], DEVICE)
    with memmgr.budget(None, device=DEVICE, quiet=True) as mm:
        scenarios._train(MODELS["gpt"], DEVICE)
    need, host = mm.stats()["resident_bytes.peak"], 1 << 20
    out: dict[str, Any] = {"plain": plain, "need": need, "host": host}
    for policy in ("offload", "auto", "torture"):
        limit = int(need * SHARES["gpt"][-1])
        with memmgr.budget(limit, device=DEVICE, policy=policy, quiet=True, host=host, disk=folder) as mm:
            digest = scenarios._train(MODELS["gpt"], DEVICE)
            locked = scenarios.page_locked(handles)
        out[policy] = {"digest": digest, "ranges": locked, **mm.stats()}
    torch.get_device_module(DEVICE).get_device_properties = lambda _: types.SimpleNamespace(is_integrated=True)
    limit = need // 2
    for name, options in (("asked", {"host": host}), ("usual", {}), ("file", {"disk": folder})):
        try:
            with memmgr.budget(limit, device=DEVICE, policy="offload", quiet=True, **options) as mm:
                digest = scenarios._train(MODELS["gpt"], DEVICE)
            out[f"integrated {name}"] = {"digest": digest, **mm.stats()}
        except (ValueError, memmgr.BudgetError) as error:
            out[f"integrated {name}"] = {"error": f"{type(error).__name__}: {error}"}
    out["left"] = _left(handles)
    return out


def two_devices(mode: str, seed: int) -> dict[str, Any]:
    """The budget is about one device; tensors of another one are none of its business."""
    handles = _start(mode, seed, devices=2)
    torch.manual_seed(0)
    here, there = (torch.randn(256, 64).to(f"{DEVICE}:{i}") for i in range(2))
    out: dict[str, Any] = {}
    for managed in (False, True):
        context = (
            memmgr.budget(420_000, device=f"{DEVICE}:0", policy="torture", quiet=True)
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
        del x, y, one, other
    out["evictions"], out["outside"] = mm.stats()["evictions"] + mm.stats()["offloads"], mm.stats()["outside_bytes"]
    out["of this device"] = here.nbytes
    # Every cell is restored on its own device, whichever is current when the budget closes.
    with torch.accelerator.device_index(1):
        with memmgr.budget(1 << 20, device=f"{DEVICE}:0", policy="offload", quiet=True):
            x = here.clone().requires_grad_()
            sine = x.sin()
            loss = (sine * x).sum()
            out["left the device"] = binding.load().take_away(sine, 1)
        out["comes back to"] = str(sine.device)
        del sine
    # Budgets of both, one after the other.
    with memmgr.budget(None, device=f"{DEVICE}:1", quiet=True) as mm:
        y = there.clone().requires_grad_()
        (y.sin() * y).sum().backward()
    out["second"], out["second outside"] = mm.stats()["resident_bytes.peak"], mm.stats()["outside_bytes"]
    loss.backward()
    out["first after it"] = _digest([x.grad]) == _digest([y.grad]) or bool(x.grad.isfinite().all())
    with memmgr.budget(None, device=f"{DEVICE}:0", quiet=True):
        del x, y, loss
    out["left"] = _left(handles)
    return out


class _Mistake(Exception):
    pass


def _fails_in_forward(run: Callable[[], str]) -> str:
    """A step that ends in the middle of its forward; then training as if nothing had been."""
    x = torch.randn(256, 64).to(DEVICE).requires_grad_()
    try:
        h = x.sin().cos()
        h = (h * x).tanh()
        raise _Mistake
    except _Mistake:
        pass
    return run()


def _fails_in_backward(run: Callable[[], str]) -> str:
    x = torch.randn(256, 64).to(DEVICE).requires_grad_()
    h = x.sin()

    def fail(grad: Tensor) -> None:
        raise _Mistake

    h.register_hook(fail)
    try:
        (h.cos() * x).tanh().sum().backward()
    except _Mistake:
        pass
    return run()


def _second_derivatives(run: Callable[[], str]) -> str:
    torch.manual_seed(1)
    x, w = torch.randn(128, 64).to(DEVICE).requires_grad_(), torch.randn(64, 64).to(DEVICE).requires_grad_()
    found = []
    for _ in range(3):
        y = torch.tanh(x @ w).sin().sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        (g.square().sum() + y).backward()
        found += [x.grad.clone(), w.grad.clone()]  # type: ignore[union-attr]
    return _digest(found)


def _checkpointed(run: Callable[[], str]) -> str:
    torch.manual_seed(2)
    block = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.2), torch.nn.GELU()).to(DEVICE)
    x = torch.randn(256, 64).to(DEVICE)
    found: list[Tensor] = []
    for reentrant in (False, True):
        for _ in range(2):
            y = x.clone().requires_grad_()
            h = checkpoint(block, y, use_reentrant=reentrant)
            block(checkpoint(block, h, use_reentrant=reentrant)).sum().backward()
            found.append(y.grad)  # type: ignore[arg-type]
    return _digest([*found, *(p.grad for p in block.parameters())])  # type: ignore[list-item]


def _managed_tensors(run: Callable[[], str]) -> str:
    torch.manual_seed(3)
    moment, grad = torch.randn(4096).to(DEVICE), torch.randn(4096).to(DEVICE)
    moment = memmgr.manage(moment.clone())
    found = []
    for step in range(4):
        moment.mul_(0.9).add_(grad * step)
        found.append((moment * 2).cpu())
    return _digest([*found, moment.to_tensor()])


def _two_threads(run: Callable[[], str]) -> str:
    """Each trains a model of its own on a stream of its own."""
    made: dict[int, list[Tensor]] = {}
    torch.manual_seed(4)
    inputs = [(torch.randn(128, 32), torch.randn(32, 64), torch.randn(64, 8)) for _ in range(2)]

    def work(number: int) -> None:
        with torch.Stream(DEVICE):
            x, a, b = (t.to(DEVICE) for t in inputs[number])
            a.requires_grad_()
            b.requires_grad_()
            for _ in range(4):
                loss = ((x @ a).sin().tanh() @ b).square().mean()
                ga, gb = torch.autograd.grad(loss, (a, b))
                with torch.no_grad():
                    a.sub_(ga, alpha=0.1)
                    b.sub_(gb, alpha=0.1)
            made[number] = [a.detach().cpu(), b.detach().cpu()]

    in_threads(work, range(2))
    return _digest([*made[0], *made[1]])


def _two_streams(run: Callable[[], str]) -> str:
    """Forward on two streams, so that autograd records a gradient's streams with the allocator by its address; and a program
    that records streams of absent tensors itself."""
    torch.manual_seed(6)
    side, main = torch.Stream(DEVICE), torch.accelerator.current_stream()
    w, v = (torch.randn(1 << 13).to(DEVICE).requires_grad_() for _ in range(2))
    found: list[Tensor] = []
    for _ in range(3):
        side.wait_stream(main)
        with side:
            a = w.sin()
        main.wait_stream(side)
        a.record_stream(main)
        (a * v.cos()).tanh().sum().backward()
        found += [w.grad.clone(), v.grad.clone()]  # type: ignore[union-attr]
        w.grad = v.grad = None
    return _digest(found)


def _forks(run: Callable[[], str]) -> str:
    """A forked child drops its tensors on the device; then training goes on."""
    torch.manual_seed(5)
    x = torch.randn(256, 64).to(DEVICE).requires_grad_()
    loss = ((x.sin() * x).tanh() * x).sum()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of fork beside threads
        child = os.fork()
    if child == 0:
        del loss
        gc.collect()
        os._exit(int((torch.ones(8) * 2).sum().item()) - 16)
    loss.backward()
    return f"{os.waitpid(child, 0)[1]} {_digest([x.grad])} {run()}"  # type: ignore[list-item]


def _just_trains(run: Callable[[], str]) -> str:
    return run()


PROGRAMS: dict[str, tuple[Callable[[Callable[[], str]], str], dict[str, Any]]] = {
    "an exception in forward": (_fails_in_forward, {}),
    "an exception in backward": (_fails_in_backward, {}),
    "second derivatives": (_second_derivatives, {"policy": "torture"}),
    "checkpoint": (_checkpointed, {"policy": "torture"}),
    "managed tensors": (_managed_tensors, {}),
    "a fork": (_forks, {"policy": "torture"}),
    "two streams": (_two_streams, {"policy": "torture"}),
    "two threads": (_two_threads, {"policy": "torture"}),
    "verify": (_just_trains, {"verify": True, "policy": "torture"}),
}


def programs(mode: str, seed: int) -> dict[str, Any]:
    """Programs other than plain training, each with and without memmgr; and ways to give a budget."""
    handles = _start(mode, seed, memory_bytes=1 << 23)
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)

    def run() -> str:
        return scenarios._train(MODELS["mlp"], DEVICE)

    out: dict[str, Any] = {}
    for name, (program, options) in PROGRAMS.items():
        plain = program(run)
        with memmgr.budget("1.6MB", device=DEVICE, quiet=True, **options) as mm:
            managed = program(run)
        stats = mm.stats()
        out[name] = {"plain": plain, "managed": managed, "left": stats["evictions"] + stats["offloads"]}
        out[name]["over"] = max(0, stats["resident_bytes.peak"] - stats["budget_bytes"])
    # Memory that is allocated already counts, and a share is one of the device's memory.
    held = torch.ones(1 << 17, device=DEVICE)
    with memmgr.budget("25%", device=DEVICE, quiet=True) as mm:
        digest = run()
    out["share"] = {"budget": mm.stats()["budget_bytes"], "outside": mm.stats()["outside_bytes"], "held": held.nbytes}
    out["share"] |= {"peak": mm.stats()["resident_bytes.peak"], "right": digest == out["verify"]["plain"]}
    del held
    out["left"] = _left(handles)
    return out


def lengths(mode: str, seed: int) -> dict[str, Any]:
    """Batches of other lengths in every step, more than kinds of a family are tried."""
    handles = _start(mode, seed)

    def train() -> str:
        torch.manual_seed(0)
        lengths = [300, 600, *(300 + 7 * ((11 * i) % 43) for i in range(43))]
        model = torch.nn.Sequential(
            *(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.LayerNorm(128), torch.nn.Dropout(0.1)),
            *(torch.nn.Linear(128, 64), torch.nn.GELU(), torch.nn.Linear(64, 10)),
        ).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for n in lengths:
            x, y = torch.randn(n, 32).to(DEVICE), torch.randint(10, (n,)).to(DEVICE)
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return _digest(list(model.parameters()))

    out: dict[str, Any] = {"plain": train()}
    with memmgr.budget(None, device=DEVICE, quiet=True) as mm:
        train()
    need = mm.stats()["resident_bytes.peak"]
    for policy in POLICIES:
        # Without a tier the floor is that of recomputing, which depends on the order in which cells left.
        share = 0.9 if policy == "evict" else 0.7
        with memmgr.budget(int(share * need), device=DEVICE, policy=policy, quiet=True) as mm:
            digest = train()
        out[policy] = {"digest": digest, **mm.stats()}
    out["left"] = _left(handles)
    return out


def device_times(mode: str, seed: int) -> dict[str, Any]:
    """The seconds that the timeline has for the products of a backward, each of which the device computes for long."""
    _start(mode, seed)
    width = 768
    weights = [torch.nn.Parameter(torch.eye(width).to(DEVICE)) for _ in range(4)]
    noted: dict[str, list[float]] = {}

    def train(steps: int) -> None:
        for _ in range(steps):
            x = torch.ones(width, width).to(DEVICE)
            for weight in weights:
                x = torch.sin(x @ weight)
            x.sum().backward()
            for weight in weights:
                weight.grad = None

    with memmgr.budget(None, device=DEVICE, quiet=True) as mm:
        train(1)
    need = mm.stats()["resident_bytes.peak"]
    period_ended = Plans.period_ended

    def look(plans: Plans, ended: Any) -> None:
        columns = binding.load().timeline()
        names = [columns["names"][i] for i in np.frombuffer(columns["op"], dtype=np.int32)]
        seconds = np.frombuffer(columns["seconds"], dtype=np.float32).tolist()
        pairs = list(zip(names, seconds, strict=True))[columns["turn"] :]
        noted["mm"] = [took for name, took in pairs if name == "aten::mm"]
        period_ended(plans, ended)

    Plans.period_ended = look  # type: ignore[method-assign]
    with memmgr.budget(int(0.7 * need), device=DEVICE, quiet=True):
        train(6)
    return noted


def queued_before(mode: str, seed: int) -> dict[str, Any]:
    """A side stream has still to write to a tensor when a budget opens, and the tensor is offloaded at once. An earlier budget
    has made it, so that it is the pool's."""
    _start(mode, seed)
    options: dict[str, Any] = {"device": DEVICE, "quiet": True, "host": "16MB", "verify": False}
    with memmgr.budget("16MB", **options):
        x = torch.zeros(1 << 16).to(DEVICE)
    given, side = torch.full((1 << 16,), 5.0).to(DEVICE), torch.Stream(DEVICE)
    torch.accelerator.synchronize()
    with side:
        x.copy_(given)
    with memmgr.budget("16MB", **options):
        left = binding.load().take_away(x, 1)
        torch.accelerator.current_stream().wait_stream(side)
        return {"left": left, "found": x.cpu().unique().tolist()}


def by_chance(mode: str, seed: int) -> dict[str, Any]:
    """Which results have a recipe, without and with deterministic algorithms."""
    _start(mode, seed)
    out: dict[str, Any] = {}
    made = (
        torch.randn(1 << 14),
        torch.randint(1 << 14, (1 << 14,)),
        torch.randn(2, 4, 32, 32),
        torch.randn(4, 4, 3, 3),
    )
    acts: dict[str, Callable[[], Tensor]] = {
        "sin": lambda: x.sin(),
        "convolution": lambda: torch.conv2d(image, kernel),
        "index_add": lambda: torch.zeros_like(x).index_add(0, where, x),
        "scatter_add": lambda: torch.zeros_like(x).scatter_add(0, where, x),
        "transposed convolution": lambda: torch.conv_transpose2d(image, kernel),
    }
    native = binding.load()
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        with memmgr.budget("8MB", device=DEVICE, quiet=True):
            x, where, image, kernel = (t.to(DEVICE) for t in made)
            x.requires_grad_()
            for name, act in acts.items():
                out[f"{name}, {deterministic}"] = native.describe(act())["recipe"]
    torch.use_deterministic_algorithms(False)
    return out


def unwound(mode: str, seed: int) -> dict[str, Any]:
    """A budget ends by an exception. The cells that its graph needs are restored when they are read, on any stream, or when
    a budget on another device opens."""
    handles = _start(mode, seed)
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    torch.manual_seed(0)
    x = torch.randn(1 << 14).to(DEVICE)

    def forward() -> tuple[Tensor, Tensor]:
        w = x.clone().requires_grad_()
        h = w
        for _ in range(8):
            h = (h * w).sin()
        return w, h.sum()

    w, loss = forward()
    loss.backward()
    want = _digest([w.grad])  # type: ignore[list-item]
    out: dict[str, Any] = {}
    stream = torch.Stream(DEVICE)
    stream.wait_stream(torch.accelerator.current_stream(DEVICE))
    for name in ("on a stream", "beside a CPU budget", "beside the next one"):
        own = stream if name == "on a stream" else contextlib.nullcontext()
        try:
            with memmgr.budget(8 << 16, device=DEVICE, policy="offload", quiet=True) as mm, own:
                w, loss = forward()
                native = binding.load()
                gone = sum(native.take_away(t, 1) > 0 for t in native.objects_of((Tensor,)) if t.device == x.device)
                gone += native.stats()["offloads"]
                raise _Mistake
        except _Mistake:
            pass
        if name == "on a stream":
            with own:
                junk = [torch.full_like(x, 7.0) for _ in range(8)]
                del junk
                loss.backward()
                grad = _digest([w.grad])  # type: ignore[list-item]
                lies = {str(w.device)}
        else:
            where = "cpu" if name == "beside a CPU budget" else DEVICE
            with memmgr.budget("1GB", device=where, quiet=True) as mm:
                lies = {str(w.device)}
                loss.backward()
                grad = _digest([w.grad])  # type: ignore[list-item]
        out[name] = {"right": grad == want, "gone": gone, "remade": mm.stats()["recomputes"], "lies": sorted(lies)}
        del w, loss, mm
        gc.collect()
    out["left"] = _left(handles)
    return out


def broken(mode: str, seed: int) -> dict[str, Any]:
    """A kernel fails while cells leave and come back: calls of the driver return an error from then on."""
    handles = _start(mode, seed)
    out: dict[str, Any] = {}
    try:
        # With `verify` each departure is summed, and each return compared.
        with memmgr.budget("8MB", device=DEVICE, quiet=True, host="8MB", policy="offload", verify=True, _plan=False):
            native = binding.load()
            x, y = torch.ones(1 << 18).to(DEVICE), torch.ones(1 << 18).to(DEVICE) * 2
            out["left"] = native.take_away(y, 1)
            out["begun"] = native.read_ahead(y)
            torch.accelerator.synchronize()
            handles.fake.fake_break(700)
            native.drain()
            out["left broken"] = native.take_away(x, 1)
            try:
                torch.empty(7 << 20, dtype=torch.uint8, device=DEVICE)  # the cells that it evicts cannot be summed
            except RuntimeError as error:
                out["error"] = str(error)
    except RuntimeError as error:
        out["at its end"] = str(error)
    return out


def armed(mode: str, seed: int) -> dict[str, Any]:
    """`MEMMGR_BUDGET` in the environment, and the device by the name that torch knows before it is registered."""
    _start(mode, seed)
    digest = scenarios._train(MODELS["gpt"], DEVICE)
    return {"digest": digest, **memmgr.stats()}


def without_wait(wait: str, mode: str, seed: int, models: list[str], policies: list[str]) -> list[str]:
    """Trainings that are wrong on a core that leaves one of its waits out; ``MEMMGR_CORE_LIB`` is one that can."""
    _start(mode, seed)
    digests = {name: scenarios._train(MODELS[name], DEVICE) for name in models}
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    threads = _two_threads(lambda: "")
    needs = {}
    for name in models:
        with memmgr.budget(None, device=DEVICE, quiet=True) as mm:
            scenarios._train(MODELS[name], DEVICE)
        needs[name] = mm.stats()["resident_bytes.peak"]
    leave_out = load_core().mm_test_leave_out
    assert leave_out(wait.encode()) == 0
    binding.load().leave_out(SCRIBBLED)  # which would wait in its place
    wrong = []

    def compare(name: str, limit: int | str, policy: str, run: Callable[[], str], want: str) -> None:
        try:
            with memmgr.budget(limit, device=DEVICE, policy=policy, quiet=True):
                same = run() == want
        except (RuntimeError, KeyError):  # a checksum was not met, in a thread or in none
            same = False
        if not same:
            wrong.append(name)

    for name in models:
        for policy in policies:
            train = functools.partial(scenarios._train, MODELS[name], DEVICE)
            compare(f"{name} {policy}", int(needs[name] * SHARES[name][-1]), policy, train, digests[name])
    compare("two threads", "1.6MB", "torture", lambda: _two_threads(lambda: ""), threads)
    assert leave_out(b"") == 0
    binding.load().leave_out(0)
    return wrong
