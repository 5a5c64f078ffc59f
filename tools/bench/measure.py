"""Rates of this machine, and the time of each op of a step here: the table that memmgr plan reads.

An op is run alone, on tensors of its own with made-up values, so a step need not fit into memory for its ops to be measured.

*Known limitations*: on an accelerator only the rates are measured, no ops. An op whose time depends on values (a sparse
gradient, a sort) is measured on made-up ones. On the CPU an op that runs alone finds its inputs in the caches more
often than in a step.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from torch import nn

import memmgr
from memmgr.policies.trace import TierLink
from memmgr.tools.bench.disk_speed import disk_speed
from memmgr.tools.common.console import ProgressBar
from memmgr.tools.common.fake_step import StepError, record
from memmgr.tools.common.fake_trace import Call, FakeStep, TensorSpec
from memmgr.tools.common.interrupts import ends_at_once
from memmgr.tools.common.make_step import from_file
from memmgr.tools.common.outputs import check_output
from memmgr.tools.common.rates import Rates, write_rates
from memmgr.tools.common.usage_error import UsageError

clock = time.perf_counter
_LEAST_RUNS, _MOST_RUNS, _ENOUGH_SECONDS = 3, 20, 0.03
_CACHE_BYTES = 16 << 20
"""More than a core's own caches have, less than a socket's."""
_BANDWIDTH_BYTES = 64 << 20
"""Bytes of each of three tensors: more than the caches have. 8 MB measured the caches, which are 5 times as fast."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def measure(folder: str, step: FakeStep | None = None, *, size: int = 512 << 20, cpu: bool = False) -> Rates:
    """Rates of the accelerator that torch uses, else of the CPU, with the disk below.

    Raises `OSError`: the folder cannot be written. `folder`: where the tier would be. `step`: whose ops are measured
    one by one; the CPU's only. `size`: bytes that the tier below is measured with. `cpu`: the CPU also where there is
    an accelerator.
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() and not cpu else None
    device = found or torch.device("cpu")
    side = 1024 if device.type == "cpu" else 8192
    flops = {str(dtype)[6:]: _product(device, dtype, side) for dtype in _DTYPES}
    bandwidth = _bandwidth(device, _BANDWIDTH_BYTES)
    if device.type == "cpu":
        write, read = disk_speed(folder, size)
        link = TierLink("disk", write, read, shared=True)
        name = f"cpu: {processor()}, {torch.get_num_threads()} threads"
        memory = psutil.virtual_memory().total
    else:
        link = TierLink("host", *_bus(device, size // 2))
        name, memory = torch.get_device_module(device).get_device_name(), torch.accelerator.get_memory_info(device)[1]
    source = f"measured, torch {torch.__version__}"
    calls: dict[str, tuple[float, int]] = {}
    per_call = 0.0
    if device.type == "cpu":
        per_call = _per_call()
        calls = _calls(step) if step is not None else {}
    return Rates(name, flops, bandwidth, memory, link, source, device.type != "cpu", per_call, calls)


def write(
    path: Path, folder: str, what: str | None, size: int, simulation: Callable[[Rates], dict[str, Any]] | None = None
) -> int:
    """`memmgr doctor --measure`.

    `folder`: where the tier would be. `what`: FILE.py:FUNCTION, which makes a step. `size`: bytes with which the tier
    is measured. `simulation`: makes the table of a simulation of this accelerator; it goes into the same file.
    """
    if path.suffix != ".json":  # by which memmgr plan knows it
        raise UsageError(f"--measure: {path} does not end in .json")
    check_output(path, "--measure")
    try:
        with ends_at_once("doctor"):
            step = record(from_file(what), accelerator=False) if what else None
        rates = measure(folder, step, size=size)
        write_rates(path, rates, simulation(rates) if simulation is not None and rates.accelerator else {})
    except StepError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"{error.filename or path}: {error.strerror}") from None
    print(
        f"{path}: {rates.name}, {rates.flops['float32'] / 1e9:,.0f} GFLOP/s, {rates.bytes_per_second / 1e9:.1f} GB/s, ",
        end="",
    )
    print(f"{len(rates.calls):,} kinds of op. Next:\n  memmgr plan --device {path} {what or 'FILE.py:FUNCTION'}")
    return 0


def processor() -> str:
    """The name of the machine's processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def _seconds(
    run: Callable[[], object], device: torch.device | None = None, before: Callable[[], object] = lambda: None
) -> float:
    """The median of some runs, each after `before`; the first is not counted."""
    found: list[float] = []
    for _ in range(_MOST_RUNS + 1):
        before()
        begun = clock()
        run()
        if device is not None and device.type != "cpu":
            torch.accelerator.synchronize(device)
        found.append(clock() - begun)
        if len(found) > _LEAST_RUNS and sum(found[1:]) > _ENOUGH_SECONDS:
            break
    return median(found[1:])


def _product(device: torch.device, dtype: torch.dtype, side: int) -> float:
    a = torch.ones(side, side, dtype=dtype, device=device)
    return 2 * side**3 / _seconds(lambda: a @ a, device)


def _bandwidth(device: torch.device, size: int) -> float:
    a, b = (torch.ones(size // 4, device=device) for _ in range(2))
    return 3 * size / _seconds(lambda: torch.add(a, b, out=b), device)


def _bus(device: torch.device, size: int) -> tuple[float, float]:
    there = torch.empty(size, dtype=torch.uint8, device=device)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return size / _seconds(lambda: host.copy_(there), device), size / _seconds(lambda: there.copy_(host), device)


def _tiny() -> Callable[[], object]:
    """A step whose tensors are so small that only calls take time."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(20)))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, 8)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _per_call() -> float:
    """Seconds of a call of torch outside of the kernel: Python, autograd, the pager."""
    calls = len(record(_tiny, accelerator=False).works)
    with memmgr.budget(None, device="cpu", quiet=True):
        step = _tiny()
        step()
        return _seconds(step) / calls


# ---- the ops of a step


def _calls(step: FakeStep) -> dict[str, tuple[float, int]]:
    wanted = [s for s in dict.fromkeys(work.signature for work in step.works) if s in step.samples]
    with torch.no_grad():
        scratch = {s: scratch_bytes(step.samples[s]) for s in wanted}
        # As in a run: the arena keeps its pages, where torch's own allocator gives large ones back each time.
        with memmgr.budget(None, device="cpu", quiet=True):
            others = torch.ones(_CACHE_BYTES // 4)  # stands for the rest of a step: it evicts the caches
            found = {}
            with ProgressBar(len(wanted)) as progress:
                for s in wanted:
                    progress.say(str(step.samples[s].function), 1)
                    found[s] = _seconds(_ready(step.samples[s]), before=others.sum), scratch[s]
            return found


def _ready(call: Call) -> Callable[[], Any]:
    arguments, keywords = _real(call.arguments), _real(call.keywords)
    return lambda: call.function(*arguments, **keywords)


def _real(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        size = 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride, strict=True))
        bare = torch.empty(size, dtype=value.dtype)
        if value.dtype.is_floating_point:
            bare.uniform_(0.1, 1.0)
        elif value.dtype == torch.uint8:
            bare.zero_()  # a kernel's own bytes: as floats these are zeros, not denormal numbers
        else:
            bare.random_(0, 2)  # an index of anything that has two
        return bare.as_strided(value.shape, value.stride)
    if isinstance(value, list | tuple):
        return type(value)(_real(each) for each in value)
    if isinstance(value, dict):
        return {key: _real(each) for key, each in value.items()}
    return value


def scratch_bytes(call: Call) -> int:
    """Bytes beyond its outputs at the worst moment, as torch's allocator reports them."""
    run = _ready(call)
    # It writes two lines for each profile otherwise, and there is one for each kind of op.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        out = run()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    level = most = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            level += event.nbytes()
            most = max(most, level)
    del out
    return max(most - level, 0)
