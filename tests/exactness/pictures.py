"""The data set of tests/exactness/test_children.py, and an unmodified script that trains with it: `python -m
exactness.pictures CONTEXT`. A spawned worker imports this module, so it imports no more than torch."""

import sys

import torch
from torch.utils.data import Dataset

BIG_BYTES = 512 << 20
"""More than any budget of this file: an allocation of it succeeds only where no budget is kept."""


class Pictures(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Trains a little of its own in the worker, and proves that no budget is kept there."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert torch.utils.data.get_worker_info() is not None, "not in a worker"
        torch.empty(BIG_BYTES // 4)
        g = torch.Generator().manual_seed(index)
        x = torch.randn(3, 16, 16, generator=g)
        w = torch.randn(16, 16, generator=g).requires_grad_()
        (x @ w).tanh().exp().sum().backward()
        assert w.grad is not None
        return x + w.grad * 0.01, torch.rand(()) * 0 + torch.tensor(float(index % 5))


class WorkerState:
    """``worker_init_fn``: runs in each worker before its first item."""

    def __call__(self, worker: int) -> None:
        torch.set_num_threads(1)


def main(context: str) -> None:
    """An unmodified training script with workers; prints a digest of its parameters."""
    import contextlib
    import hashlib

    from . import children
    from .test_children import loader

    children.arm()
    torch.manual_seed(0)
    record = loader(context, context == "spawn")(0, contextlib.nullcontext)
    print("DIGEST", hashlib.sha1(repr(sorted(record.items())).encode()).hexdigest())


if __name__ == "__main__":
    main(sys.argv[1])
