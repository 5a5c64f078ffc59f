"""Forked children: tensors that were absent in the parent are restored there, from inherited bytes; the child does no
other work of memmgr's."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import forkserver
import pytest
import torch
from threads import in_threads
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memmgr
from memmgr.native import binding as native

from .raw_reads import READS, same

pytestmark = [pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")]  # 3.12 warns of fork beside threads

LIMIT = "64MB"


@pytest.fixture
def pager() -> Iterator[native.Pager]:
    with memmgr.budget(LIMIT, quiet=True):
        yield native.load()


def _numbers(n: int = 4096) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float32) * 1.5


class Child:
    """Runs `body` in a forked child; `ends_well` waits for it."""

    def __init__(self, body: Callable[[], None], seconds: int = 30) -> None:
        self._pid = os.fork()
        if self._pid == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            code = 1
            try:
                body()
                code = 0
            except BaseException as error:
                print(f"in the child: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(code)

    def ends_well(self) -> None:
        assert os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1]) == 0


def _both_ways(pager: native.Pager) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A root, a tensor made from it and dropped, and a tensor in the file."""
    root = nn.Parameter(_numbers())
    for _ in range(2):  # the second of its kind is trusted
        evicted = (root * 2.5).detach()
    offloaded = _numbers() + 1
    assert pager.take_away(evicted, 0) > 0 and pager.take_away(offloaded, 1) > 0
    residencies = [info["residency"] for info in (pager.describe(evicted), pager.describe(offloaded)) if info]
    assert residencies == ["evicted", "offloaded"]
    return root, evicted, offloaded


READERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "op": lambda t: t + 0,
    "numpy": lambda t: torch.from_numpy(t.numpy()),
    **{name: READS[name] for name in ("tolist", "storage list", "save")},
}


@pytest.mark.parametrize("reader", READERS)
def test_what_was_away_comes_back(pager: native.Pager, reader: str) -> None:
    _, evicted, offloaded = _both_ways(pager)
    want = [torch.arange(4096, dtype=torch.float32) * 1.5 * 2.5, torch.arange(4096, dtype=torch.float32) * 1.5 + 1]
    read = READERS[reader]

    def body() -> None:
        for wanted, tensor in zip(want, (evicted, offloaded), strict=True):
            assert same(read(tensor), read(wanted))
        assert pager.stats()["absent_cells"] == 0

    Child(body).ends_well()
    assert pager.stats()["absent_cells"] == 2  # and in the parent nothing has moved
    assert torch.equal(evicted, want[0]) and torch.equal(offloaded, want[1])


def test_what_a_child_writes_to_a_root_is_not_what_its_dependants_were_made_of(pager: native.Pager) -> None:
    root, evicted, _ = _both_ways(pager)
    want = root.detach() * 2.5

    def body() -> None:
        with torch.no_grad():
            root.fill_(7.0)
        assert torch.equal(evicted, want)
        assert torch.equal(root, torch.full_like(root, 7.0))

    Child(body).ends_well()


def test_a_thread_of_a_child_is_seen(pager: native.Pager) -> None:
    _, evicted, offloaded = _both_ways(pager)
    want = evicted.sum().item() + offloaded.sum().item()
    assert pager.take_away(evicted, 0) > 0 and pager.take_away(offloaded, 1) > 0

    def body() -> None:
        got: list[float] = []
        in_threads(lambda _: got.append(evicted.sum().item() + offloaded.sum().item()), range(1))
        assert got == [want]

    Child(body).ends_well()


def test_a_child_takes_memory_of_its_own_and_lets_go_of_nothing(pager: native.Pager) -> None:
    _, evicted, _ = _both_ways(pager)

    def body() -> None:
        kept = [torch.ones(1 << 22) for _ in range(8)]  # twice the budget
        assert all(t.sum().item() == 1 << 22 for t in kept)
        before = len(os.listdir("/proc/self/task"))  # torch's own for parallel loops
        evicted.sum()
        (nn.Parameter(kept[0]) * 2).sum().backward()
        assert len(os.listdir("/proc/self/task")) == before
        assert pager.take_away(evicted, 1) == 0

    Child(body).ends_well()


def test_the_parent_goes_on_while_a_child_reads(pager: native.Pager) -> None:
    """Its file is the child's, too: room that it gives back is not overwritten while the child can read it."""
    away = [_numbers() + i for i in range(8)]
    want = [t.clone() for t in away]
    assert all(pager.take_away(t, 1) > 0 for t in away)
    go, ready = os.pipe()

    def body() -> None:
        os.close(ready)
        os.read(go, 1)
        for tensor, wanted in zip(away, want, strict=True):
            assert torch.equal(tensor, wanted)

    child = Child(body)
    os.close(go)
    with torch.no_grad():
        for _ in range(3):
            for tensor in away:
                tensor.mul_(-1)  # restored, and its copy in the tier is void
                assert pager.take_away(tensor, 1) > 0
    os.write(ready, b"!")
    os.close(ready)
    child.ends_well()


def _opens(limit: str) -> None:
    with pytest.raises(RuntimeError, match=r"forked.*spawn"), memmgr.budget(limit, quiet=True):
        pass


def test_a_child_has_no_budget_of_its_own(pager: native.Pager) -> None:
    away = _both_ways(pager)[2]

    def body() -> None:
        _opens(LIMIT)
        _opens(LIMIT)
        assert away[3].item() == 5.5  # and the inherited tensor has its old bytes

    Child(body).ends_well()


def test_nor_after_its_parents_has_ended() -> None:
    with memmgr.budget(LIMIT, quiet=True):
        pass
    Child(lambda: _opens(LIMIT)).ends_well()


def test_but_it_has_where_there_was_none_yet() -> None:
    script = """
        import os
        import torch
        import memmgr
        from memmgr.native import binding

        binding.load()
        pid = os.fork()
        if pid == 0:
            with memmgr.budget("64MB", quiet=True) as mm:
                t = torch.ones(1 << 16) * 3
                assert binding.load().take_away(t, 1) > 0
                ok = t.sum().item() == 3 << 16
            os._exit(0 if ok else 1)
        print("ended", os.waitpid(pid, 0)[1])
    """
    ended = forkserver.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.stdout.strip().endswith("ended 0"), ended.stdout + ended.stderr


def test_a_fork_amid_other_threads_ops(beyond: Callable[[str], int]) -> None:
    """In any state of theirs: no thread in the child waits for them, and a tensor that they moved is resident or
    absent, never half."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def train(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            w = nn.Parameter(torch.randn(64, 64, generator=generator))
            while not stop.is_set():
                (w @ w).tanh().exp().sigmoid().sum().backward()
                w.grad = None
        except BaseException as error:
            errors.append(error)

    with memmgr.budget(beyond("4MB"), policy="torture", quiet=True):
        pager = native.load()
        data = [_numbers() + i for i in range(16)]
        want = [float(t.double().sum()) for t in data]
        threads = [threading.Thread(target=train, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()

        def body() -> None:
            assert [float(t.double().sum()) for t in data] == want
            # No product of matrices and no backward: MKL and torch have locks there that another thread may have at the fork.
            assert (torch.ones(64, 64) * 3).exp().log().round().sum().item() == 64 * 64 * 3

        try:
            for _ in range(25):
                for t in data:
                    pager.take_away(t, 1)
                Child(body).ends_well()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not errors, errors


@pytest.mark.parametrize("persistent", [False, True])
def test_a_dataset_in_memory_that_is_away(pager: native.Pager, persistent: bool) -> None:
    data = torch.randn(64, 1024)
    labels = torch.arange(64)
    want = data.clone()
    loader = DataLoader(
        TensorDataset(data, labels),
        batch_size=8,
        num_workers=2,
        persistent_workers=persistent,
        multiprocessing_context=multiprocessing.get_context("fork"),
    )
    assert pager.take_away(data, 1) > 0
    for _ in range(2):
        seen = [(x, y) for x, y in loader]
        assert torch.equal(torch.cat([x for x, _ in seen]), want)
        assert torch.equal(torch.cat([y for _, y in seen]), labels)
        info = pager.describe(data)
        assert info is not None and info["residency"] == "offloaded"
    loader._iterator = None
