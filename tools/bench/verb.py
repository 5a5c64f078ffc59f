"""Systems that save memory, side by side on this machine: time, peaks and bits of models under budgets, as a table and a picture.

    memmgr bench
    memmgr bench --models GPT,BERT --systems unmanaged,checkpoint,auto --budgets 50%,checkpoint --turns 9
    memmgr bench --models all --systems all --out everything     # the same command again goes on where it ended
    memmgr bench --max-batch --models ResNet --systems unmanaged,checkpoint,auto

Every cell trains in a process of its own, from the same beginning. The cells of a group take turns, a step each, while the others
wait; a ratio is of the same turn, and medians with quartiles are shown. Budgets are shares of the most bytes that plain
torch holds, or the peak of another system: `checkpoint`, `selective`. `peak` is the most bytes that torch's tensors
held at once, `resident` the process's resident set over its size before the model. Losses and parameters are compared
bit by bit with plain torch's.

--max-batch looks for each system's largest batch in a fixed memory, by default three times the bytes of the model's
parameters, gradients and optimizer states: memmgr's budget is that memory, the peak of others must not pass it.

The folder of --out gets bench.md, bench.png and bench.json. The last is written after every group, and a later run
continues from it. --device cuda of this command has not run on a GPU yet.

Models: {models}.
Systems: {systems}.

Exit code: 0; 1 when memmgr gave other bits; 2 for an option that makes no sense; 3 when --minutes ended it before its end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memmgr.config.did_you_mean import meant
from memmgr.config.machine import memory_bytes
from memmgr.config.sizes import UNLIMITED, parse_limit
from memmgr.tools.common.console import ProgressBar, table
from memmgr.tools.common.usage_error import UsageError
from memmgr.tools.view import plot

from .largest import largest
from .models import MODELS
from .picture import draw
from .record import Record, machine, opened
from .rows import Row, rows_of
from .systems import SYSTEMS, UNMANAGED
from .table import HEAD, LARGEST_HEAD, cells, heading, largest_cells, markdown
from .turns import Nursery, Say, Spec, once, together

__doc__ = (__doc__ or "").format(models=", ".join(MODELS), systems=", ".join(SYSTEMS))

PEAKS = ("checkpoint", "selective")
"""Systems whose peak can be a budget."""

Wanted = tuple[str, float | None, str]
"""(budget, share of the need, system) of a cell."""

_MODELS = "GPT,ResNet"
_SYSTEMS = "unmanaged,checkpoint,selective,save_on_cpu,auto,evict,offload"
_BUDGETS = "75%,50%,35%,checkpoint"
_SLOWEST = 1.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("--models", default=_MODELS, metavar="M,M", help="or all (default %(default)s)")
    parser.add_argument("--systems", default=_SYSTEMS, metavar="S,S", help="or all (default %(default)s)")
    parser.add_argument(
        "--budgets", metavar="B,B",
        help=f"of memmgr's systems: percentages, checkpoint, selective (default {_BUDGETS.replace('%', '%%')})",
    )  # fmt: skip
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="steps that are timed (default %(default)s)")
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
        help="in which it has to fit; none: all of the machine's (default: 3x the model's states)",
    )
    batches.add_argument(
        "--slowest", type=float, metavar="X",
        help=f"a sample may take X times as long as plain torch's at its own largest batch (default {_SLOWEST})",
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
    """Numbers that make no sense, and options that would say nothing; then the defaults of those."""
    for option in ("turns", "threads"):
        if getattr(args, option) < 1:
            raise UsageError(f"--{option}: {getattr(args, option)} is not a positive number")
    if args.minutes is not None and not args.minutes >= 0:
        raise UsageError(f"--minutes: {args.minutes:g} is no time")
    if args.slowest is not None and not args.slowest > 0:
        raise UsageError(f"--slowest: {args.slowest:g} is not a positive number")
    for option in ("memory", "slowest"):
        if not args.max_batch and getattr(args, option) is not None:
            raise UsageError(f"--{option} is of --max-batch")
    if args.max_batch and args.budgets is not None:
        raise UsageError("--budgets are of steps; with --max-batch the budget is --memory")
    args.slowest = _SLOWEST if args.slowest is None else args.slowest
    args.budgets = _BUDGETS if args.budgets is None else args.budgets


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


class _Bench:
    """One call of the verb."""

    def __init__(self, args: argparse.Namespace) -> None:
        _check(args)
        self.models = _chosen(args.models, "--models", list(MODELS))
        self.systems = _chosen(args.systems, "--systems", list(SYSTEMS))
        self.budgets = _budgets(args.budgets)
        self.memory = _size(args.memory) if args.memory else None
        _check_device(args.device)
        self.args = args
        self.began = time.monotonic()
        args.out.mkdir(parents=True, exist_ok=True)
        keys = ("device", "turns", "threads", "tiny", "slowest", "memory")
        settings = {key: getattr(args, key) for key in keys}
        self.record: Record = opened(args.out / "bench.json", settings, machine(args.device))
        self.late = False

    def spec(self, model: str, system: str, what: str, budget: str = "", budget_bytes: int | None = None) -> Spec:
        args = self.args
        return {
            "key": f"{model}|{budget}|{system}", "model": model, "system": system, "what": what, "group": budget or "own",
            "budget": budget, "budget_bytes": budget_bytes, "batch": None, "tiny": args.tiny, "device": args.device,
            "threads": args.threads, "turns": args.turns, "reference": system == UNMANAGED,
        }  # fmt: skip

    def over(self) -> bool:
        """No further group may begin."""
        minutes = self.args.minutes
        self.late = self.late or (minutes is not None and time.monotonic() - self.began > 60 * minutes)
        return self.late

    # ---- steps under budgets

    def groups(self, model: str) -> list[list[Wanted]]:
        """(budget, share, system): systems without a budget together with those at another system's peak; then each
        share.
        """
        plain = [name for name in self.systems if not SYSTEMS[name].policy and name != UNMANAGED]
        managed = [name for name in self.systems if SYSTEMS[name].policy]
        own: list[Wanted] = [("", None, name) for name in (UNMANAGED, *plain)]
        own += [(label, None, name) for label, share in self.budgets if share is None for name in managed]
        shares: list[list[Wanted]] = [
            [(label, share, name) for name in managed] for label, share in self.budgets if share is not None
        ]
        wanted = [
            [cell for cell in group if f"{model}|{cell[0]}|{cell[2]}" not in self.record.rows]
            for group in [own, *shares]
        ]
        return [group for group in wanted if group]

    def needs(self, children: Nursery, model: str, system: str, say: Say) -> dict[str, Any]:
        """The need of a system without memmgr, measured once."""
        known = self.record.needs.setdefault(model, {})
        if system not in known:
            say(f"{model}, {system}: what it needs")
            cell = once(children, self.spec(model, system, "needs"))
            known[system] = {"error": cell.error} if cell.error else cell.told
        found: dict[str, Any] = known[system]
        return found

    def measure(self) -> None:
        todo = {model: self.groups(model) for model in self.models}
        total = sum(len(group) for groups in todo.values() for group in groups)
        with ProgressBar(total) as bar, Nursery(self.args.device) as children:
            for model, group in ((model, group) for model, groups in todo.items() for group in groups):
                if self.over():
                    break
                self.measure_group(children, model, group, bar)

    def measure_group(self, children: Nursery, model: str, group: Sequence[Wanted], bar: ProgressBar) -> None:
        need = self.needs(children, model, UNMANAGED, bar.say)
        specs: list[Spec] = []
        failed: list[Row] = []
        reference = group[0][0] if group[0][1] is not None else ""
        if (reference, group[0][1], UNMANAGED) not in group:
            specs.append(self.spec(model, UNMANAGED, "turns", reference))
        for label, share, system in group:
            peak = need if share is not None or not label else self.needs(children, model, label, bar.say)
            error = need.get("error") or peak.get("error", "")
            limit = int((share or 1.0) * peak["peak_bytes"]) if label and not error else None
            if error:
                failed.append(Row(model, label, system, error=error))
            else:
                specs.append(self.spec(model, system, "turns", label, limit))
        rows = rows_of(together(children, specs, self.args.turns, bar.say), need.get("peak_bytes", 0)) if specs else []
        self.record.rows |= {row.key: row for row in [*rows, *failed]}
        self.record.save()
        bar.say(f"{model}, {reference or 'own'}: done", advance=len(group))

    # ---- the largest batch

    def measure_largest(self) -> None:
        systems = [UNMANAGED, *(name for name in self.systems if name != UNMANAGED)]
        with ProgressBar(len(self.models) * len(systems)) as bar, Nursery(self.args.device) as children:
            for model, system in ((model, system) for model in self.models for system in systems):
                if not self.over():
                    self.one_largest(children, model, system, bar)

    def one_largest(self, children: Nursery, model: str, system: str, bar: ProgressBar) -> None:
        need = self.needs(children, model, UNMANAGED, bar.say)
        if "error" in need:
            raise UsageError(f"{model}: {need['error']}")
        found = self.record.largest.setdefault(
            model, {"memory_bytes": self.memory or 3 * need["state_bytes"], "systems": {}}
        )
        if system not in found["systems"]:
            plain = found["systems"].get(UNMANAGED)
            slowest = None
            if plain is not None and plain["batch"]:
                slowest = self.args.slowest * plain["seconds"] / plain["batch"]
            first = plain["batch"] if plain is not None and plain["batch"] else max(1, MODELS[model][1] // 2)
            spec = self.spec(model, system, "attempt") | {"turns": min(3, self.args.turns)}
            found["systems"][system] = largest(children, spec, found["memory_bytes"], slowest, first, bar.say)
            self.record.save()
        bar.say(f"{model}, {system}: a batch of {found['systems'][system]['batch']}", advance=1)

    # ---- output

    def rows(self) -> list[Row]:
        """By model and budget, as they are asked for."""
        order = {name: i for i, name in enumerate(("", *(label for label, _ in self.budgets)))}
        systems = list(SYSTEMS)
        found = [r for r in self.record.rows.values() if r.model in self.models and r.budget in order]
        found = [r for r in found if r.system in (*self.systems, UNMANAGED)]
        return sorted(found, key=lambda r: (self.models.index(r.model), order[r.budget], systems.index(r.system)))

    def show(self) -> int:
        """Tables and files; the exit code."""
        rows, out = self.rows(), self.args.out
        told = list(cells(rows))
        text = heading(self.record) + "\n\n"
        text += markdown(HEAD, told) if told else ""
        largest_told = list(largest_cells(self.record))
        text += "\n" + markdown(LARGEST_HEAD, largest_told) if largest_told else ""
        (out / "bench.md").write_text(text)
        picture: Path | None = None
        if plot.available() and told:
            picture = out / "bench.png"
            draw(rows, picture, heading(self.record))
        if self.args.json:
            print(json.dumps(self.record.to_json(), indent=1))
        else:
            print(heading(self.record))
            if self.args.max_batch:
                table(LARGEST_HEAD, largest_told)
            elif told:
                table(HEAD, list(cells(rows, longest=60)))
            print(f"{out / 'bench.json'}, {out / 'bench.md'}" + (f", {picture}" if picture else ""))
            if told and not plot.available():
                print("no picture: pip install 'memmgr[demo]' brings matplotlib")
        if self.late:
            print(f"ended after {self.args.minutes:g} minutes; the same command goes on", file=sys.stderr)
            return 3
        return 1 if any(r.bits == "no" and SYSTEMS[r.system].policy for r in rows) else 0


def _size(text: str) -> int:
    try:
        size = parse_limit(text, what="--memory", more=('"none" (all of the machine\'s)',))
    except ValueError as error:
        raise UsageError(str(error)) from None
    return memory_bytes() if size == UNLIMITED else size


def run(args: argparse.Namespace) -> int:
    """Measures the missing cells and shows all; see the module's text for the exit code."""
    bench = _Bench(args)
    # A signal from outside also deletes unfinished files.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if args.max_batch:
            bench.measure_largest()
        else:
            bench.measure()
    finally:
        signal.signal(signal.SIGTERM, before)
    return bench.show()
