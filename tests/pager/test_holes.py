"""What a hostile tester found: each wrong, dead or hanging without the rule that it names."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memmgr


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("policy", ["offload", "torture"])
def test_torchs_own_composites_that_read_an_address(kind: Any, policy: str, beyond: Callable[[str], int]) -> None:
    """A packed sequence's batch sizes are read by address for as long as the loop over them runs (rule 9)."""

    def run() -> list[float]:
        torch.manual_seed(0)
        with torch.no_grad():
            held = [torch.randn(256, 64) for _ in range(4)]
            packed = nn.utils.rnn.pack_sequence([torch.randn(n, 8) for n in (900, 600, 300)])
            out, _ = kind(8, 8)(packed)
            padded, lengths = nn.utils.rnn.pad_packed_sequence(out)
            return [padded.sum().item(), padded.abs().sum().item(), *lengths.tolist(), *(h.sum().item() for h in held)]

    want = run()
    limit = beyond("430kB") if policy == "offload" else "1GB"
    with memmgr.budget(limit, policy=policy, quiet=True) as mm:
        assert run() == want
    assert mm.stats()["offloads"] > 3


def test_indices_and_lengths_that_are_away() -> None:
    x, logits = torch.randn(300, 4), torch.randn(12, 2, 5).log_softmax(-1)
    targets, lengths = torch.tensor([[1, 2, 3], [2, 3, 1]]), (torch.tensor([12, 12]), torch.tensor([3, 3]))
    indices = torch.arange(10, 290, 2)
    pieces = [piece.sum().item() for piece in torch.tensor_split(x, indices)]
    loss = nn.functional.ctc_loss(logits, targets, *lengths).item()
    with memmgr.budget("1GB", policy="torture", quiet=True):
        assert [piece.sum().item() for piece in torch.tensor_split(x, indices)] == pieces
        assert nn.functional.ctc_loss(logits, targets, *lengths).item() == loss


@pytest.mark.parametrize("policy", ["auto", "torture"])
def test_a_budget_ends_while_another_thread_runs_ops(policy: str, beyond: Callable[[str], int]) -> None:
    """No op of it is about to pin what the end takes away, and all comes back (rule 13)."""
    limit = beyond("600kB") if policy == "auto" else "1GB"
    for _ in range(25):
        tensors = [torch.ones(200, 200) for _ in range(6)]
        stop, failed = threading.Event(), []

        def work(tensors: list[torch.Tensor] = tensors, stop: Any = stop, failed: Any = failed) -> None:
            try:
                while not stop.is_set():
                    for t in tensors:
                        t.mul_(1.0).add_(0.0)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=work)
        with memmgr.budget(limit, policy=policy, quiet=True):
            thread.start()
            time.sleep(0.011)
        time.sleep(0.005)
        stop.set()
        thread.join(60)
        assert not thread.is_alive() and not failed, failed
        assert all(t.sum().item() == 40000 for t in tensors)


MKLDNN = """
import sys, torch, memmgr
x = torch.randn(1, 8, 64, 64)
if sys.argv[1] == "inside":
    with memmgr.budget("1GB", quiet=True):
        y = torch.relu(x.to_mkldnn())
    del y
else:
    y = torch.relu(x.to_mkldnn())
    with memmgr.budget("1GB", quiet=True):
        del y
print("survived")
"""


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("made", ["inside", "before"])
def test_memory_that_is_freed_by_asking_for_the_allocator_again(made: str) -> None:
    """oneDNN's tensors end by whatever allocator is in place then, which is another one than they came from."""
    done = subprocess.run([sys.executable, "-c", MKLDNN, made], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "survived" in done.stdout, done.stderr
