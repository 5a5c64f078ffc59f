"""A rank that prints more than a pipe holds while the others wait for it: `python -m job.talkative RANK WORLD FOLDER`."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from . import ranks

BYTES = 1 << 20


def main(rank: int, world: int, folder: Path) -> None:
    ranks.join(rank, world, folder, 30)
    if rank > 0:
        print("x" * BYTES, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks.run(main)
