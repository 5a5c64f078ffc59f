"""The floor of a rank is the smallest budget that works for it: `python -m job.floors RANK WORLD FOLDER CASE...`.

A twentieth more runs, a twentieth less raises and says so, for each rank in turn while the others have room.
"""

from __future__ import annotations

import gc
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from exactness.harness import HUGE_BYTES, assert_same, managed, need, reference

import memmgr
from memmgr.distributed.job import _budget_error

from . import matrix, ranks


def check(name: str, folder: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    fn = matrix.CASES[name]
    want, floor = reference(fn), need(fn).floor_bytes
    for who in range(world):
        got = managed(fn, int(1.05 * floor) if rank == who else HUGE_BYTES)
        assert_same(want, got.record, f"{name}, 1.05 of the floor of rank {who}")
    for who in range(world):
        named = 0
        try:
            managed(fn, int(0.95 * floor) if rank == who else HUGE_BYTES)
        except RuntimeError as error:
            mine = _budget_error(error)
            named = mine.floor_bytes if mine is not None else getattr(error, "floor_bytes", 0)
            assert (mine is not None) == (rank == who), error
            assert mine is not None or (isinstance(error, memmgr.RankError) and error.rank == who), error
            error.__traceback__ = error.__cause__ = error.__context__ = None
        gc.collect()
        dist.destroy_process_group()
        again = folder / f"{name}{who}"
        again.mkdir(exist_ok=True)
        ranks.join(rank, world, again, 30)
        every = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(every, torch.tensor([named]))
        floors = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(floors, torch.tensor([floor]))
        # All ranks have received the same error, in any form that the pipeline's runtime gave it.
        assert len({each.item() for each in every}) == 1, every
        assert 0.95 * floors[who].item() < named <= 1.05 * floors[who].item(), (name, who, named, floors)
    print(f"{name}: floor {floor:,}", flush=True)


def main(rank: int, world: int, folder: Path, *names: str) -> None:
    warnings.simplefilter("ignore")
    ranks.join(rank, world, folder, 30)
    for name in names:
        check(name, folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks.run(main)
