"""Ways to be parallel, each a training that must end with the same bits: `python -m job.matrix RANK WORLD FOLDER CASE...`.

Four steps with AdamW and clipping: unmanaged, with every tensor evicted after every op, on all ranks and on one alone, and
under budgets of 75 %, 50 % and 1.05 of the floor. Every rank has budgets of its own. After each step no pin is left.
"""

import gc
import itertools
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from exactness.harness import (
    HUGE_BYTES,
    CaseFunction,
    Managed,
    Record,
    Scope,
    assert_same,
    managed,
    need,
    reference,
    unmanaged,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import memmgr
from memmgr.api import budget as budgets
from memmgr.native import binding as native

from . import ranks
from .ranks import no_pins

STEPS = 4
WIDTH = 64
ROWS = 256
CASES: dict[str, CaseFunction] = {}
SHARES = (0.75, 0.5, 0.0)
"""Shares of the unmanaged peak; at least `TIGHT` of the floor."""
TIGHT = 1.05
MOST_TRIES = 6


def case(fn: CaseFunction) -> CaseFunction:
    CASES[fn.__name__] = fn
    return fn


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Checkpointed(Block):
    """Runs its forward again in backward, with the dropout of the first time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: F.dropout(Block.forward(self, x), 0.1), x, use_reentrant=False)


def _body(depth: int = 3) -> nn.Sequential:
    torch.manual_seed(5)  # the same on all ranks
    return nn.Sequential(*[Block() for _ in range(depth)])


def _rows(step: int, *, same: bool = False, rows: int = ROWS) -> torch.Tensor:
    """The batch of that step: another one on each rank, or the same on all."""
    torch.manual_seed(100 * step + (0 if same else dist.get_rank()))
    return torch.randn(rows, WIDTH)


def _clip(parameters: Iterable[nn.Parameter]) -> None:
    """By mesh: torch adds up norms within one only."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for p in parameters:
        groups.setdefault(getattr(p, "device_mesh", None), []).append(p)
    for group in groups.values():
        nn.utils.clip_grad_norm_(group, 1.0)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    kinds = {type(p.data) for p in model.parameters()}  # DTensors and tensors go into no list together
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=len(kinds) == 1)


def _train(
    model: nn.Module,
    scope: Scope,
    step: Callable[[int], torch.Tensor | None],
    opt: torch.optim.Optimizer | None = None,
    states: torch.optim.Optimizer | None = None,
    sets_to_none: bool = True,
) -> Record:
    """`step` returns a loss, or None where it has run backward itself. `states`: the optimizer that has them, if it is another."""
    record, opt = Record(), opt or _optimizer(model)
    with scope():
        for i in range(STEPS):
            loss = step(i)
            if loss is not None:
                loss.backward()
                record.losses(loss.detach())
            _clip(model.parameters())
            opt.step()
            opt.zero_grad(set_to_none=sets_to_none)
            del loss
            no_pins()
    record.model(model)
    record.optimizer(states or opt)
    record.rng()
    return record


def _mean(model: nn.Module) -> Callable[[int], torch.Tensor]:
    return lambda i: model(_rows(i)).square().mean()


def plain(name: str, make: Callable[[], nn.Module]) -> None:
    """A case in which nothing but the model is special."""

    def fn(seed: int, scope: Scope) -> Record:
        torch.manual_seed(5)
        model = make()
        return _train(model, scope, _mean(model))

    fn.__name__ = name
    case(fn)


def _mesh(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)


def _ddp(model: nn.Module | None = None, **options: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model or _body(), bucket_cap_mb=0.05, **options)


plain("ddp", _ddp)
plain("ddp_bucket_views", lambda: _ddp(gradient_as_bucket_view=True))
plain("ddp_static_graph", lambda: _ddp(static_graph=True))


@case
def ddp_bucket_views_kept(seed: int, scope: Scope) -> Record:
    """Buckets are made anew in the second forward, and take over existing gradients."""
    model = _ddp(gradient_as_bucket_view=True)
    return _train(model, scope, _mean(model), sets_to_none=False)


class ManyParameters(nn.Module):
    """DDP's lists of all parameters are as large as cells, and it broadcasts the buffers of the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.1), Block())
        self.scales = nn.ParameterList(torch.ones(1) for _ in range(160))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * torch.cat(list(self.scales)).mean()


# C++ reads such lists by addresses that it took before an op, in the constructor and where buckets are made anew.
plain("ddp_many_parameters", lambda: _ddp(ManyParameters()))


@case
def ddp_no_sync(seed: int, scope: Scope) -> Record:
    model = _ddp()

    def step(i: int) -> torch.Tensor:
        with model.no_sync():
            model(_rows(i + 50)).square().mean().backward()
        return model(_rows(i)).square().mean()

    return _train(model, scope, step)


@case
def ddp_hook(seed: int, scope: Scope) -> Record:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = _ddp()
    model.register_comm_hook(None, fp16_compress_hook)
    return _train(model, scope, _mean(model))


@case
def ddp_hook_with_another_tensor(seed: int, scope: Scope) -> Record:
    """The hook's result is another tensor than the bucket."""

    def halved(state, bucket):  # type: ignore[no-untyped-def]  # torch wants the types themselves, not their names
        work = dist.all_reduce(bucket.buffer().to(torch.float16).div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda done: done.value()[0].to(torch.float32))

    model = _ddp()
    model.register_comm_hook(None, halved)
    return _train(model, scope, _mean(model))


@case
def ddp_builtin_hook(seed: int, scope: Scope) -> Record:
    """It ends in C++."""
    model = _ddp()
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return _train(model, scope, _mean(model))


@case
def ddp_power(seed: int, scope: Scope) -> Record:
    """One bucket: a callback of PowerSGD waits for a collective, and gloo has two threads for both. Batched, torch 2.13 fails."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    model = nn.parallel.DistributedDataParallel(_body())
    model.register_comm_hook(
        power.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2), power.powerSGD_hook
    )
    return _train(model, scope, _mean(model))


@case
def ddp_unused(seed: int, scope: Scope) -> Record:
    class SometimesUnused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.extra = _body(2), Block()

        def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
            return self.extra(self.body(x)) if extra else self.body(x)

    model = _ddp(SometimesUnused(), find_unused_parameters=True)

    def step(i: int) -> torch.Tensor:
        if (
            i == 2
        ):  # a gradient that no_sync has accumulated is looked at in a backward that does not reach its parameter
            with model.no_sync():
                model(_rows(i + 50), True).square().mean().backward()
            return model(_rows(i), False).square().mean()
        return model(_rows(i), i % 2 == 0).square().mean()

    return _train(model, scope, step)


@case
def zero_redundancy(seed: int, scope: Scope) -> Record:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = _ddp()
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    return _train(model, scope, _mean(model), opt, states=opt.optim)


def _fsdp(model: nn.Module | None = None, *, mesh: Any = None, nested: bool = False, **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = model or _body()
    options["mesh"] = mesh or _mesh()
    for block in model.children():
        if nested:
            fully_shard(block.up, **options)  # type: ignore[arg-type]  # modules of ours
        fully_shard(block, **options)
    return fully_shard(model, **options)


def _lower() -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _offloaded() -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return _fsdp(offload_policy=CPUOffloadPolicy(pin_memory=False))


plain("fsdp2_reshard", lambda: _fsdp(reshard_after_forward=True))
plain("fsdp2_keep", lambda: _fsdp(reshard_after_forward=False))
plain("fsdp2_mixed_precision", lambda: _fsdp(mp_policy=_lower()))
plain(
    "fsdp2_checkpointed_mixed_precision",
    lambda: _fsdp(nn.Sequential(*[Checkpointed() for _ in range(3)]), mp_policy=_lower()),
)
plain("fsdp2_cpu_offload", _offloaded)


@case
def fsdp2_nested_prefetch(seed: int, scope: Scope) -> Record:
    model = _fsdp(nested=True)
    blocks = list(model.children())
    for here, ahead in zip(blocks[:-1], blocks[1:], strict=True):
        here.set_modules_to_forward_prefetch([ahead])
        ahead.set_modules_to_backward_prefetch([here])
    return _train(model, scope, _mean(model))


def _nothing_escaped() -> None:
    """But for the buffer that objects were sent in, which is freed when the backend's thread has released it."""
    pager, end = native.load(), time.monotonic() + 5
    while budgets.current() and pager.stats()["escaped_bytes"] and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert budgets.current() is None or pager.stats()["escaped_bytes"] == 0


@case
def fsdp2_checkpoint(seed: int, scope: Scope) -> Record:
    """Saved by torch.distributed.checkpoint in the middle, spoilt, and loaded."""
    import tempfile

    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = _fsdp()
    opt = _optimizer(model)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, src=0)

    def step(i: int) -> torch.Tensor:
        if i in (1, 3):
            parts = dict(zip(("model", "optimizer"), get_state_dict(model, opt), strict=True))
            if i == 1:
                dcp.save(parts, checkpoint_id=folder[0])
                _nothing_escaped()
            else:
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(0)
                dcp.load(parts, checkpoint_id=folder[0])
                set_state_dict(model, opt, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
        return model(_rows(i)).square().mean()

    return _train(model, scope, step, opt)


def _tensor_parallel(model: nn.Module, mesh: Any, *, sequence: bool) -> nn.Module:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    for block in model.children():
        if sequence:
            plan: dict[str, Any] = {
                "norm": SequenceParallel(sequence_dim=0),
                "up": ColwiseParallel(input_layouts=Shard(0)),
                "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
            }
        else:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    if sequence:
        whole = {"input_layouts": Replicate(), "desired_input_layouts": Shard(0), "use_local_output": False}
        parallelize_module(model, mesh, PrepareModuleInput(**whole))
        parallelize_module(
            model, mesh, PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
        )
    return model


@case
def tp_colwise_rowwise(seed: int, scope: Scope) -> Record:
    model = _tensor_parallel(_body(), _mesh(), sequence=False)
    return _train(model, scope, lambda i: model(_rows(i, same=True)).square().mean())


@case
def tp_sequence(seed: int, scope: Scope) -> Record:
    model = _tensor_parallel(_body(), _mesh(), sequence=True)
    return _train(model, scope, lambda i: model(_rows(i, same=True)).square().mean())


@case
def tp_loss(seed: int, scope: Scope) -> Record:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

    model = nn.Sequential(Block(), nn.Linear(WIDTH, 8 * WIDTH))
    torch.manual_seed(6)
    for p in model.parameters():
        nn.init.normal_(p, std=0.05)
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, _mesh(), {"1": head})

    def step(i: int) -> None:
        x = _rows(i, same=True)
        with loss_parallel():
            loss = F.cross_entropy(model(x), torch.arange(ROWS) % (8 * WIDTH))
            loss.backward()

    return _train(model, scope, step)


@case
def fsdp2_with_tp(seed: int, scope: Scope) -> Record:
    """Two dimensions, on four ranks."""
    mesh = _mesh(2, 2, names=("dp", "tp"))
    model = _tensor_parallel(_body(), mesh["tp"], sequence=False)
    model = _fsdp(model, mesh=mesh["dp"])
    return _train(model, scope, lambda i: model(_rows(i)).square().mean())


def _pipeline(scope: Scope, schedule: str, stages: int = 1) -> Record:
    from torch.distributed import pipelining

    rank, world, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    numbers = [rank + world * k for k in range(stages)]
    modules = nn.ModuleList(_body(2) for _ in numbers)
    found = [
        pipelining.PipelineStage(module, number, world * stages, device)
        for module, number in zip(modules, numbers, strict=True)
    ]
    run = getattr(pipelining, schedule)(
        found if stages > 1 else found[0], n_microbatches=8, loss_fn=lambda y, t: F.mse_loss(y, t)
    )
    record = Record()

    def step(i: int) -> None:
        x, losses = _rows(i, same=True), []
        if rank == 0:
            run.step(x)
        elif rank == world - 1:
            run.step(target=x.sin(), losses=losses)
            record.losses(torch.stack(losses).detach())
        else:
            run.step()

    record.update(_train(modules, scope, step))
    return record


@case
def pp_gpipe(seed: int, scope: Scope) -> Record:
    return _pipeline(scope, "ScheduleGPipe")


@case
def pp_1f1b(seed: int, scope: Scope) -> Record:
    return _pipeline(scope, "Schedule1F1B")


@case
def pp_interleaved(seed: int, scope: Scope) -> Record:
    return _pipeline(scope, "ScheduleInterleaved1F1B", stages=2)


class Rotate(torch.autograd.Function):
    """The neighbour's tensor, around the ring; gradients go the other way."""

    @staticmethod
    def turn(t: torch.Tensor, by: int) -> torch.Tensor:
        rank, world = dist.get_rank(), dist.get_world_size()
        t, got = t.contiguous(), torch.empty_like(t)
        give = dist.P2POp(dist.isend, t, (rank + by) % world)
        take = dist.P2POp(dist.irecv, got, (rank - by) % world)
        for work in dist.batch_isend_irecv([give, take]):
            work.wait()
        return got

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor) -> torch.Tensor:
        return Rotate.turn(t, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return Rotate.turn(grad, -1)


class RingAttention(nn.Module):
    """Each rank has its part of the sequence; keys and values go around."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores, values = [], []
        for turn in range(dist.get_world_size()):
            if turn:
                k, v = Rotate.apply(k), Rotate.apply(v)
            scores.append(q @ k.T / WIDTH**0.5)
            values.append(v)
        return x + self.out(torch.cat(scores, -1).softmax(-1) @ torch.cat(values))


plain(
    "ring_attention",
    lambda: nn.parallel.DistributedDataParallel(nn.Sequential(RingAttention(), Block(), RingAttention())),
)


class Experts(nn.Module):
    """An expert a rank; rows go to the one that a router names, and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.expert = nn.Linear(WIDTH, dist.get_world_size()), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        world, group = dist.get_world_size(), dist.group.WORLD
        weights, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        gives = torch.bincount(chosen, minlength=world)
        takes = torch.empty_like(gives)
        dist.all_to_all_single(takes, gives)
        there, here = gives.tolist(), takes.tolist()
        rows = all_to_all_single_autograd(x[order], here, there, group)
        rows = all_to_all_single_autograd(self.expert(rows), there, here, group)
        return x + weights[:, None] * rows[order.argsort()]


@case
def expert_parallel(seed: int, scope: Scope) -> Record:
    torch.manual_seed(5 + dist.get_rank())  # experts differ, and so do routers here
    model = nn.Sequential(Experts(), Block(), Experts())
    return _train(model, scope, _mean(model))


@case
def all_reduce_in_forward(seed: int, scope: Scope) -> Record:
    """In place, on a tensor that a recorded op made; its schema hides the write."""
    first, second = blocks = nn.Sequential(Block(), Block())

    def step(i: int) -> torch.Tensor:
        h = first(_rows(i))
        mean = h.detach().mean(0) * 1.0
        work = dist.all_reduce(mean, async_op=True)
        assert work is not None
        work.wait()
        gate = (h + mean).exp().tanh()
        gathered = [torch.empty_like(mean) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mean * (dist.get_rank() + 1))
        shared = torch.randn(WIDTH)
        dist.broadcast(shared, src=0)
        return second(gate * (h + gathered[0]).sigmoid() + shared * gathered[1].sin()).square().mean()

    return _train(blocks, scope, step)


@case
def functional_collectives_in_forward(seed: int, scope: Scope) -> Record:
    import torch.distributed._functional_collectives as fc
    from torch.distributed.nn.functional import all_reduce

    first, second = blocks = nn.Sequential(Block(), Block())

    def step(i: int) -> torch.Tensor:
        h = first(_rows(i))
        total = fc.all_reduce(h.detach().sin(), "sum", dist.group.WORLD)
        rows = fc.all_gather_tensor_autograd((h * total.exp()).tanh(), 0, dist.group.WORLD)
        part = fc.reduce_scatter_tensor_autograd(rows.exp() * rows, "sum", 0, dist.group.WORLD)
        part = all_reduce(part.tanh() * h) * part
        return second(part.tanh()).square().mean()

    return _train(blocks, scope, step)


class _Waits:
    """The Work itself is held by the backend alone, until it is done."""

    def __init__(self, future: Any) -> None:
        self.wait = future.wait


LATE: dict[str, tuple[Callable[[torch.Tensor], Any], float]] = {
    "all-reduce": (lambda t: dist.all_reduce(t, async_op=True), 3.0),
    "broadcast": (lambda t: dist.broadcast(t, src=1, async_op=True), 2.0),
    "send": (lambda t: dist.irecv(t, 1) if dist.get_rank() == 0 else dist.isend(t, 0), 2.0),
    "future alone": (lambda t: _Waits(dist.all_reduce(t, async_op=True).get_future()), 3.0),
}
"""Collectives, and the factor of the result."""


_LOOKS = itertools.count()


@case
def late_works(seed: int, scope: Scope) -> Record:
    """Rank 0 has begun, rank 1 comes later: rank 0's tensor stays in the meantime, though all others are evicted."""
    import torch.distributed._functional_collectives as fc

    rank, count = dist.get_rank(), torch.arange(4096, dtype=torch.float32)
    store = dist.distributed_c10d._get_default_store()
    with scope():
        for begin, factor in LATE.values():
            tensor = count * (rank + 1)
            looked = f"rank 0 has looked, {next(_LOOKS)}"
            if rank == 1:
                store.wait([looked])
            work = begin(tensor)
            if rank == 0:
                for _ in range(20):  # would fill freed memory with poison
                    torch.ones(4096).add_(1)
                assert budgets.current() is None or native.load().take_away(tensor) == 0
                store.set(looked, "")
            work = work.wait() and None
            assert torch.equal(tensor, count * factor)
            del work
            no_pins()
            dist.barrier()
        tensor = count * (rank + 1)
        looked = f"rank 0 has looked, {next(_LOOKS)}"
        if rank == 1:
            store.wait([looked])
        total = fc.all_reduce(tensor, "sum", dist.group.WORLD)
        for _ in range(20):
            torch.ones(4096).add_(1)
        if rank == 0:
            store.set(looked, "")
        assert torch.equal(total + 0, count * 3.0) and torch.equal(tensor, count * (rank + 1.0))
        del total
        no_pins()
        dist.barrier()
    record = Record()
    record.put("tensor", tensor)
    return record


def _fitting(fn: CaseFunction, limit: int, folder: Path) -> Managed:
    """As `exactness.harness._fitting`, and all ranks begin again together, where one had too little.

    Here a bucket that is late is a tenth of the floor, and it was late on no rank while there was room enough.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    for number in range(MOST_TRIES):
        try:
            return managed(fn, limit)
        except (memmgr.BudgetError, memmgr.RankError) as error:
            limit = int(max(error.floor_bytes, limit) * 1.03)
            error.__traceback__ = None
            error.__cause__ = None
        gc.collect()
        dist.destroy_process_group()
        again = folder / f"{fn.__name__}{number}"
        again.mkdir(exist_ok=True)
        ranks.join(rank, world, again, 30)
    raise AssertionError(f"{fn.__name__}: {limit:,} bytes are not enough either")


def check(name: str, folder: Path) -> list[str]:
    """One case under all budgets; returns the observations, for a report."""
    fn = CASES[name]
    want = reference(fn)
    for place in ("loop", "inside"):
        got = managed(fn, HUGE_BYTES, "torture", place=place)
        assert_same(want, got.record, f"{name}, torture, {place}")
        assert got.stats["offloads"] > 0
    if name == "late_works":
        return []
    # A collective that a rank replays alone hangs, or adds twice.
    for one in range(dist.get_world_size()):
        alone = managed(fn, HUGE_BYTES, "torture").record if dist.get_rank() == one else unmanaged(fn)
        assert_same(want, alone, f"{name}, torture on rank {one} alone")
    measured = need(fn)
    peak, floor = measured.peak_bytes, measured.floor_bytes
    said = [f"peak {peak / 1e6:.2f} MB"]
    for share in SHARES:
        # How many buckets are under way at once is the other ranks' doing, so it differs from run to run and from rank to rank.
        most = torch.tensor([floor])
        dist.all_reduce(most, dist.ReduceOp.MAX)
        limit = max(int(share * peak), int(TIGHT * most.item()))
        got = _fitting(fn, limit, folder) if share == 0 else managed(fn, limit)
        limit = got.stats["budget_bytes"]
        floor = max(floor, got.stats["floor_bytes"])
        assert_same(want, got.record, f"{name}, {share:.0%} of the peak")
        left = got.stats["evictions"] + got.stats["offloads"]
        assert left > 0 or limit > 0.95 * peak, f"{name}: nothing left at {limit:,} of {peak:,}, so nothing was tested"
        said.append(f"{limit / peak:.0%}: {left} left")
    return [*said, f"floor {floor / 1e6:.2f} MB"]


def main(rank: int, world: int, folder: Path, *names: str) -> None:
    warnings.simplefilter("ignore")
    ranks.join(rank, world, folder, 30)
    for name in names:
        begun = time.perf_counter()
        said = check(name, folder)
        gc.collect()
        print(f"{name}: {'; '.join(said)}; {time.perf_counter() - begun:.1f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks.run(main)
