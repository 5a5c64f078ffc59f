"""memmgr compared with its alternatives: peak, seconds a step, and whether the bits are those of plain torch.

    python tools/bench/studies/alternatives.py [--quick] [--json FILE] [--size tiny|small|large]
                                               [--steps 10] [--batch 4] [--threads N]

The GPT of `model_states.py`, fused AdamW. Every system trains in a process of its own, from the same beginning, and takes a
step while the others wait; a ratio is of the same turn: median, with the quartiles. A system that cannot run has its reason.
`processor` is the time that all of a system's threads computed, which other work of the machine affects least.

The peak is the kernel's high-water mark of the resident set (VmHWM) over the process's size before it built the model, of
the last steps, the same for all: the only memory here is the CPU's. A system that offloads *to the CPU* can therefore save
no memory here. Its savings on an accelerator are not measured; `note` says so. memmgr offloads to the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import platform
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parent))  # `make bench` runs with -P

from _training import FP32, SIZES, recomputed
from _turns import in_turns, take_turns
from model_states import needs

import memmgr
from memmgr.tools.bench.cell import forget_peak, memory_of

TO_CPU = "offloads to the CPU, which is the device here: can save nothing"


class Checkpoint(FP32):
    """Every block is recomputed."""

    def __init__(self, size: str, batch: int) -> None:
        super().__init__(size, batch)
        model: Any = self.model
        for block in model.blocks:
            block.forward = recomputed(block.forward)


class SaveOnCPU(FP32):
    """torch.autograd.graph.save_on_cpu around the forward."""

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().loss(tokens, targets)


class TorchAO(FP32):
    """torchao's CPUOffloadOptimizer: moments, masters and the step are the CPU's."""

    def optimizer_of(self, parameters: Any) -> torch.optim.Optimizer:
        from torchao.optim import CPUOffloadOptimizer

        made: torch.optim.Optimizer = CPUOffloadOptimizer(parameters, torch.optim.AdamW, lr=3e-4, fused=True)
        return made


class Accelerate(FP32):
    """accelerate's cpu_offload: parameters are on the device while their module runs."""

    def __init__(self, size: str, batch: int) -> None:
        from accelerate import cpu_offload

        super().__init__(size, batch)
        self.weights = dict(self.model.state_dict())
        cpu_offload(self.model, execution_device=torch.device(self.device), state_dict=self.weights)

    def tensors(self) -> list[Tensor]:
        return list(self.weights.values())


class FSDP2(FP32):
    """fully_shard with CPUOffloadPolicy on one rank, a group for each block."""

    def __init__(self, size: str, batch: int) -> None:
        import torch.distributed as dist
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        super().__init__(size, batch)
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model: Any = self.model
        for part in (*model.blocks, model):
            fully_shard(
                part, mesh=dist.init_device_mesh("cpu", (1,)), offload_policy=CPUOffloadPolicy(pin_memory=False)
            )
        self.optimizer = self.optimizer_of(model.parameters())

    def tensors(self) -> list[Tensor]:
        return [t.to_local() if isinstance(t, DTensor) else t for t in super().tensors()]


@dataclass(frozen=True)
class System:
    """A training, and its share of plain torch's need (none: without memmgr)."""

    make: type[FP32]
    share: float | None = None
    note: str = ""


SYSTEMS = {
    "plain": System(FP32),
    "memmgr, 50 %": System(FP32, 0.5),
    "memmgr, 25 %": System(FP32, 0.25),
    "full checkpointing": System(Checkpoint),
    "save_on_cpu": System(SaveOnCPU, note=TO_CPU),
    "torchao CPUOffloadOptimizer": System(TorchAO, note="needs a CUDA or XPU device"),
    "accelerate cpu_offload": System(Accelerate, note=TO_CPU),
    "FSDP2, CPUOffloadPolicy, one rank": System(FSDP2, note=TO_CPU),
}


def run(name: str, limit: int | None, size: str, batch: int, threads: int, pipe: Connection) -> None:
    """A process of one system."""
    torch.set_num_threads(threads)
    system = SYSTEMS[name]
    system.make("tiny", 1).turn()  # loads its imports and threads before memory is measured
    gc.collect()
    there = memory_of("VmRSS")
    with memmgr.budget(limit, quiet=True) if limit is not None else contextlib.nullcontext() as mm:
        workload = system.make(size, batch)
        begins_as = workload.parameters_digest()
        for _ in range(workload.warm):
            workload.turn()
        forget_peak()
        take_turns(workload, pipe)
        told: dict[str, Any] = {"peak_bytes": memory_of("VmHWM") - there}
        if mm is not None:
            told["peak_of_limit"] = mm.stats()["resident_bytes.peak"] / mm.stats()["budget_bytes"]
    told["trained"] = workload.parameters_digest() != begins_as
    pipe.send({"digest": workload.digest(), **told})


def run_on_test_device(name: str, limit: int | None, size: str, batch: int, pipe: Connection) -> None:
    """The same where device and CPU have memories of their own. `memmgr` counts for all, and without a limit does no more."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests"))
    from memdev import start

    os.environ["MEMMGR_DRIVER"] = str(start(mode="prompt", memory_bytes=8 << 30, poison=False).driver_path)
    FP32.device = "memdev"
    torch.ones(1, device=FP32.device)
    with memmgr.budget(limit, device=FP32.device, policy="keep" if limit is None else "auto", quiet=True) as mm:
        workload = SYSTEMS[name].make(size, batch)
        begins_as = workload.parameters_digest()
        for _ in range(workload.warm):
            workload.turn()
        take_turns(workload, pipe)
        peak = mm.stats()["resident_bytes.peak"]
    trained = workload.parameters_digest() != begins_as
    pipe.send({"digest": workload.digest(), "peak_bytes": peak, "trained": trained})


def bits(row: dict[str, Any], plain: dict[str, Any]) -> str:
    if not row["trained"]:
        return "no: trains nothing, without an error"
    return "yes" if row["digest"] == plain["digest"] else "no"


def table_of_the_test_device(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """In Markdown."""
    yield "| on the test device | peak held, MB | of plain | same bits | |"
    yield "|---|---|---|---|---|"
    for name, row in rows.items():
        if "error" in row:
            yield f"| {name} | | | | did not run: `{row['error']}` |"
        else:
            share = row["peak_bytes"] / rows["plain"]["peak_bytes"]
            yield f"| {name} | {row['peak_bytes'] / 1e6:,.1f} | {share:.2f} | {bits(row, rows['plain'])} | |"


def table(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """In Markdown."""
    plain = rows["plain"]
    yield "| | peak, MB | of plain | a step, s | of plain | quartiles | processor, of plain | same bits | |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, row in rows.items():
        note = SYSTEMS[name].note
        if "error" in row:
            yield f"| {name} | | | | | | | | did not run: `{row['error']}`; {note} |"
            continue
        low, middle, high = quartiles(row, plain, "step")
        yield (
            f"| {name} | {row['peak_bytes'] / 1e6:,.0f} | {row['peak_bytes'] / plain['peak_bytes']:.2f} "
            f"| {statistics.median(turn['step'] for turn in row['turns']):.2f} | {middle:.2f} | {low:.2f} to {high:.2f} "
            f"| {quartiles(row, plain, 'processor')[1]:.2f} | {bits(row, plain)} | {note} |"
        )


def quartiles(row: dict[str, Any], plain: dict[str, Any], what: str) -> list[float]:
    """Quartiles of the ratio to plain torch in the same turn."""
    pairs = zip(row["turns"], plain["turns"], strict=True)
    return statistics.quantiles([mine[what] / other[what] for mine, other in pairs], n=4)


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--test-device", action="store_true", help="peaks on the device of the tests, without times")
    parser.add_argument("--size", choices=SIZES, default="large", help="of the GPT (default: %(default)s)")
    parser.add_argument("--quick", action="store_const", const=("tiny", 2), help="a tiny model, two turns")
    args = parser.parse_args()
    args.size, args.steps = args.quick or (args.size, args.steps)
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {args.threads} threads")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        need, _ = pool.apply(needs, ("train", args.size, args.batch))
    print(f"torch holds {need / 1e6:,.0f} MB at the most\n")
    limits = {name: None if system.share is None else int(need * system.share) for name, system in SYSTEMS.items()}
    if args.test_device:
        on_device = {name: (run_on_test_device, (name, limit, args.size, args.batch)) for name, limit in limits.items()}
        rows = in_turns(on_device, 1)
        print("\n".join(table_of_the_test_device(rows)))
    else:
        rows = in_turns(
            {name: (run, (name, limit, args.size, args.batch, args.threads)) for name, limit in limits.items()},
            args.steps,
        )
        print("\n".join(table(rows)))
    if args.json is not None:
        args.json.write_text(json.dumps({"need": need, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
