"""Rules 3 and 9 between two ranks (gloo): tensors that backends and reducers read outside of ops stay pinned, and are
unpinned afterwards.

Each test is a group of cases in two processes: ``python -m pager.test_distributed GROUP RANK FOLDER``. A case runs
unmanaged, with every tensor evicted after every op, and under 0.6 of its peak: the same bits, and no pin after a step.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exactness import cases, children
from exactness.harness import (
    HUGE_BYTES,
    CaseFunction,
    Record,
    Scope,
    assert_same,
    managed,
    need,
    reference,
)
from job.ranks import finish_all, join
from torch import nn

import memmgr
from memmgr.native import binding as native

RANKS = 2
GROUPS: dict[str, list[Callable[[Path], None]]] = {}


def group(name: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def add(fn: Callable[[Path], None]) -> Callable[[Path], None]:
        GROUPS.setdefault(name, []).append(fn)
        return fn

    return add


def same_bits(name: str) -> Callable[[CaseFunction], CaseFunction]:
    """A case of that group."""

    def add(fn: CaseFunction) -> CaseFunction:
        first = name not in GROUPS

        def run(folder: Path) -> None:
            want = reference(fn)
            torture = managed(fn, HUGE_BYTES, "torture", place="inside")
            assert_same(want, torture.record, f"{fn.__name__}, torture")
            assert torture.stats["offloads"] > 0
            if first:  # tests/exactness/test_distributed.py has this place with each kind of parallelism
                got = managed(fn, HUGE_BYTES, "torture")
                assert_same(want, got.record, f"{fn.__name__}, torture, model from before")
            measured = need(fn)
            assert_same(want, managed(fn, measured.limit(0.6)).record, f"{fn.__name__}, 0.6 of the peak")

        GROUPS.setdefault(name, []).append(run)
        return fn

    return add


def no_pins() -> None:
    """At the end of a step nobody has a pin: neither a Work that is gone nor a reducer that has reduced."""
    from memmgr.api import budget as budgets

    if budgets.current() is None:
        return
    pager = native.load()
    deadline = time.monotonic() + 2
    while True:  # a backend's thread wakes the waiting thread before it marks the Work as done
        pager.drain()
        if pager.stats()["works_in_flight"] == 0 or time.monotonic() > deadline:
            break
        time.sleep(0.001)
    assert pager.stats()["works_in_flight"] == 0
    # A tensor whose address was handed out stays while it lives, by rule 9: torch reads a gathered object through
    # numpy.
    pinned = [cell for cell in pager.cells() if cell["pins"] and not cell["small"] and not cell["escaped"]]
    assert not pinned, pinned


def _rows(step: int, rows: int = 192) -> torch.Tensor:
    torch.manual_seed(100 * step + dist.get_rank())
    return torch.randn(rows, 32)


def _train(
    model: nn.Module,
    scope: Scope,
    opt: torch.optim.Optimizer | None = None,
    step: Callable[[int, nn.Module], torch.Tensor] | None = None,
) -> Record:
    record, opt = Record(), opt or cases.adamw(model)
    with scope():
        for i in range(3):
            opt.zero_grad()
            loss = step(i, model) if step else model(_rows(i)).square().mean()
            loss.backward()
            opt.step()
            record.losses(loss.detach())
            del loss
            no_pins()
    record.model(model)
    record.rng()
    return record


# ---- DDP -------------------------------------------------------------------------------------------------------------


def _ddp(model: nn.Module | None = None, **options: Any) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model or cases.MLP(depth=2), bucket_cap_mb=0.02, **options)


@same_bits("ddp")
def ddp_static_graph(seed: int, scope: Scope) -> Record:
    return _train(_ddp(static_graph=True), scope)


@same_bits("ddp, views")
def ddp_bucket_views(seed: int, scope: Scope) -> Record:
    return _train(_ddp(gradient_as_bucket_view=True), scope)


@same_bits("ddp")
def ddp_bucket_views_that_stay(seed: int, scope: Scope) -> Record:
    """Buckets are made anew in the second forward, and take over existing gradients."""
    record, model = Record(), _ddp(gradient_as_bucket_view=True)
    opt = cases.adamw(model)
    with scope():
        for i in range(3):
            opt.zero_grad(set_to_none=False)
            model(_rows(i)).square().mean().backward()
            opt.step()
    record.model(model)
    return record


class _SometimesUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.extra = cases.MLP(depth=1), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
        return self.extra(self.body(x)) if extra else self.body(x)


class ManyParameters(nn.Module):
    """DDP's lists of all parameters are as large as cells."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = cases.MLP(depth=2)
        self.scales = nn.ParameterList(torch.ones(1) for _ in range(160))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x) * torch.cat(list(self.scales)).mean()


@same_bits("ddp")
def ddp_of_many_parameters(seed: int, scope: Scope) -> Record:
    """C++ reads such lists by addresses that it took before an op, in the constructor and where buckets are made anew."""
    return _train(_ddp(ManyParameters()), scope)


@same_bits("ddp")
def ddp_unused_parameters_with_gradients(seed: int, scope: Scope) -> Record:
    """Gradients accumulated under `no_sync` are looked at in a backward that does not reach its parameters."""
    model = _ddp(_SometimesUnused(), find_unused_parameters=True)

    def step(i: int, model: Any) -> torch.Tensor:
        with model.no_sync():
            model(_rows(i), True).square().mean().backward()
        return model(_rows(i + 50), False).square().mean()

    return _train(model, scope, step=step)


@same_bits("ddp, hooks")
def ddp_communication_hooks(seed: int, scope: Scope) -> Record:
    """One whose result is another tensor than the bucket, and one that ends in C++."""

    def halved(state, bucket):  # type: ignore[no-untyped-def]  # torch wants the types themselves, not their names
        work = dist.all_reduce(bucket.buffer().to(torch.float16).div_(RANKS), async_op=True)
        return work.get_future().then(lambda done: done.value()[0].to(torch.float32))

    record = Record()
    for i, hook in enumerate((halved, None)):
        model = _ddp()
        if hook is not None:
            model.register_comm_hook(None, hook)
        else:
            model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        for key, value in _train(model, scope).items():
            record[f"{i} {key}"] = value
    return record


@same_bits("ddp, hooks")
def zero_redundancy(seed: int, scope: Scope) -> Record:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = _ddp()
    return _train(model, scope, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3))


# ---- FSDP2 -----------------------------------------------------------------------------------------------------------


def _fsdp(reshard: bool) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)])
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


@same_bits("fsdp")
def fsdp2_reshard(seed: int, scope: Scope) -> Record:
    return _train(_fsdp(True), scope)


@same_bits("fsdp, kept")
def fsdp2_keep(seed: int, scope: Scope) -> Record:
    return _train(_fsdp(False), scope)


@group("fsdp")
def distributed_checkpoint(folder: Path) -> None:
    """Saved and loaded with shards and states away; nothing is pinned after it, and nothing escapes."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    torch.manual_seed(3)
    model = _fsdp(True)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pager = native.load()
    with memmgr.budget("1GB", policy="torture", quiet=True):
        model(_rows(0)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        want = [p.to_local().clone() for p in model.parameters()]
        kept, states = get_state_dict(model, opt)
        dcp.save({"model": kept, "optimizer": states}, checkpoint_id=folder / "checkpoint")
        no_pins()
        # Except for the buffer that objects were sent in: it is freed when the backend's thread has released it.
        deadline = time.monotonic() + 5
        while pager.stats()["escaped_bytes"] and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        assert pager.stats()["escaped_bytes"] == 0
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0)
        kept, states = get_state_dict(model, opt)
        dcp.load({"model": kept, "optimizer": states}, checkpoint_id=folder / "checkpoint")
        set_state_dict(model, opt, model_state_dict=kept, optim_state_dict=states)
        assert all(torch.equal(p.to_local(), w) for p, w in zip(model.parameters(), want, strict=True))
        del kept, states
        no_pins()


# ---- pipelines -------------------------------------------------------------------------------------------------------


def _pipeline(scope: Scope, schedule: str) -> Record:
    from torch.distributed import pipelining

    stage_module = cases.MLP(depth=2, p=0.0)
    for m in stage_module.modules():
        if isinstance(m, nn.BatchNorm1d):
            m.track_running_stats = False
            m.running_mean = m.running_var = m.num_batches_tracked = None
    rank, device = dist.get_rank(), torch.device("cpu")
    stage = pipelining.PipelineStage(stage_module, rank, RANKS, device)
    run = getattr(pipelining, schedule)(stage, n_microbatches=4, loss_fn=lambda y, t: F.mse_loss(y, t))
    record, opt = Record(), cases.adamw(stage_module)
    with scope():
        for i in range(3):
            torch.manual_seed(i)
            x, target = torch.randn(256, 32), torch.randn(256, 32)
            losses: list[torch.Tensor] = []
            if rank == 0:
                run.step(x)
            else:
                run.step(target=target, losses=losses)
                record.losses(torch.stack(losses).detach())
            opt.step()
            opt.zero_grad()
            del losses
            no_pins()
    record.model(stage_module)
    return record


@same_bits("pipeline, gpipe")
def gpipe(seed: int, scope: Scope) -> Record:
    return _pipeline(scope, "ScheduleGPipe")


@same_bits("pipeline")
def one_forward_one_backward(seed: int, scope: Scope) -> Record:
    return _pipeline(scope, "Schedule1F1B")


# ---- Works that take their time --------------------------------------------------------------------------------------


def _late(collective: Callable[[torch.Tensor], Any], check: Callable[[torch.Tensor], None]) -> None:
    """Rank 0 has begun, rank 1 comes later: rank 0's tensor stays in the meantime, though all others are evicted."""
    pager = native.load()
    with memmgr.budget("1GB", policy="torture", quiet=True):
        tensor = torch.arange(4096, dtype=torch.float32) * (dist.get_rank() + 1)
        if dist.get_rank() == 1:
            time.sleep(0.3)
        work = collective(tensor)
        if dist.get_rank() == 0:
            for _ in range(20):  # would fill freed memory with poison
                torch.ones(4096).add_(1)
            assert pager.take_away(tensor) == 0
        work = work.wait() and None
        check(tensor)
        del work
        no_pins()
        dist.barrier()


@group("works")
def works_late_all_reduce(folder: Path) -> None:
    _late(lambda t: dist.all_reduce(t, async_op=True), lambda t: _equal(t, 3.0))


@group("works")
def works_late_broadcast(folder: Path) -> None:
    _late(lambda t: dist.broadcast(t, src=1, async_op=True), lambda t: _equal(t, 2.0))


@group("works")
def works_late_point_to_point(folder: Path) -> None:
    _late(
        lambda t: dist.irecv(t, 1) if dist.get_rank() == 0 else dist.isend(t, 0),
        lambda t: _equal(t, 2.0),
    )


@group("works")
def works_known_by_a_future_alone(folder: Path) -> None:
    """Nobody has the Work itself: the backend does, until it is done."""

    class Waits:
        def __init__(self, future: Any) -> None:
            self.wait = future.wait

    _late(lambda t: Waits(dist.all_reduce(t, async_op=True).get_future()), lambda t: _equal(t, 3.0))


@group("works")
def works_functional(folder: Path) -> None:
    import torch.distributed._functional_collectives as fc

    with memmgr.budget("1GB", policy="torture", quiet=True):
        t = torch.arange(4096, dtype=torch.float32) * (dist.get_rank() + 1)
        if dist.get_rank() == 1:
            time.sleep(0.3)
        total = fc.all_reduce(t, "sum", dist.group.WORLD)
        for _ in range(20):
            torch.ones(4096).add_(1)
        _equal(total + 0, 3.0)
        _equal(t, dist.get_rank() + 1.0)
        del total
        no_pins()
        dist.barrier()


def _equal(t: torch.Tensor, factor: float) -> None:
    assert torch.equal(t, torch.arange(4096, dtype=torch.float32) * factor)


# ---- running ---------------------------------------------------------------------------------------------------------


def main(name: str, rank: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    join(rank, RANKS, folder, 20)
    for run in GROUPS[name]:
        begun = time.perf_counter()
        run(folder)
        print(f"{time.perf_counter() - begun:.1f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


# Near copies: views that stay are views too, parameters that are resharded are gathered more often, and 1F1B interleaves all
# that GPipe does one after the other.
_SLOW = {"ddp, views", "fsdp, kept", "pipeline, gpipe"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in _SLOW)) for name in GROUPS])
def test_same_bits_and_no_pins_left(name: str, tmp_path: Path) -> None:
    timeout = 90.0
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        children.start("pager.test_distributed", name, str(rank), str(tmp_path), timeout=timeout, env=env)
        for rank in range(RANKS)
    ]
    finish_all(ranks, timeout)


if __name__ == "__main__":
    children.arm()
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)  # gloo's own threads now and then crash in the interpreter's last moments, with or without us
