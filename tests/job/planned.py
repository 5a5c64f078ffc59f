"""Ranks get plans and follow them: `python -m job.planned RANK WORLD FOLDER`, FSDP2 and a pipeline of two stages."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import memmgr
from memmgr.api import budget as budgets

from . import ranks

WIDTH, MOST_STEPS = 128, 60


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def fsdp2() -> Callable[[], None]:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(*(Layer() for _ in range(6)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    x = torch.randn(64, WIDTH)
    return _step(model, lambda: model(x).square().mean().backward())


def pipeline() -> Callable[[], None]:
    from torch.distributed import pipelining

    rank, world = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(*(Layer() for _ in range(4)))
    stage = pipelining.PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, n_microbatches=4, loss_fn=F.mse_loss)
    x = torch.randn(4 * 256, WIDTH)
    return _step(model, lambda: schedule.step(x) if rank == 0 else schedule.step(target=x))


def _step(model: nn.Module, backward: Callable[[], Any]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def planned(make: Callable[[], Callable[[], None]], passes: int) -> None:
    """Within some steps a whole one follows its plan, on all ranks."""
    torch.manual_seed(0)
    with memmgr.budget(None, quiet=True) as measured:
        step = make()
        for _ in range(3):
            step()
    need = measured.stats()["unmanaged_peak_bytes"]
    del step
    with memmgr.budget(int(0.6 * need), quiet=True) as mm:
        step = make()
        followed = before = 0
        for _ in range(MOST_STEPS):
            step()
            runtime: Any = budgets.current()
            runtime.plans.wait()
            now = mm.stats()["planned_passes"]
            worst = torch.tensor([now - before])
            before = now
            dist.all_reduce(worst, dist.ReduceOp.MIN)
            followed = followed + 1 if worst.item() >= passes else 0
            if followed == 2:
                return
    raise AssertionError(f"{make.__name__}: no plan was followed in {MOST_STEPS} steps, {mm.stats()}")


def main(rank: int, world: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    ranks.join(rank, world, folder, 60)
    planned(fsdp2, 1)
    planned(pipeline, 4)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks.run(main)
