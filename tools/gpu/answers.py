"""Each question that a script may ask torch.cuda about memory, under memmgr's allocator: `python -P answers.py`, by path, so that
no module of memmgr is imported before this one imports it. Prints one line of JSON, by check "ok" or the error.
"""

from __future__ import annotations

import json
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 1 << 20


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


if __name__ == "__main__":
    print(json.dumps(answers()))
