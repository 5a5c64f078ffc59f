"""The same tier on a real device. Skipped, not faked, where there is no CUDA; importing works everywhere."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from memmgr.tiers import cuda_streams
from memmgr.tiers.host import HostTier, Slot
from memmgr.tiers.streams import HostRange

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
_cuda: Any = torch.cuda  # carries few annotations
_storage_class: Any = torch.UntypedStorage


@pytest.mark.skipif(torch.cuda.is_available(), reason="the case of a machine without CUDA")
def test_without_cuda() -> None:
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        cuda_streams.CudaStreams()


def test_bytes_of_storages_and_of_the_slab() -> None:
    """The views that copies run on: no version counter moves, nothing is resized (rule 3). Runs on CPU storages."""
    source = torch.arange(1000, dtype=torch.int32)
    slab = cuda_streams.PageLocked(_storage_class(8192), registered=False)
    place = HostRange(slab, 512)
    cuda_streams._bytes(place, 4000).copy_(cuda_streams._bytes(source.untyped_storage(), 4000))
    target = torch.zeros(1000, dtype=torch.int32)
    cuda_streams._bytes(target.untyped_storage(), 4000).copy_(cuda_streams._bytes(place, 4000))
    assert torch.equal(source, target)
    assert source._version == target._version == 0
    with pytest.raises(ValueError, match="do not fit"):
        cuda_streams._bytes(place, 7681)
    with pytest.raises(ValueError, match="do not fit"):
        cuda_streams._bytes(target.untyped_storage(), 4001)
    assert target.untyped_storage().nbytes() == 4000


@pytest.mark.gpu
@needs_cuda
def test_random_rounds() -> None:
    """Cells go down and come back among slow kernels, under a slab that is too small for all of them."""
    device = torch.device("cuda", torch.cuda.current_device())
    streams = cuda_streams.CudaStreams()
    tier = HostTier(streams, 64 << 20)
    compute = streams.current_stream()
    rng = random.Random(0)
    cells: list[tuple[int, int, torch.Tensor | None, Slot | None]] = []
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for number in range(400):
        count = rng.choice([1000, 300_000, 2_000_000])
        _cuda._sleep(rng.choice([0, 100_000, 2_000_000]))
        tensor = torch.full((count,), number, dtype=torch.int32, device=device)
        storage = tensor.untyped_storage()
        slot = tier.write(storage, count * 4, streams.record(compute), home=compute)
        if slot is not None:
            tier.drop(storage, home=compute)
            cells.append((number, count, None, slot))
        else:
            cells.append((number, count, tensor, None))
        del tensor, storage
        while len(cells) > 12 or (cells and rng.random() < 0.3):
            value, size, kept, parked = cells.pop(rng.randrange(len(cells)))
            if parked is not None:
                reload = tier.read(parked, compute)
                tier.use(reload, compute)
                tier.free(parked)
                kept = torch.empty(0, dtype=torch.int32, device=device).set_(reload.block, 0, (size,), (1,))
                del reload
            assert kept is not None
            wrong += (kept != value).sum()
            del kept
    tier.close()
    assert int(wrong) == 0
    streams.settle(compute)
    assert not streams._deferred


@pytest.mark.gpu
@needs_cuda
def test_copies_are_asynchronous() -> None:
    """The CPU returns from write and read while the device is still busy with what is in front."""
    streams = cuda_streams.CudaStreams()
    tier = HostTier(streams, 8 << 20)
    compute = streams.current_stream()
    storage = torch.ones(1 << 20, dtype=torch.int32, device=streams.device).untyped_storage()
    torch.cuda.synchronize()
    _cuda._sleep(200_000_000)
    slot = tier.write(storage, 4 << 20, streams.record(compute))
    assert slot is not None
    reload = tier.read(slot)
    assert not tier.poll(slot), "the CPU waited for the device"
    tier.wait(slot)
    assert streams.query(reload.ready)
    tier.close()
