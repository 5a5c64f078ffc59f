"""Systems that save memory, side by side on this machine: time, peaks and bits of models under budgets.

    memmgr bench
    memmgr bench --models GPT,BERT --systems unmanaged,checkpoint,auto
    memmgr bench --models all --systems all --out everything
    memmgr bench --max-batch --models ResNet --systems unmanaged,auto

Each system trains in a process of its own and takes turns with the others. The folder of --out gets bench.md, bench.png
and bench.json; the same command again goes on where it ended.

--budgets, of memmgr's systems: percentages, or the peak of checkpoint or selective. --memory none: all of the machine's.
--slowest compares a sample with one of plain torch at its own largest batch.

Models: {models}.

Systems: {systems}.

Exit code: 0; 1 when memmgr gave other bits; 2 for a wrong option; 3 when --minutes ended it before its end.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from memmgr.config.did_you_mean import meant
from memmgr.config.machine import memory_bytes
from memmgr.config.sizes import UNLIMITED, parse_limit
from memmgr.tools.common.interrupts import ends_at_once, termination_unwinds
from memmgr.tools.common.usage_error import UsageError

from .names import MODELS, SYSTEMS

__doc__ = (__doc__ or "").format(models=", ".join(MODELS), systems=", ".join(SYSTEMS))

PEAKS = ("checkpoint", "selective", "compile_budget")
"""Systems whose peak can be a budget."""

_MODELS = "GPT,ResNet"
_SYSTEMS = "unmanaged,checkpoint,selective,save_on_cpu,auto,evict,offload"
_BUDGETS = "75%,50%,35%,checkpoint"
_SLOWEST = 1.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("--models", default=_MODELS, metavar="M,M", help="or all (default %(default)s)")
    parser.add_argument(
        "--systems", default=_SYSTEMS, metavar="S,S", help="or all (default: the first four, auto, evict, offload)"
    )
    parser.add_argument(
        "--budgets", metavar="B,B",
        help=f"(default {_BUDGETS.replace('%', '%%')})",
    )  # fmt: skip
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="steps that are timed (default %(default)s)")
    parser.add_argument("--batch", type=int, metavar="N", help="samples a step, of every model (default: its own)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="of each cell")
    parser.add_argument(
        "--out", type=Path, default=Path("memmgr-bench"), metavar="FOLDER", help="(default %(default)s)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default %(default)s)")
    parser.add_argument(
        "--minutes", type=float, metavar="N", help="begin no group after so many; run it again to go on"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny models: a look at the machinery")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    batches = parser.add_argument_group("the largest batch")
    batches.add_argument("--max-batch", action="store_true", help="look for it, instead of steps under budgets")
    batches.add_argument(
        "--memory",
        metavar="SIZE",
        help="in which it fits (default: 3x the model's states)",
    )
    batches.add_argument(
        "--slowest", type=float, metavar="X",
        help=f"a sample takes at most X times torch's (default {_SLOWEST})",
    )  # fmt: skip


def _chosen(text: str, option: str, known: Sequence[str]) -> list[str]:
    if text == "all":
        return list(known)
    by_name = {name.lower().replace("-", ""): name for name in known}
    found = []
    for part in text.split(","):
        name = by_name.get(part.strip().lower().replace("-", ""))
        if name is None:
            raise UsageError(f"{option}: {part.strip()!r} is none of {', '.join(known)}{meant(part.strip(), known)}")
        found.append(name)
    return list(dict.fromkeys(found))


def _budgets(text: str) -> list[tuple[str, float | None]]:
    """(label, share of the need), or (system, None) for a system's peak."""
    found: list[tuple[str, float | None]] = []
    for part in (piece.strip() for piece in text.split(",")):
        if part in PEAKS:
            found.append((part, None))
            continue
        try:
            share = float(part.removesuffix("%")) / 100
        except ValueError:
            share = 0.0
        if not 0.01 <= share <= 10:
            raise UsageError(
                f"--budgets: {part!r} is neither a percentage such as 50% (1 to 1000) nor {' nor '.join(PEAKS)}"
            )
        found.append((f"{100 * share:g}%", share))
    return list(dict.fromkeys(found))


def _check(args: argparse.Namespace) -> None:
    """Refuses numbers that make no sense, and options without an effect; then sets the defaults, and reads the lists."""
    for option in ("turns", "threads", "batch"):
        if getattr(args, option) is not None and getattr(args, option) < 1:
            raise UsageError(f"--{option}: {getattr(args, option)} is not a positive number")
    if args.minutes is not None and not args.minutes >= 0:
        raise UsageError(f"--minutes: {args.minutes:g} is no time")
    if args.slowest is not None and not args.slowest > 0:
        raise UsageError(f"--slowest: {args.slowest:g} is not a positive number")
    for option in ("memory", "slowest"):
        if not args.max_batch and getattr(args, option) is not None:
            raise UsageError(f"--{option} is of --max-batch")
    if args.max_batch and args.batch is not None:
        raise UsageError("--max-batch looks for the batch: leave --batch out")
    if args.max_batch and args.budgets is not None:
        raise UsageError("--budgets are of steps; with --max-batch the budget is --memory")
    args.slowest = _SLOWEST if args.slowest is None else args.slowest
    args.models = _chosen(args.models, "--models", MODELS)
    args.systems = _chosen(args.systems, "--systems", SYSTEMS)
    args.budgets = _budgets(_BUDGETS if args.budgets is None else args.budgets)
    args.memory = _size(args.memory) if args.memory else None


def _check_device(device: str) -> None:
    if device == "cpu":
        return
    import torch

    if torch.version.cuda is None:
        raise UsageError(f"--device cuda: torch {torch.__version__} is built without CUDA; install a torch for CUDA")
    if not torch.cuda.is_available():
        raise UsageError(
            "--device cuda: torch finds no GPU (torch.cuda.is_available() is False); memmgr doctor says more"
        )


def _size(text: str) -> int:
    try:
        size = parse_limit(text, what="--memory", more=('"none" (all of the machine\'s)',))
    except ValueError as error:
        raise UsageError(str(error)) from None
    return memory_bytes() if size == UNLIMITED else size


def run(args: argparse.Namespace) -> int:
    """Measures the missing cells and shows all; see the module's text for the exit code."""
    _check(args)
    with ends_at_once("bench"):  # torch is imported
        from .comparison import Bench

        _check_device(args.device)
    bench = Bench(args)
    with termination_unwinds():
        if args.max_batch:
            bench.measure_largest()
        else:
            bench.measure()
    return bench.show()
