"""Objects that torch.distributed takes have names of their own: `python -m job.holders RANK WORLD FOLDER`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import memmgr
from memmgr.native import binding as native
from memmgr.observe.error_text import NAMED_KINDS
from memmgr.observe.memory_inventory import holders

from . import matrix, ranks


def kinds(model: torch.nn.Module) -> dict[str, int]:
    """In the middle of a step, and in the words of an error there."""
    pager: Any = native.load()
    model(matrix._rows(0)).square().mean().backward()
    y = model(matrix._rows(1))
    found, _ = holders(pager, "cpu", rest=pager.resident_cells())
    try:
        torch.ones(100_000_000)
    except memmgr.BudgetError as error:
        words = str(error)
    y.square().mean().backward()
    largest = sorted(found, key=lambda name: found[name])[-NAMED_KINDS:]  # the text sums the others up
    assert all(name in words for name in largest), (found, words)
    return found


def main(rank: int, world: int, folder: Path) -> None:
    ranks.join(rank, world, folder, 30)
    with memmgr.budget("50MB", quiet=True):
        ddp = matrix._ddp()
        parameters = sum(p.nbytes for p in ddp.parameters())
        found = kinds(ddp)
        assert found["gradient buckets"] >= parameters, found
        assert found["gradients"] >= parameters and found["parameters"] >= parameters
        del ddp
        fsdp = matrix._fsdp(reshard_after_forward=False)
        found = kinds(fsdp)
        assert found["gathered parameters"] >= parameters, found
        assert parameters / world <= found["parameters"] < parameters  # the shards


if __name__ == "__main__":
    ranks.run(main)
