"""Storages below 64 kB have no cell. Where very many of them fill the budget, new ones get one (pools/small_blocks.h)."""

import random
import threading
from collections.abc import Callable

import pytest
import torch

import memmgr
from memmgr.native import binding as native

pytestmark = pytest.mark.usefixtures("large_only")


def _replay(kept: int, steps: int) -> list[float]:
    """A replay buffer: tensors of 16 kB, of which each step makes one, drops one and stacks some, beside a small network."""
    torch.manual_seed(0)
    chance, buffer = random.Random(0), [torch.randn(4096) for _ in range(kept)]
    net, losses = torch.nn.Linear(4096, 4), []
    for step in range(steps):
        buffer[step % kept] = torch.randn(4096)
        loss = net(torch.stack(chance.sample(buffer, 16))).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in net.parameters():
                assert p.grad is not None
                p -= 0.01 * p.grad
                p.grad = None
        losses.append(loss.item())
    return [*losses, *(float(t.sum()) for t in buffer)]


@pytest.mark.parametrize("policy", ["auto", "offload", "evict"])
def test_a_buffer_of_small_tensors_leaves(policy: str, beyond: Callable[[str], int]) -> None:
    want = _replay(600, 40)  # 9.8 MB
    with memmgr.budget(beyond("6MB"), policy=policy, quiet=True, verify=True) as mm:
        assert _replay(600, 40) == want
    stats = mm.stats()
    assert stats["offloads"] + stats["evictions"] > 100
    assert stats["resident_bytes.peak"] <= stats["budget_bytes"]


def test_few_small_tensors_have_no_cell(beyond: Callable[[str], int]) -> None:
    with memmgr.budget(beyond("6MB"), quiet=True):
        kept = [torch.randn(4096) + 0 for _ in range(10)]
        assert native.load().describe(kept[-1]) is None


def test_threads_that_read_older_small_tensors(beyond: Callable[[str], int]) -> None:
    """Those that were made before new ones get cells have none, so an op of another thread may read them without a pin."""
    wrong: list[float] = []
    stop = threading.Event()
    with memmgr.budget(beyond("6MB"), quiet=True) as mm:
        older = [torch.full((4096,), float(k)) for k in range(20)]

        def read() -> None:
            while not stop.is_set():
                for k, t in enumerate(older):
                    if (found := float((t * 1).sum())) != 4096.0 * k:
                        wrong.append(found)

        thread = threading.Thread(target=read)
        thread.start()
        _replay(600, 20)
        stop.set()
        thread.join()
    assert not wrong
    assert mm.stats()["offloads"] > 0


def test_a_later_budget_begins_with_the_usual_size(beyond: Callable[[str], int]) -> None:
    with memmgr.budget(beyond("6MB"), quiet=True):
        _replay(600, 2)
    with memmgr.budget(beyond("6MB"), quiet=True):
        made = torch.randn(4096) + 0
        assert native.load().describe(made) is None


def _kept(how: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    torch.manual_seed(0)
    source = torch.randn(4096)
    return [float(t.sum()) for t in [how(source) for _ in range(600)]]


@pytest.mark.parametrize(
    "how",
    [
        lambda t: t.clone(),
        lambda t: t * 2,
        lambda t: torch.stack([t[:2048], t[2048:]]),
        lambda t: torch.empty(4096).copy_(t),
        lambda t: torch.from_numpy(t.numpy().astype("float64")).float(),
    ],
    ids=["clone", "mul", "stack", "empty", "from_numpy"],
)
def test_results_of_each_kind_of_op_leave(
    how: Callable[[torch.Tensor], torch.Tensor], beyond: Callable[[str], int]
) -> None:
    want = _kept(how)
    with memmgr.budget(beyond("6MB"), quiet=True, verify=True) as mm:
        assert _kept(how) == want
    assert mm.stats()["offloads"] + mm.stats()["evictions"] > 100


def test_an_older_small_tensor_stays_where_it_is(beyond: Callable[[str], int]) -> None:
    """Ops that return their argument have not made it. Its address is NumPy's, and of collectives under way."""
    older = [torch.zeros(4096) for _ in range(4)]
    views = [t.numpy() for t in older]
    with memmgr.budget(beyond("6MB"), quiet=True):
        kept = [torch.randn(4096) for _ in range(600)]
        cell = kept[-1]
        assert native.load().describe(cell) is not None
        older[0].copy_(cell)
        older[1].normal_()
        torch.add(cell, 1, out=older[2])
        with torch.no_grad():
            older[3].add_(cell)
        for t in older:
            info = native.load().describe(t)
            assert info is None or info["small"]
        kept += [torch.randn(4096) for _ in range(600)]
        for t, view in zip(older, views, strict=True):
            assert t.data_ptr() == view.ctypes.data and torch.equal(t, torch.from_numpy(view))
