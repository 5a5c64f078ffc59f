"""Checks of memmgr's allocator on a GPU, each in a process of its own: `python -P cuda_probe.py NAME ...`, by path, so
that no module of memmgr is imported before the program imports it. Prints one line of JSON.

    answers                 every question that a script may ask torch.cuda about memory, under memmgr's allocator
    train ORDER [BUDGET]    a convnet, deterministic. ORDER: native, environment, first, late (the model before the import)
    speed                   host time of an allocation and its free, and of mapping pages
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 1 << 20


# ---- training --------------------------------------------------------------------------------------------------------


def train(order: str, budget_bytes: int) -> dict[str, Any]:
    """Three steps; the digest is of all parameters and buffers."""
    import torch
    from torch import nn

    if order == "first":
        import memmgr
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for index in range(6):
        layers += [nn.Conv2d(3 if index == 0 else 32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Dropout(0.1), nn.Linear(2048, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if order == "late":
        import memmgr
    opened: Any = contextlib.nullcontext()
    if order in ("first", "late"):
        opened = memmgr.budget(budget_bytes, quiet=True)
    losses = []
    with opened:
        for step in range(3):
            torch.manual_seed(step)
            batch = torch.randn(32, 3, 64, 64, device="cuda")
            target = torch.randint(0, 10, (32,), device="cuda")
            loss = nn.functional.cross_entropy(model(batch), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    stats = {}
    if "memmgr.api.budget" in sys.modules:
        stats = {key: value for key, value in sys.modules["memmgr"].stats().items() if isinstance(value, int | float)}
    return {
        "digest": digest.hexdigest(),
        "losses": losses,
        "allocator": torch.cuda.get_allocator_backend(),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_peak_bytes": torch.cuda.max_memory_reserved(),
        "stats": stats,
    }


# ---- answers ---------------------------------------------------------------------------------------------------------


def figures(torch: Any) -> None:
    cuda = torch.cuda
    cuda.reset_peak_memory_stats()
    cuda.reset_accumulated_memory_stats()
    before = cuda.memory_allocated()
    held = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
    assert cuda.memory_allocated() == before + 8 * MIB
    del held
    assert cuda.memory_allocated() == before
    assert cuda.max_memory_allocated() == before + 8 * MIB
    assert cuda.memory_reserved() >= before
    stats = cuda.memory_stats()
    assert stats["allocation.all.allocated"] == stats["allocation.all.freed"] == 1, stats
    assert stats["requested_bytes.all.allocated"] == 8 * MIB
    cuda.reset_peak_memory_stats()
    assert cuda.max_memory_allocated() == before
    assert "Allocated memory" in cuda.memory_summary()
    ratio = cuda.mem_get_info()[1] / cuda.get_device_properties(0).total_memory
    assert 0.9 < ratio < 1.1, ratio  # the driver's reserve is counted by one of them, or by both
    assert torch.accelerator.memory_allocated() == before


def empty_cache(torch: Any) -> None:
    cuda = torch.cuda
    held = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    del held
    reserved, free = cuda.memory_reserved(), cuda.mem_get_info()[0]
    cuda.empty_cache()
    assert cuda.memory_reserved() <= reserved - 200 * MIB
    assert cuda.mem_get_info()[0] >= free + 200 * MIB


def snapshot(torch: Any) -> None:
    cuda = torch.cuda
    cuda.memory._record_memory_history(max_entries=1000)
    held = [torch.empty(n, device="cuda") for n in (100, 100_000, 10_000_000)]
    del held[1]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "snapshot.pickle"
        cuda.memory._dump_snapshot(str(file))
        taken = pickle.loads(file.read_bytes())
    cuda.memory._record_memory_history(enabled=None)
    from torch.cuda import _memory_viz

    assert "segment" in _memory_viz.segsum(taken).lower() or taken["segments"]
    _memory_viz.trace_plot(taken)
    _memory_viz.segment_plot(taken)
    actions = [entry["action"] for entry in taken["device_traces"][0]]
    assert {"alloc", "free_requested", "free_completed"} <= set(actions), actions
    for segment in taken["segments"]:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    frames = [b["frames"] for s in taken["segments"] for b in s["blocks"] if b["state"] == "active_allocated"]
    assert any(any(frame["name"] == "snapshot" for frame in stack) for stack in frames)


def out_of_memory(torch: Any) -> None:
    cuda = torch.cuda
    seen: list[Any] = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *what: seen.append(what))
    for fraction, size in ((1.0, 1 << 45), (0.01, int(0.02 * cuda.mem_get_info()[1]))):
        cuda.set_per_process_memory_fraction(fraction)
        try:
            torch.empty(size, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            assert str(error).startswith("CUDA out of memory. Tried to allocate "), error
            assert fraction == 1 or "set_per_process_memory_fraction" in str(error)
        else:
            raise AssertionError(f"{size} bytes were there")
    assert cuda.get_per_process_memory_fraction() == 0.01
    cuda.set_per_process_memory_fraction(1.0)
    assert cuda.memory_stats()["num_ooms"] >= 2
    assert len(seen) == 2, seen


def convolutions(torch: Any) -> None:
    cuda = torch.cuda
    torch.backends.cudnn.benchmark = True
    layer = torch.nn.Conv2d(16, 16, 3).cuda()
    layer(torch.randn(4, 16, 40, 40, device="cuda")).sum().backward()
    cuda.synchronize()
    torch.backends.cudnn.benchmark = False


def streams(torch: Any) -> None:
    """Without record_stream, or without its order, the side stream reads bytes written later."""
    cuda = torch.cuda
    side = cuda.Stream()
    for _ in range(20):
        source = torch.full((4 * MIB,), 1, dtype=torch.int32, device="cuda")
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            cuda._sleep(2_000_000)
            total = source.sum()
        source.record_stream(side)
        del source
        after = torch.full((4 * MIB,), 7, dtype=torch.int32, device="cuda")
        cuda.current_stream().wait_stream(side)
        assert total.item() == 4 * MIB
        del after


def graphs(torch: Any) -> None:
    cuda = torch.cuda
    fixed = torch.ones(1000, device="cuda")
    for _ in range(2):
        (fixed * 2).sin()
    cuda.synchronize()
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        out = (fixed * 2).sin() + fixed.exp()
    for value in (0.5, 2.0):
        fixed.fill_(value)
        noise = [torch.randn(1000, device="cuda") for _ in range(50)]
        graph.replay()
        assert torch.equal(out, (fixed * 2).sin() + fixed.exp())
        del noise
    graph.reset()


def pools(torch: Any) -> None:
    cuda = torch.cuda
    pool = cuda.MemPool()
    with cuda.use_mem_pool(pool):
        held = torch.ones(MIB, device="cuda")
    assert held.sum().item() == MIB
    del held, pool


def refusals(torch: Any) -> None:
    """A missing symbol raises an error that names it."""
    shared: Any = torch.ones(10, device="cuda")
    acts: list[Callable[[], Any]] = [
        lambda: shared.untyped_storage()._share_cuda_(),
        lambda: torch._C._cuda_getCheckpointState(0, (0, 1)),
    ]
    for act in acts:
        try:
            act()
        except (RuntimeError, NotImplementedError) as error:
            assert "memmgr" in str(error), error
        else:
            raise AssertionError("was not refused")


def devices(torch: Any) -> None:
    cuda = torch.cuda
    if cuda.device_count() < 2:
        return
    there = torch.arange(1_000_000, device="cuda:0").to("cuda:1")
    back = there.view(1000, 1000).t().to("cuda:0")  # not contiguous: kernels reach over
    assert torch.equal(back, torch.arange(1_000_000, device="cuda:0").view(1000, 1000).t())


CHECKS = (figures, empty_cache, snapshot, out_of_memory, convolutions, streams, graphs, pools, refusals, devices)
"""Each gets the module torch: this file is imported before it is decided whether torch or memmgr comes first."""


def answers() -> dict[str, str]:
    """By check: "ok", or the error."""
    import torch

    import memmgr  # noqa: F401  puts the allocator in place

    torch.cuda.init()
    found = {"allocator": torch.cuda.get_allocator_backend()}
    for check in CHECKS:
        name = check.__name__
        try:
            check(torch)
            torch.cuda.synchronize()
            found[name] = "ok"
        except Exception as error:  # the others are still worth knowing
            found[name] = f"{type(error).__name__}: {error}"[:300]
    return found


# ---- speed -----------------------------------------------------------------------------------------------------------


class _DeviceStats(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            "waits cross_reuses synchronizations maps unmaps map_nanoseconds unmap_nanoseconds streams pools driver_errors"
        ).split()
    )


def speed(with_memmgr: bool) -> dict[str, Any]:
    """Nanoseconds; `torch.empty` and its end, which is mostly torch's own time: compare with the other allocator."""
    import torch

    if with_memmgr:
        import memmgr  # noqa: F401
    torch.cuda.init()
    found: dict[str, Any] = {"allocator": torch.cuda.get_allocator_backend()}
    for label, size in (("512 B", 512), ("1 MiB", MIB), ("64 MiB", 64 * MIB)):
        rounds = []
        for _ in range(15):
            begun = time.perf_counter_ns()
            for _ in range(1000):
                torch.empty(size, dtype=torch.uint8, device="cuda")
            rounds.append((time.perf_counter_ns() - begun) / 1000)
        found[label] = statistics.median(rounds)
    fresh = []
    for _ in range(8):
        torch.cuda.empty_cache()
        begun = time.perf_counter_ns()
        torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
        fresh.append((time.perf_counter_ns() - begun) / 1e6)
    found["512 MiB, new, ms"] = statistics.median(fresh)
    if with_memmgr:
        from memmgr.native import cuda as allocator
        from memmgr.native.build import load_core

        stats, core = _DeviceStats(), load_core()
        core.mm_device_stats_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        core.mm_device_stats_get.restype = None
        error = ctypes.create_string_buffer(256)
        core.mm_device_stats_get(allocator.table().device(0, error, len(error)), ctypes.addressof(stats))
        found["map, us a page"] = stats.map_nanoseconds / 1e3 / max(1, stats.maps)
        found["unmap, us a page"] = stats.unmap_nanoseconds / 1e3 / max(1, stats.unmaps)
    return found


def main(argv: list[str]) -> int:
    """Runs one probe."""
    name, *rest = argv
    if name == "train":
        result: dict[str, Any] = train(rest[0], int(rest[1]) if len(rest) > 1 else 0)
    elif name == "answers":
        result = dict(answers())
    else:
        result = speed(rest != ["native"])
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
