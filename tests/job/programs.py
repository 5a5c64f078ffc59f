"""Programs of ranks: `python -m job.programs RANK WORLD FOLDER PROGRAM WORDS`."""

import gc
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from exactness.harness import HUGE_BYTES, Record, assert_same, managed, need, reference
from torch import nn

import memmgr
from memmgr.api import budget as budgets
from memmgr.distributed.job import _budget_error
from memmgr.native import binding as native
from memmgr.observe.error_text import NAMED_KINDS
from memmgr.observe.memory_inventory import holders

from . import matrix, ranks


def ends() -> None:
    dist.barrier()
    dist.destroy_process_group()


BYTES = 1 << 20


def talkative(rank: int, world: int, folder: Path) -> None:
    """A rank prints more than a pipe holds while the others wait for it."""
    if rank > 0:
        print("x" * BYTES, flush=True)
    ends()


def kinds(model: torch.nn.Module) -> dict[str, int]:
    """In the middle of a step, and in the words of an error there."""
    pager: Any = native.load()
    model(matrix._rows(0)).square().mean().backward()
    y = model(matrix._rows(1))
    found, _ = holders(pager, "cpu", rest=pager.resident_cells())
    try:
        torch.ones(100_000_000)
    except memmgr.BudgetError as error:
        words = str(error)
    y.square().mean().backward()
    largest = sorted(found, key=lambda name: found[name])[-NAMED_KINDS:]  # the text sums the others up
    assert all(name in words for name in largest), (found, words)
    return found


def named(rank: int, world: int, folder: Path) -> None:
    """Objects that torch.distributed takes have names of their own."""
    with memmgr.budget("50MB", quiet=True):
        ddp = matrix._ddp()
        parameters = sum(p.nbytes for p in ddp.parameters())
        found = kinds(ddp)
        assert found["gradient buckets"] >= parameters, found
        assert found["gradients"] >= parameters and found["parameters"] >= parameters
        del ddp
        fsdp = matrix._fsdp(reshard_after_forward=False)
        found = kinds(fsdp)
        assert found["gathered parameters"] >= parameters, found
        assert parameters / world <= found["parameters"] < parameters  # the shards


def _floor(name: str, folder: Path) -> None:
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


def floors(rank: int, world: int, folder: Path, *names: str) -> None:
    """The floor of a rank is the smallest budget that works for it: a twentieth more runs, a twentieth less raises and says so, for
    each rank in turn while the others have room."""
    for name in names:
        _floor(name, folder)
    ends()


MOST_STEPS = 60


def fsdp2() -> Callable[[], None]:
    from torch.distributed.fsdp import fully_shard

    model = matrix._body(6)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    x = torch.randn(64, matrix.WIDTH)
    return _step(model, lambda: model(x).square().mean().backward())


def pipeline() -> Callable[[], None]:
    from torch.distributed import pipelining

    rank, world = dist.get_rank(), dist.get_world_size()
    model = matrix._body(4)
    stage = pipelining.PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, n_microbatches=4, loss_fn=F.mse_loss)
    x = torch.randn(4 * 256, matrix.WIDTH)
    return _step(model, lambda: schedule.step(x) if rank == 0 else schedule.step(target=x))


def _step(model: nn.Module, backward: Callable[[], Any]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _planned(make: Callable[[], Callable[[], None]], passes: int) -> None:
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


def planned(rank: int, world: int, folder: Path) -> None:
    """Ranks get plans and follow them: FSDP2 and a pipeline of two stages."""
    _planned(fsdp2, 1)
    _planned(pipeline, 4)
    ends()


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


def _recorded(model: nn.Module, opt: torch.optim.Optimizer) -> Record:
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


def unfinished(rank: int, world: int, folder: Path, trouble: str) -> None:
    """A rank comes to grief within its optimizer's step while slices of the other's wait (rule 14). The ranks train the same on the
    same rows, so that a training without ranks gives the survivor's bits."""
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
        got = _recorded(model, opt)
        alone, its = _begun()
        for step in range(STEP + 1):
            _backward(alone, step)
            its.step()
            its.zero_grad()
        assert_same(_recorded(alone, its), got, f"{trouble}: the step that waited")
        took = time.time() - float((folder / "when").read_text())
        ranks.write(folder, rank, took=took, waiting=waiting)


def begun_before(rank: int, world: int, folder: Path) -> None:
    """A collective of rank 0 waits for its peer while a budget opens there. Its backend has the tensor's address."""
    opened = folder / "opened"
    x = torch.full((100_000,), float(rank + 1))
    while rank == 1 and not opened.exists():
        time.sleep(0.01)
    work = dist.all_reduce(x, async_op=True)
    if rank == 1:
        work.wait()
        return ends()
    with warnings.catch_warnings(record=True, action="always") as warned, memmgr.budget("1GB", quiet=True):
        assert native.load().take_away(x, 1) == 0, "bytes that a backend writes have left"
        opened.touch()
        work.wait()
        assert torch.equal(x, torch.full_like(x, 3.0))
    assert ["a collective had not ended when the budget opened" in str(w.message) for w in warned] == [True]
    with memmgr.budget("1GB", quiet=True):
        y = torch.arange(100_000.0)
        assert native.load().take_away(y, 1) == y.nbytes, "the collective has ended"
    ends()


PROGRAMS = {each.__name__: each for each in (talkative, named, floors, planned, unfinished, begun_before)}


def main(rank: int, world: int, folder: Path, program: str, *words: str) -> None:
    warnings.simplefilter("ignore")
    ranks.join(rank, world, folder, 60)
    PROGRAMS[program](rank, world, folder, *words)


if __name__ == "__main__":
    ranks.run(main)
