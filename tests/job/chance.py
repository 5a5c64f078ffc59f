"""Ranks that differ in all that may differ: `python -m job.chance RANK WORLD FOLDER SECONDS SEED`.

Each round is one way to be parallel, or a row of collectives. Each rank has a budget, a policy and a plan of its own, or none;
delays of its own between the steps; the bits are the unmanaged job's, and after each step no pin is left.
"""

import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from exactness.harness import HUGE_BYTES, assert_same, managed, need, reference, unmanaged

import memmgr

from . import matrix, ranks
from .ranks import no_pins

WAYS = ["ddp", "ddp_bucket_views", "ddp_unused", "fsdp2_reshard", "fsdp2_keep", "tp_colwise_rowwise", "pp_1f1b"]
WAYS += ["pp_gpipe", "ring_attention", "expert_parallel"]
SIZE = 4096
MOST_DELAY_SECONDS = 0.03
ROOM = 1.3  # of the floor: a late bucket is a tenth of it here, and no rank shall end for want of it


def _delayed(own: random.Random, rows: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def wait_and_draw(*args: Any, **kwargs: Any) -> torch.Tensor:
        if own.random() < 0.3:
            time.sleep(own.random() * MOST_DELAY_SECONDS)
        return rows(*args, **kwargs)

    return wait_and_draw


def _one_way(name: str, own: random.Random) -> str:
    fn = matrix.CASES[name]
    want, measured = reference(fn), need(fn)
    most = torch.tensor([measured.floor_bytes])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    how = own.choice(["budget", "budget", "budget", "tight", "torture", "offload", "none"])
    if how == "none":
        assert_same(want, unmanaged(fn), f"{name}, unmanaged")
        return how
    share = 0.0 if how == "tight" else own.uniform(0.4, 1.1)
    limit = max(int(share * measured.peak_bytes), int(ROOM * most.item()))
    policy = how if how in ("torture", "offload") else "auto"
    plan = own.random() < 0.5
    got = managed(fn, HUGE_BYTES if how == "torture" else limit, policy, _plan=plan)
    how += f" {limit:,}, plan {plan}"
    assert_same(want, got.record, f"{name}, {how}")
    return how


def _collectives(shared: random.Random, own: random.Random) -> str:
    """Long-running collectives, while every tensor is evicted and freed memory is filled with poison."""
    rank, world = dist.get_rank(), dist.get_world_size()
    said = []
    with memmgr.budget("1GB", policy="torture", quiet=True):
        for _ in range(8):
            kind, keep = shared.choice(list(KINDS)), own.choice(["work", "future"])
            said.append(kind)
            mine = torch.arange(SIZE, dtype=torch.float32) + rank
            if own.random() < 0.5:
                time.sleep(own.random() * 0.1)
            begin, check = KINDS[kind]
            work, out = begin(mine, rank, world)
            waits = work
            if keep == "future" and kind not in NO_FUTURE:
                waits = work.get_future()
                del work
            for _ in range(own.randrange(10)):
                torch.ones(SIZE).add_(1)
            waits.wait()
            del waits
            work = None
            assert check(out, rank, world), f"rank {rank}: {kind}, {keep} held"
            del out, mine
            no_pins()
        dist.barrier()
    return ", ".join(said)


def _row(rank: int) -> torch.Tensor:
    return torch.arange(SIZE, dtype=torch.float32) + rank


def _all_reduce(mine: torch.Tensor, rank: int, world: int) -> Any:
    return dist.all_reduce(mine, async_op=True), mine


def _broadcast(mine: torch.Tensor, rank: int, world: int) -> Any:
    return dist.broadcast(mine, src=world - 1, async_op=True), mine


def _all_gather(mine: torch.Tensor, rank: int, world: int) -> Any:
    out = torch.empty(world * SIZE)
    return dist.all_gather_into_tensor(out, mine, async_op=True), out


def _reduce_scatter(mine: torch.Tensor, rank: int, world: int) -> Any:
    out = torch.empty(SIZE // world)
    return dist.reduce_scatter_tensor(out, mine, async_op=True), out


def _all_to_all(mine: torch.Tensor, rank: int, world: int) -> Any:
    out = torch.empty(SIZE)
    return dist.all_to_all_single(out, mine, async_op=True), out


class _Both:
    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _send(mine: torch.Tensor, rank: int, world: int) -> Any:
    out = torch.empty(SIZE)
    ops = [dist.P2POp(dist.isend, mine, (rank + 1) % world), dist.P2POp(dist.irecv, out, (rank - 1) % world)]
    return _Both(dist.batch_isend_irecv(ops)), out


def _total(world: int) -> torch.Tensor:
    return torch.stack([_row(r) for r in range(world)]).sum(0)


KINDS: dict[str, tuple[Callable[..., Any], Callable[..., bool]]] = {
    "all-reduce": (_all_reduce, lambda out, rank, world: torch.equal(out, _total(world))),
    "broadcast": (_broadcast, lambda out, rank, world: torch.equal(out, _row(world - 1))),
    "all-gather": (_all_gather, lambda out, rank, world: torch.equal(out, torch.cat([_row(r) for r in range(world)]))),
    "reduce-scatter": (_reduce_scatter, lambda out, rank, world: torch.equal(out, _total(world).chunk(world)[rank])),
    "all-to-all": (
        _all_to_all,
        lambda out, rank, world: torch.equal(out, torch.cat([_row(r).chunk(world)[rank] for r in range(world)])),
    ),
    "send and receive": (_send, lambda out, rank, world: torch.equal(out, _row((rank - 1) % world))),
}


NO_FUTURE = {"reduce-scatter", "send and receive"}
"""Collectives of gloo: their Works are marked as done in wait() alone."""


def main(rank: int, world: int, folder: Path, seconds: str, seed: str) -> None:
    warnings.simplefilter("ignore")
    ranks.join(rank, world, folder, 60)
    shared, own = random.Random(int(seed)), random.Random(1000 * int(seed) + rank)
    matrix._rows = _delayed(own, matrix._rows)
    end, rounds = time.monotonic() + float(seconds), 0
    while True:
        go = torch.tensor([int(time.monotonic() < end)])
        dist.broadcast(go, src=0)
        if not go.item():
            break
        name = shared.choice([*WAYS, "collectives", "collectives"]) if rounds else "collectives"
        how = _collectives(shared, own) if name == "collectives" else _one_way(name, own)
        rounds += 1
        print(f"{rounds}: {name}: {how}", flush=True)
    assert rounds > 0
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks.run(main)
