"""DataLoader workers and other children stay unmanaged, and take nothing of the parent's with them."""

import hashlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from . import cases, children
from .harness import HUGE_BYTES, Record, Scope, assert_same, bits, check, managed, reference
from .pictures import Pictures, WorkerState

pytestmark = [pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")]  # 3.12 warns of fork beside threads


def loader(context: str, persistent: bool) -> Callable[[int, Scope], Record]:
    def fn(seed: int, scope: Scope) -> Record:
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Dropout(0.1),
            nn.Conv2d(8, 8, 3),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(8 * 14 * 14, 5),
        )
        opt, record = cases.adamw(model), Record()
        loader = DataLoader(
            Pictures(),
            batch_size=12,
            shuffle=True,
            num_workers=2,
            multiprocessing_context=context,
            persistent_workers=persistent,
            worker_init_fn=WorkerState(),
        )
        with scope():
            for _ in range(2):
                for x, y in loader:
                    opt.zero_grad()
                    loss = nn.functional.cross_entropy(model(x), y.long())
                    loss.backward()
                    opt.step()
                    record.losses(loss.detach())
            del x, y, loss
            if persistent:
                loader._iterator._shutdown_workers()
                loader._iterator = None
        return record.ended(model, opt)

    return fn


LOADERS = {
    f"{context}{'-persistent' * persistent}": loader(context, persistent)
    for context, persistent in (("fork", False), ("fork", True), ("spawn", True))
}


# A worker that was spawned has nothing of its parent's budget: one mode is enough for those, and it is slow, because
# `test_workers_of_an_unmodified_script` spawns some, too. Persistent workers differ in when they end.
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("fork", "torture"),
        pytest.param("fork", "auto@50", marks=pytest.mark.slow),  # persistent workers fork in the same way
        ("fork-persistent", "auto@50"),
        pytest.param("fork-persistent", "torture", marks=pytest.mark.slow),
        pytest.param("spawn-persistent", "auto@50", marks=pytest.mark.slow),
    ],
)
def test_loader_workers(name: str, mode: str) -> None:
    if mode == "torture":  # under a limit that BIG_BYTES would pass
        got = managed(LOADERS[name], 256 << 20, "torture", place="loop")
        assert_same(reference(LOADERS[name]), got.record, mode)
        assert got.stats["evictions"] + got.stats["offloads"] > 0
    else:  # workers give the same however they were started
        check(LOADERS[name], mode, like=LOADERS[name.replace("spawn", "fork")])


def _in_fork(body: Callable[[], Any], timeout: float = 30) -> bytes:
    """Runs ``body`` in a forked child and returns the bytes that it returns."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(read)
            signal.alarm(int(timeout))
            os.write(write, body())
            status = 0
        except BaseException as e:
            os.write(write, f"ERROR {type(e).__name__}: {e}".encode())
        finally:
            os._exit(status)
    os.close(write)
    answer = b""
    while chunk := os.read(read, 1 << 16):
        answer += chunk
    os.close(read)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with {status}: {answer[:500]!r}"
    return answer


def _digest(*tensors: torch.Tensor) -> bytes:
    return hashlib.sha1(b"".join(bits(t).data for t in tensors)).digest()


def _forks(body: Callable[[nn.Module, torch.Tensor, Record], None]) -> Callable[[int, Scope], Record]:
    def fn(seed: int, scope: Scope) -> Record:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # OpenMP's own threads do not survive a fork
        try:
            model, record = cases.MLP(), Record()
            opt = cases.adamw(model)
            with scope():
                for step in range(6):
                    loss = model(torch.randn(128, 32)).square().mean()
                    if step in (0, 3, 5):  # before any plan, and under one
                        body(model, loss, record)
                    loss.backward()
                    opt.step()
                    opt.zero_grad()
                    record.losses(loss.detach())
            del loss
            return record.ended(model)
        finally:
            torch.set_num_threads(threads)

    return fn


def _child_writes(model: nn.Module, loss: torch.Tensor, record: Record) -> None:
    """A child's writes into inherited tensors are its own: the arena is private memory."""

    def body() -> bytes:
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(7.0)
        return _digest(*model.parameters())

    answer = _in_fork(body)
    record.put(f"child[{len(record)}]", answer.hex())


def _child_runs_backward(model: nn.Module, loss: torch.Tensor, record: Record) -> None:
    """The inherited graph works in the child; its cells may lie in the parent's disk tier."""

    def body() -> bytes:
        loss.backward()
        return _digest(*[p.grad for p in model.parameters()])

    record.put(f"child[{len(record)}]", _in_fork(body).hex())


def _child_frees_everything(model: nn.Module, loss: torch.Tensor, record: Record) -> None:
    def body() -> bytes:
        import gc

        nonlocal model, loss
        digest = _digest(*model.parameters())
        del model, loss
        gc.collect()
        torch.randn(1000).sum()
        return digest

    record.put(f"child[{len(record)}]", _in_fork(body).hex())


def _child_trains(model: nn.Module, loss: torch.Tensor, record: Record) -> None:
    def body() -> bytes:
        model.zero_grad()
        for _ in range(3):
            model(torch.randn(64, 32)).square().mean().backward()
        return _digest(*[p.grad for p in model.parameters()], torch.get_rng_state())

    record.put(f"child[{len(record)}]", _in_fork(body).hex())


FORKS = {
    f.__name__[1:]: _forks(f) for f in (_child_writes, _child_runs_backward, _child_frees_everything, _child_trains)
}


# A child that reads inherited cells does so by the mode: backward reads more than parameters, and runs in all modes.
_EACH_MODE = ("child_runs_backward",)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=[pytest.mark.slow] * (mode != "torture" and name not in _EACH_MODE))
        for name in FORKS
        for mode in ("torture", "offload@50", "evict@50")
    ],
)
def test_forked_child(name: str, mode: str) -> None:
    if mode == "torture":
        got = managed(FORKS[name], 256 << 20, "torture", place="loop")
        assert_same(reference(FORKS[name]), got.record, mode)
    else:
        check(FORKS[name], mode)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_an_unmodified_script(context: str) -> None:
    """``MEMMGR_BUDGET`` is inherited by the workers' environment and must arm nothing there."""

    # The workers allocate more than the budget and train a little: they assert for themselves. (The digest of this script
    # differs from run to run unmanaged too, so it is not compared.)
    output = children.run("pictures", context, timeout=90, env={"MEMMGR_BUDGET": "256MB"})
    assert "DIGEST" in output


def test_a_child_leaves_no_process_behind() -> None:
    before = _descendants()
    managed(LOADERS["fork"], HUGE_BYTES, "auto", place="loop")
    deadline = time.monotonic() + 5
    while _descendants() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _descendants() - before


KEPT = ("resource_tracker", "forkserver", "planner_child")  # for the process's life


def _descendants() -> set[int]:
    import psutil

    return {
        p.pid
        for p in psutil.Process().children(recursive=True)
        if not any(name in " ".join(p.cmdline()) for name in KEPT)
    }
