"""Trainings on the test device under the clock of the double (driver/virtual_time.h), for test_timed.py."""

import ctypes
import functools
import hashlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from memmgr.tools.gpu import figures
from memmgr.tools.gpu.simulated import Simulation

from . import Handles, scenarios, start
from .scenarios import DEVICE

import memmgr  # isort: skip
from memmgr.native import binding  # isort: skip
from memmgr.native.build import load_core  # isort: skip
from memmgr.runtime.plans import Plans  # isort: skip


MODELS: dict[str, Callable[[], scenarios.Case]] = {
    "gpt": functools.partial(scenarios.gpt, width=64, context=64, batch=8),  # tensors of 128 to 512 KiB
    "convnet": functools.partial(scenarios.convnet, width=16, blocks=2, batch=16),
}


class Training:
    """A model in training; `step` queues one step, `digest` is of all that it leaves behind."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model, batch, self._loss_of = MODELS[name]()
        self.model.to(DEVICE)
        self._batch = [t.to(DEVICE) for t in batch]
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self._losses: list[Tensor] = []

    def step(self) -> None:
        with sdpa_kernel(SDPBackend.MATH):
            loss = self._loss_of(self.model, *self._batch)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._losses.append(loss.detach())

    def digest(self) -> str:
        sha = hashlib.sha256(str([loss.item().hex() for loss in self._losses]).encode())
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            sha.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return sha.hexdigest()


def begin(page_bytes: int, scale: float = 1, **options: Any) -> tuple[Handles, Simulation]:
    """The device with a clock, pages of this size, and cells down to 64 KiB at the scale of the tensors."""
    os.environ["MEMMGR_PAGER_SMALL"] = str(int((64 << 10) / scale))
    handles = start(mode="timed", **options)
    handles.fake.fake_set_granularity(ctypes.c_uint64(page_bytes))
    load_core().mm_test_lock_pieces(ctypes.c_uint64(1 << 40), ctypes.c_uint64(0), 0)
    binding.load().read_clock(ctypes.cast(handles.fake.fake_nanoseconds, ctypes.c_void_p).value)
    os.environ["MEMMGR_DRIVER"] = str(handles.driver_path)
    os.environ["MEMMGR_CUDA_PAGE"] = str(page_bytes)
    table = figures.read(figures.H100)
    table["flops.float32"] = table["flops.bfloat16"]  # the models stand for such that train in bf16
    return handles, Simulation(handles.fake, table, scale)


def trained(name: str, simulation: Simulation, mm: Any, steps: int, warm: int, settle: int) -> dict[str, Any]:
    """Steps until a plan is followed, then the figures of `steps` of them."""
    training = Training(name)
    taken, since, plans = 0, 0, -1
    while taken < max(warm, settle):
        training.step()
        torch.accelerator.synchronize()
        taken += 1
        if mm is None or taken < warm:
            continue
        mm._runtime.plans.wait()  # a plan takes no virtual time
        stats = mm.stats()
        since, plans = since + 1 if stats["plans"] == plans else 0, stats["plans"]
        if not stats["reclaims"] or (stats["planned_passes"] >= 2 and since >= 7):
            break
    before = mm.stats() if mm is not None else {}
    simulation.begin()
    for _ in range(steps):
        training.step()
    torch.accelerator.synchronize()
    out = simulation.end(steps)
    if mm is not None:
        after = mm.stats()
        out["passes"], out["planned"] = (after[key] - before[key] for key in ("passes", "planned_passes"))
        out["peak"], out["committed_peak"] = after["resident_bytes.peak"], after["committed_bytes.peak"]
        out["budget"], out["plans"] = after["budget_bytes"], after["plans"]
        out["rates"] = binding.load().link()
        made = mm._runtime.plans.latest() if mm._runtime else None
        out["predicted"] = made.overhead if made is not None else None
        out["plan errors"] = mm._runtime.plans.errors() if mm._runtime else []
        for key in ("offload_bytes", "reload_bytes", "recomputes", "evictions", "stall_seconds"):
            out[key] = round((after[key] - before[key]) / steps, 6)
    out["steps"] = taken + steps
    out["digest"] = training.digest()
    return out


def idle_ops(scale: float = 1024) -> dict[str, Any]:
    """The seconds that a plan has for the sigmoids of a step, by period, and those that the device takes for one. The program
    waits for the device before each."""
    _, simulation = begin(1 << 14, scale)
    torch.manual_seed(0)
    width = 128
    weights = [torch.nn.Parameter(torch.eye(width).to(DEVICE)) for _ in range(6)]
    noted: list[list[float]] = []
    period_ended = Plans.period_ended

    def step(wait: bool) -> None:
        x = torch.ones(2 * width, width).to(DEVICE)
        for weight in weights:
            x = torch.sin(torch.sin(x))
            for _ in range(20 if wait else 0):  # the host's time for it passes on an idle device
                torch.accelerator.synchronize()
            x = torch.sigmoid(x) @ weight
        x.sum().backward()
        for weight in weights:
            weight.grad = None

    def look(plans: Plans, ended: Any) -> None:
        columns = binding.load().timeline()
        names = [columns["names"][i] for i in np.frombuffer(columns["op"], dtype=np.int32)]
        seconds = np.frombuffer(columns["seconds"], dtype=np.float32).tolist()
        noted.append([took for name, took in zip(names, seconds, strict=True) if name == "aten::sigmoid"])
        period_ended(plans, ended)

    with memmgr.budget(None, device=DEVICE, quiet=True) as mm:
        step(False)
    need = mm.stats()["resident_bytes.peak"]
    Plans.period_ended = look  # type: ignore[method-assign]
    with memmgr.budget(int(0.8 * need), device=DEVICE, quiet=True):
        for _ in range(8):
            step(True)
    x = torch.ones(2 * width, width).to(DEVICE)
    torch.accelerator.synchronize()
    simulation.begin()
    for _ in range(100):
        torch.sigmoid(x)
    torch.accelerator.synchronize()
    return {"noted": noted, "takes": simulation.end(100)["kernels"]}


def launch_bound(ops: int, steps: int = 3) -> dict[str, Any]:
    """The step of a chain of so many ops that take less time than their launches: plain, without a limit, and in a budget that
    is large enough. `small`: tensors below the pager's threshold; `recorded`: of 64 KiB, with gradients."""
    _, simulation = begin(1 << 14)
    out: dict[str, Any] = {}

    def small(x: Tensor) -> None:
        for _ in range(ops):
            x = x + 1

    def recorded(x: Tensor) -> None:
        h = x.detach().requires_grad_()
        for _ in range(ops):
            h = h * 1.5

    def timed(chain: Callable[[Tensor], None], x: Tensor) -> dict[str, float]:
        for _ in range(2):
            chain(x)
        torch.accelerator.synchronize()
        simulation.begin()
        for _ in range(steps):
            chain(x)
        torch.accelerator.synchronize()
        return dict(simulation.end(steps))

    for chain, numel in ((small, 64), (recorded, 1 << 14)):
        x = torch.ones(numel).to(DEVICE)
        out[chain.__name__] = {"plain": timed(chain, x)}
        for name, limit in (("no limit", None), ("budget", "64MB")):
            with memmgr.budget(limit, device=DEVICE, quiet=True):
                out[chain.__name__][name] = timed(chain, x)
    return out


def opening(host: str) -> dict[str, float]:
    """The virtual seconds until the first op of a budget: with the pieces of host memory that a GPU has locked, and with all
    of it locked at once."""
    _, simulation = begin(1 << 14, hollow=True, memory_bytes=1 << 34)
    out: dict[str, float] = {}
    for name, first in (("pieces", 0), ("whole", 1 << 40)):
        load_core().mm_test_lock_pieces(ctypes.c_uint64(first), ctypes.c_uint64(0), 0)
        begun = simulation.now()
        with memmgr.budget("1GB", device=DEVICE, quiet=True, host=host):
            out[name] = simulation.now() - begun
    return out


def probes() -> dict[str, Any]:
    """The seconds of each probe of the link that a budget makes, its rate in the stats, and the rate in the table."""
    begin(1 << 14, hollow=True)
    native, table = binding.load(), figures.read(figures.H100)
    probe, seen = native.tier_probe, []

    def noted(size: int) -> Any:
        seen.append(probe(size))
        return seen[-1]

    native.tier_probe = noted  # type: ignore[method-assign]
    with memmgr.budget("1GB", device=DEVICE, quiet=True, host="1GB") as mm:
        rate = mm.stats()["link_bytes_per_second"]
    seconds = [times["write"] + times["read"] for times in seen]
    return {"seconds": seconds, "rate": rate, "table": 2 / (1 / table["out"] + 1 / table["in"])}


def trains(models: dict[str, float], page_bytes: int = 1 << 14, scale: float = 128, steps: int = 4) -> dict[str, Any]:
    """Each model without memmgr, without a limit, and in its share of the need. Pages are small beside the tensors, and tensors
    stand for such that are `scale` times as large: pages of 2 MiB beside a need of 0.6 and 4 GB."""
    handles, simulation = begin(page_bytes, scale)
    out: dict[str, Any] = {}
    noted: list[float] = []
    period_ended = Plans.period_ended

    def look(plans: Plans, ended: Any) -> None:
        columns = binding.load().timeline()
        noted.append(sum(np.frombuffer(columns[name], dtype=np.float32).sum() for name in ("seconds", "before")).item())
        period_ended(plans, ended)

    Plans.period_ended = look  # type: ignore[method-assign]
    for name, share in models.items():
        with memmgr.budget(None, device=DEVICE, quiet=True) as mm:
            free = trained(name, simulation, mm, steps, 2, 0)
        need = free["peak"]
        with memmgr.budget(int(need * share), device=DEVICE, quiet=True) as mm:
            noted.clear()
            limited = trained(name, simulation, mm, steps, 4, 28)
        plain = trained(name, simulation, None, 1, limited["steps"] - 1, 0)
        errors = binding.load().device_stats()["driver_errors"]
        out[name] = {
            "plain": plain,
            "free": free,
            "limited": limited,
            "need": need,
            "page": page_bytes,
            "noted": list(noted),
            "errors": errors,
        }
    return out
