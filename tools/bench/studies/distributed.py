"""Time and memory of budgets in a distributed job: FSDP2 on two ranks, a pipeline on four.

    python tools/bench/studies/distributed.py [--size tiny|small|large] [--steps 5] [--only fsdp2,pipeline] [--json FILE]

Sections:
  fsdp2     a GPT of 60 million parameters (`small`: 19, `tiny`: 0.4) on two ranks over gloo: plain, in half of a rank's
            peak, and with FSDP2's CPUOffloadPolicy. On the CPU there is one memory, so that one's peak says nothing
            about an accelerator.
  pipeline  GPipe, 8 micro-batches, 4 stages of 4 blocks each: plain; with stage 0 in half of its peak; with all stages
            in that budget.

A system is a job of its own: all its ranks step when it is its turn, and the other jobs wait. A ratio is of the same turn; the
median is shown, with the quartiles. Parameters and optimizer states of all ranks are compared bit by bit. Ranks share the
cores, one thread each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))  # `make bench` runs with -P

from _turns import in_turns, take_turns

import memmgr
from memmgr.tools.bench.cell import digest_of
from memmgr.tools.bench.gpt import GPT, GPTConfig

SIZES = {"tiny": (2, 128, 64), "small": (6, 512, 128), "large": (12, 640, 128)}  # layers, width, tokens a sequence
SEQUENCES = 4
WARM = {
    "fsdp2": 7,
    "pipeline": 20,
}  # steps until plans are there and followed: a pipeline's come when its round is known
MICRO_BATCHES = 8


class Fsdp2:
    """A GPT in shards."""

    def __init__(self, size: str, offload: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        torch.manual_seed(0)
        layers, width, context = SIZES[size]
        config = GPTConfig(layers=layers, heads=width // 64, width=width, context=context)
        options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
        if offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        self.model: nn.Module = GPT(config)
        for block in self.model.blocks:
            fully_shard(block, **options)
        fully_shard(self.model, **options)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        torch.manual_seed(dist.get_rank())
        self.tokens, self.targets = (torch.randint(256, (SEQUENCES, config.context)) for _ in range(2))

    def step(self) -> None:
        self.model(self.tokens, self.targets).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()
        self.opt.zero_grad()


class Pipeline:
    """A stage of GPipe."""

    def __init__(self, size: str, offload: bool) -> None:
        from torch.distributed import pipelining

        self.width, rank, world = (64 if size == "tiny" else 256), dist.get_rank(), dist.get_world_size()
        torch.manual_seed(rank)
        self.model = nn.Sequential(*[Block(self.width) for _ in range(4)])
        stage = pipelining.PipelineStage(self.model, rank, world, torch.device("cpu"))
        self.schedule = pipelining.ScheduleGPipe(stage, n_microbatches=MICRO_BATCHES, loss_fn=F.mse_loss)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        torch.manual_seed(9)
        self.x = torch.randn(MICRO_BATCHES * 512, self.width)

    def step(self) -> None:
        if dist.get_rank() == 0:
            self.schedule.step(self.x)
        elif dist.get_rank() == dist.get_world_size() - 1:
            self.schedule.step(target=self.x)
        else:
            self.schedule.step()
        self.opt.step()
        self.opt.zero_grad()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


SECTIONS: dict[str, tuple[Any, int]] = {"fsdp2": (Fsdp2, 2), "pipeline": (Pipeline, 4)}


class Turns:
    """Rank 0's: every turn begins with its word to the others."""

    def __init__(self, workload: Any) -> None:
        self.workload = workload

    def turn(self) -> dict[str, float]:
        go(True)
        begun = time.perf_counter()
        self.workload.step()
        dist.barrier()  # the slowest rank's step
        return {"step": time.perf_counter() - begun}


def go(on: bool) -> bool:
    """Said by rank 0 to all."""
    said = torch.tensor([int(on)])
    dist.broadcast(said, src=0)
    return bool(said.item())


def rank_of(
    name: str, system: str, limits: list[int | None] | None, size: str, rank: int, file: str, pipe: Any
) -> None:
    """A process: builds, warms up, steps when rank 0 says so."""
    torch.set_num_threads(1)
    kind, world = SECTIONS[name]
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    limit = None if limits is None else limits[rank]
    managed = limits is not None
    with memmgr.budget(limit, quiet=True) if managed else contextlib.nullcontext() as mm:
        workload = kind(size, system == "CPUOffloadPolicy")
        for _ in range(WARM[name]):
            workload.step()
        if rank == 0:
            take_turns(Turns(workload), pipe) if pipe is not None else None
            go(False)
        else:
            while go(True):
                workload.step()
                dist.barrier()
        states = [t for state in workload.opt.state.values() for t in state.values() if torch.is_tensor(t)]
        whole = [t.to_local() if hasattr(t, "to_local") else t for t in [*workload.model.parameters(), *states]]
        stats = mm.stats() if mm is not None else {}
        mine = {
            "digest": digest_of(whole),
            "unmanaged": stats.get("unmanaged_peak_bytes"),
            "peak": stats.get("resident_bytes.peak"),
            "floor": stats.get("floor_bytes"),
            "resident": peak_of_process(),
        }
        found: list[Any] = [None] * world
        dist.all_gather_object(found, mine)
    dist.destroy_process_group()
    if pipe is not None:
        pipe.send({"ranks": found, "digest": [one["digest"] for one in found]})


def peak_of_process() -> int:
    """Bytes: the kernel's high-water mark of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def job(name: str, system: str, limits: list[int | None] | None, size: str, pipe: Connection) -> None:
    """All ranks of one system; this process is rank 0."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "store")
        arguments = (name, system, limits, size)
        others = [
            context.Process(target=rank_of, args=(*arguments, rank, file, None)) for rank in range(1, SECTIONS[name][1])
        ]
        for other in others:
            other.start()
        rank_of(*arguments, 0, file, pipe)
        for other in others:
            other.join(60)


def compare(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Turns of all systems of a section."""
    world = SECTIONS[name][1]
    none: list[int | None] = [None] * world  # only measures
    need = in_turns({"need": (_undaemonic, (name, "need", none, args.size))}, 0)["need"]["ranks"]
    peaks = [one["unmanaged"] for one in need]
    print(f"\n{name}: a rank holds {', '.join(f'{peak / 1e6:,.0f}' for peak in peaks)} MB unmanaged")
    half = peaks[0] // 2
    systems: dict[str, list[int | None] | None] = {"plain": None}
    if name == "fsdp2":
        systems |= {"50 %": [peak // 2 for peak in peaks], "CPUOffloadPolicy": None}
    else:
        systems |= {"stage 0": [half, *none[1:]], "all stages": [half] * world}
    rows = in_turns({s: (_undaemonic, (name, s, limits, args.size)) for s, limits in systems.items()}, args.steps)
    for system, row in rows.items():
        show(system, row, rows["plain"], systems[system])
    return {"peaks": peaks, "rows": rows}


def _undaemonic(name: str, system: str, limits: list[int | None] | None, size: str, pipe: Connection) -> None:
    """`in_turns` starts daemons, which may have no children."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    job(name, system, limits, size, pipe)


def show(system: str, row: dict[str, Any], plain: dict[str, Any], limits: list[int | None] | None) -> None:
    """One system's lines."""
    if "error" in row:
        print(f"  {system:16} did not run: {row['error']}")
        return
    mine, other = ([turn["step"] for turn in one["turns"]] for one in (row, plain))
    low, middle, high = statistics.quantiles([a / b for a, b in zip(mine, other, strict=True)], n=4)
    bits = "the same bits" if row["digest"] == plain["digest"] else "OTHER BITS"
    held = ", ".join(f"{one['peak'] / 1e6:,.0f}" for one in row["ranks"] if one["peak"])
    resident = ", ".join(f"{one['resident'] / 1e6:,.0f}" for one in row["ranks"])
    print(
        f"  {system:16} {statistics.median(mine):7.3f} s, {middle:.3f} of plain ({low:.3f} to {high:.3f}), {bits}; "
        f"{'held ' + held + ' MB; ' if held else ''}processes {resident} MB"
    )


def main() -> None:
    """The figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="large")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", default="fsdp2,pipeline")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    found = {name: compare(name, args) for name in args.only.split(",")}
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
