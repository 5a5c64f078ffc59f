"""A rank that prints more than a pipe holds while the others wait for it: `python -m job.talkative RANK WORLD FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.distributed as dist
from exactness import children

from . import ranks

BYTES = 1 << 20


def main(rank: int, world: int, folder: Path) -> None:
    ranks.join(rank, world, folder, 30)
    if rank > 0:
        print("x" * BYTES, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    children.arm()
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)  # as in chance.py
