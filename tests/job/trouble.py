"""One rank of a job in which one comes to grief: `python -m job.trouble RANK WORLD FOLDER MODEL TROUBLE`."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from exactness import children
from torch import nn

import memmgr
from memmgr.runtime import job

from . import ranks

BUDGET = 40_000_000
STEP = 2  # in which it happens
KILLED = {"SIGKILL", "lost", "store", "no budget"}
"""Its process is killed: with neighbours that see it; on a host of its own; with the store that it has; without a budget."""
WITH_STORE = {"store", "none, with the store"}
LIVES_SECONDS = 20.0  # the process in trouble goes on so long, connections and all


def _model(kind: str, world: int) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(3)])
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _train(model: nn.Module, here: bool, trouble: str, folder: Path) -> None:
    opt = torch.optim.AdamW(model.parameters())
    for step in range(5):
        if trouble.startswith("none") and step == STEP and not here:
            return
        if here and step == STEP:
            (folder / "when").write_text(str(time.time()))
            if trouble in KILLED:
                os.kill(os.getpid(), signal.SIGKILL)
            if trouble.startswith("none"):
                return  # in order, before the others
            if trouble in ("ValueError", "again"):
                raise ValueError("the batch is not what it was")
            torch.ones(BUDGET)
        model(torch.randn(64, 64)).square().mean().backward()
        opt.step()
        opt.zero_grad()


def _once_more(kind: str, rank: int, world: int, folder: Path) -> None:
    """All ranks begin again, as a script does that handles the error."""
    dist.destroy_process_group()
    folder = folder / "again"
    folder.mkdir(exist_ok=True)
    ranks.join(rank, world, folder, 60)
    with memmgr.budget(BUDGET, quiet=True):
        _train(_model(kind, world), False, "", folder)
    ranks.write(folder, rank)


def main(rank: int, world: int, folder: Path, kind: str, trouble: str) -> None:
    join = ranks.join_with_store if trouble in WITH_STORE else ranks.join
    join(rank, world, folder, 60)
    if trouble == "lost":
        job._place = lambda: f"host {rank}"
    model = _model(kind, world)
    here = rank == (0 if trouble in WITH_STORE else world - 1)
    unmanaged = here and trouble == "no budget"
    awaited = (RuntimeError,) if trouble == "no budget" else (memmgr.RankError, memmgr.BudgetError, ValueError)
    try:
        with contextlib.nullcontext() if unmanaged else memmgr.budget(BUDGET, quiet=True):
            _train(model, here, trouble, folder)
            if trouble.startswith("none") and not here:
                time.sleep(3)
                assert not any(each._heard.is_set() for each in gc.get_objects() if isinstance(each, job.Job))
    except awaited as error:
        ranks.write(
            folder,
            rank,
            error=type(error).__name__,
            text=str(error),
            who=getattr(error, "rank", None),
            floor_bytes=getattr(error, "floor_bytes", 0),
            enough_bytes=getattr(error, "enough_bytes", 0),
            when=time.time(),
        )
        if trouble == "again":
            _once_more(kind, rank, world, folder)
            return
        if here:  # the process lives on, with its connections, until the others are gone
            end = time.monotonic() + LIVES_SECONDS
            while time.monotonic() < end and any(ranks.read(folder, other) is None for other in range(world)):
                time.sleep(0.05)


if __name__ == "__main__":
    children.arm()
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5])
    sys.stdout.flush()
    if sys.argv[5] in WITH_STORE:
        atexit._run_exitfuncs()
    os._exit(0)  # gloo's own threads now and then crash in the interpreter's last moments, with or without us
