"""A rank comes to grief within its optimizer's step while slices of the other's wait (rule 14):
`python -m job.unfinished RANK WORLD FOLDER TROUBLE`.

The ranks train the same on the same rows, so that a training without ranks gives the survivor's bits.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from exactness.harness import Record, assert_same
from torch import nn

import memmgr
from memmgr.native import binding as native

from . import ranks

WIDTH, DEPTH = 96, 8
BUDGET = 500_000  # parameters, gradients and states take 1.2 MB
STEP = 2  # in which it happens


def _begun() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def _backward(model: nn.Module, step: int) -> None:
    rows = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
    model(rows).square().mean().backward()


def _record(model: nn.Module, opt: torch.optim.Optimizer) -> Record:
    record = Record()
    record.model(model)
    record.optimizer(opt)
    return record


def _fails(trouble: str, folder: Path) -> None:
    """From now on a step does half of its work, and then that happens."""
    adam: Any = sys.modules["torch.optim.adam"]
    original = adam._fused_adam

    def half(params: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        n = len(params) // 2
        parts = [a[:n] if isinstance(a, list) and len(a) == len(params) else a for a in args]
        original(params[:n], *parts, **kwargs)
        (folder / "when").write_text(str(time.time()))
        if trouble == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if trouble == "BudgetError":
            torch.ones(BUDGET)
        raise ValueError("half a step")

    adam._fused_adam = half


def main(rank: int, world: int, folder: Path, trouble: str) -> None:
    ranks.join(rank, world, folder, 60)
    here = rank == world - 1
    model, opt = _begun()
    try:
        with memmgr.budget(BUDGET, quiet=True):
            for step in range(STEP + 1):
                _backward(model, step)
                for p in model.parameters():
                    dist.all_reduce(p.grad)
                    p.grad.div_(world)
                if step == STEP and here:
                    _fails(trouble, folder)
                before = native.load().stats()["pending_slices"]
                opt.step()
                opt.zero_grad()
            waiting = native.load().stats()["pending_slices"] - before
            assert waiting > 0, "nothing waits, so nothing is tested"
            rows = model[: DEPTH // 2](torch.ones(1, WIDTH))  # some of them run
            dist.all_reduce(rows)
    except (memmgr.RankError, memmgr.BudgetError, ValueError) as error:
        if here:
            ranks.write(folder, rank, error=type(error).__name__)
            end = time.monotonic() + 20  # with its connections
            while time.monotonic() < end and ranks.read(folder, 0) is None:
                time.sleep(0.05)
            return
        assert isinstance(error, memmgr.RankError) and error.rank == world - 1, error
        got = _record(model, opt)
        alone, its = _begun()
        for step in range(STEP + 1):
            _backward(alone, step)
            its.step()
            its.zero_grad()
        assert_same(_record(alone, its), got, f"{trouble}: the step that waited")
        took = time.time() - float((folder / "when").read_text())
        ranks.write(folder, rank, took=took, waiting=waiting)


if __name__ == "__main__":
    ranks.run(main)
