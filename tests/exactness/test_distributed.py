"""Issue 2, point 1: DDP, FSDP2 and collectives, gloo on two ranks.

Each case runs in two processes of its own: ``python -m exactness.test_distributed CASE RANK FILE``.  Both ranks run it
unmanaged, then managed; the last mode manages the ranks *differently*, so that an op that one rank replays is not
replayed by the other: a collective that is run once more then hangs, or adds twice.
"""

from __future__ import annotations

import datetime
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from job.ranks import finish_all
from torch import nn

from . import cases, children
from .harness import HUGE_BYTES, CaseFunction, Record, Scope, assert_same, managed, need, reference

RANKS = 2
DISTRIBUTED: dict[str, CaseFunction] = {}


def distributed(fn: CaseFunction) -> CaseFunction:
    DISTRIBUTED[fn.__name__] = fn
    return fn


def _batches(n: int = 5, rows: int = 384) -> list[torch.Tensor]:
    """Differs by rank, and so do the dropout masks."""
    torch.manual_seed(1000 + dist.get_rank())
    return [torch.randn(rows, 32) for _ in range(n)]


def _loop(model: nn.Module, scope: Scope, forward: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Record:
    record, opt = Record(), cases.adamw(model)
    data = _batches()
    with scope():
        for x in data:
            opt.zero_grad()
            loss = (forward or model)(x).square().mean()
            loss.backward()
            opt.step()
            record.losses(loss.detach())
    del loss
    record.model(model)
    record.rng()
    return record


@distributed
def ddp(seed: int, scope: Scope) -> Record:
    from torch.nn.parallel import DistributedDataParallel

    return _loop(DistributedDataParallel(cases.MLP(), bucket_cap_mb=1), scope)


@distributed
def ddp_gradients_as_bucket_views_and_no_sync(seed: int, scope: Scope) -> Record:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(cases.MLP(), gradient_as_bucket_view=True, find_unused_parameters=True)
    record, opt = Record(), cases.sgd(model)
    with scope():
        for i, x in enumerate(_batches(6)):
            if i % 2 == 0:
                with model.no_sync():
                    model(x).square().mean().backward()
                continue
            model(x).abs().mean().backward()
            opt.step()
            opt.zero_grad(set_to_none=False)
    record.model(model)
    record.rng()
    return record


def _fsdp2(reshard: bool, checkpointed: bool) -> CaseFunction:
    def fn(seed: int, scope: Scope) -> Record:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from torch.utils.checkpoint import checkpoint

        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.norm, self.b = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + F.dropout(self.b(F.gelu(self.norm(self.a(x)))), 0.1)

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(Block() for _ in range(3))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for block in self.blocks:
                    x = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
                return x

        mesh = init_device_mesh("cpu", (RANKS,))
        model = Model()
        policy = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            if checkpointed
            else MixedPrecisionPolicy()
        )
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        return _loop(model, scope)

    return fn


DISTRIBUTED["fsdp2_reshard"] = _fsdp2(True, False)
DISTRIBUTED["fsdp2_keep"] = _fsdp2(False, False)
DISTRIBUTED["fsdp2_reshard_checkpoint_bf16"] = _fsdp2(True, True)


@distributed
def all_reduce_in_forward(seed: int, scope: Scope) -> Record:
    """In place, on a tensor that a recorded op made; its schema hides the write."""
    model = cases.MLP(depth=2)

    def forward(x: torch.Tensor) -> torch.Tensor:
        h = model.blocks[0](x)
        mean = h.detach().mean(0) * 1.0
        work = dist.all_reduce(mean, async_op=True)
        assert work is not None
        work.wait()
        gate = (h + mean).exp().tanh()
        gathered = [torch.empty_like(mean) for _ in range(RANKS)]
        dist.all_gather(gathered, mean * (dist.get_rank() + 1))
        shared = torch.randn(32)
        dist.broadcast(shared, src=0)
        return model.blocks[1](gate * (h + gathered[0]).sigmoid() + shared * gathered[1].sin())

    return _loop(model, scope, forward)


@distributed
def functional_collectives_in_forward(seed: int, scope: Scope) -> Record:
    import torch.distributed._functional_collectives as fc
    from torch.distributed.nn.functional import all_reduce

    model = cases.MLP(depth=2)

    def forward(x: torch.Tensor) -> torch.Tensor:
        h = model.blocks[0](x)
        total = fc.all_reduce(h.detach().sin(), "sum", dist.group.WORLD)
        rows = fc.all_gather_tensor_autograd((h * total.exp()).tanh(), 0, dist.group.WORLD)
        part = fc.reduce_scatter_tensor_autograd(rows.exp() * rows, "sum", 0, dist.group.WORLD)
        part = all_reduce(part.tanh() * h) * part
        return model.blocks[1](part.tanh())

    return _loop(model, scope, forward)


@distributed
def tensor_parallel(seed: int, scope: Scope) -> Record:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(torch.tanh(self.b(F.gelu(self.a(x)).sigmoid())))

    torch.manual_seed(5)
    model = parallelize_module(
        Model(), init_device_mesh("cpu", (RANKS,)), {"a": ColwiseParallel(), "b": RowwiseParallel()}
    )
    record, opt = Record(), torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with scope():
        for i in range(5):
            torch.manual_seed(i)  # tensor parallel ranks see the same batch
            loss = model(torch.randn(384, 32)).square().mean()
            loss.backward()
            record.losses(loss.detach())
            opt.step()
            opt.zero_grad()
    del loss
    record.model(model)
    record.rng()
    return record


def main(name: str, rank: int, file: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS, timeout=datetime.timedelta(seconds=40)
    )
    fn = DISTRIBUTED[name]
    want = reference(fn)
    measured = need(fn)
    for place in ("loop", "inside"):
        assert_same(want, managed(fn, HUGE_BYTES, "torture", place=place).record, f"torture, {place}")
    for share in (1.0, 0.75, 0.5):
        assert_same(want, managed(fn, measured.limit(share), "auto").record, f"auto at {share:.0%}")
    limit = measured.limit(0.5)
    # FSDP's gathered parameters come out of collectives: they can be copied, never made again, so not "evict" alone.
    stats = managed(fn, limit, "price+auto").stats
    if limit < 0.95 * measured.peak_bytes:  # else the model states are nearly all there is
        assert stats["evictions"] + stats["offloads"] > 0, "nothing left, so nothing was tested"
    for one in range(RANKS):  # only one rank is managed
        if rank == one:
            assert_same(want, managed(fn, HUGE_BYTES, "torture").record, "torture on this rank alone")
        else:
            from .harness import unmanaged

            assert_same(want, unmanaged(fn), "unmanaged beside a managed rank")
    dist.barrier()
    dist.destroy_process_group()


# Each starts two processes twice over: `make test` runs the cases that tests/pager/test_distributed.py does not, the
# rest is slow.
_SLOW = {
    "ddp",
    "fsdp2_reshard",
    "fsdp2_keep",
    "fsdp2_reshard_checkpoint_bf16",
    "ddp_gradients_as_bucket_views_and_no_sync",
    "all_reduce_in_forward",
    "tensor_parallel",  # tests/job/test_matrix.py runs it with sequences
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in _SLOW else []) for name in DISTRIBUTED]
)
def test_same_bits_on_every_rank(name: str, tmp_path: Path) -> None:
    timeout = 150.0
    file = tempfile.mktemp(dir=tmp_path)
    ranks = [
        children.start(
            "test_distributed",
            name,
            str(rank),
            file,
            timeout=timeout,
            env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(RANKS)
    ]
    finish_all(ranks, timeout)


def check_unmanaged(name: str, rank: int, file: str) -> None:
    """Checks that the case itself is deterministic: for authors of new cases."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS, timeout=datetime.timedelta(seconds=40)
    )
    print(name, rank, len(reference(DISTRIBUTED[name])), "ok")
    dist.destroy_process_group()


if __name__ == "__main__":
    children.arm()
    action: Any = check_unmanaged if sys.argv[-1] == "unmanaged" else main
    action(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    sys.stdout.flush()
    os._exit(0)  # gloo's own threads now and then crash in the interpreter's last moments, with or without us
