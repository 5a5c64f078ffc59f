"""Train a GPT unmanaged, then in 75, 50 and 35 % of the memory that it needed, and compare the bits.

    memmgr demo
    memmgr demo --quick              a tiny model
    memmgr demo --budgets 60,40 --out picture.png

The model is a byte-level GPT of 10.9 M parameters, with dropout and AdamW; it learns the source files of this Python's
standard library. Every run is a process of its own, starts from the same seed and takes the same steps. The processes
take turns, a step each, while the others are stopped, so that other work of the machine affects all of them. A run's
bits are the SHA-256 over its parameters, optimizer state, RNG streams and losses.

The unmanaged run never imports memmgr. "Needed" is the sum of its live tensors at the worst moment, measured in a
process of its own, in which the C library keeps no freed memory back.

Exit code 1: some bits differ, a budget was passed, or a process's resident set grew to more than its budget + 64 MB.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from memmgr.config.extras import pip_line
from memmgr.config.machine import memory_bytes
from memmgr.config.sizes import show_size
from memmgr.policies import parse_policy
from memmgr.tools.bench.runs import Event, RunResult, RunSpec, in_turns, measured, with_need
from memmgr.tools.common.console import ProgressBar, megabytes, table
from memmgr.tools.common.other_work import OtherWork
from memmgr.tools.common.policy_option import add_policy
from memmgr.tools.common.usage_error import UsageError
from memmgr.tools.view import plot

RSS_SLACK_BYTES = 64_000_000
"""Memory of a managed process in addition to its budget: code, recipes, threads' stacks, copy buffers."""

FULL = RunSpec("unmanaged", steps=10, sizes={"layers": 6, "heads": 6, "width": 384, "context": 256}, batch=12)
QUICK = RunSpec("unmanaged", steps=12, sizes={"layers": 4, "heads": 4, "width": 128, "context": 128}, batch=12)


@dataclass(frozen=True)
class Verdict:
    """The verdict about one run."""

    result: RunResult
    same_bits: bool | None  # None without a reference
    within: bool | None  # budget and RSS limit held; None where there is no budget

    @property
    def good(self) -> bool:
        """Nothing to complain about."""
        return not self.result.failure and self.same_bits is not False and self.within is not False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("--steps", type=_positive, help=f"optimizer steps per run (default {FULL.steps})")
    parser.add_argument(
        "--budgets", type=_shares, default=_shares("75,50,35"), metavar="P,P", help="percentages (default 75,50,35)"
    )
    add_policy(parser, "auto")
    parser.add_argument("--out", type=Path, default=Path("memmgr-demo.png"), help="the picture (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model: under a minute")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _shares(text: str) -> list[float]:
    """Percentages, "75,50" or "75%,50%", as fractions."""
    try:
        shares = [float(part.strip().removesuffix("%")) / 100 for part in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0.01 <= share <= 10 for share in shares):
        raise argparse.ArgumentTypeError(f"{text!r}: expected percentages such as 75,50,35 (1 to 1000 each)")
    return shares


def run(args: argparse.Namespace) -> int:
    """Runs the demo; 0 when every bit and every budget held."""
    try:
        parse_policy(args.policy)
    except ValueError as error:
        raise UsageError(str(error)) from None
    base = QUICK if args.quick else FULL
    base = replace(base, steps=args.steps or base.steps)
    picture = _picture(args.out) if plot.available() else None
    others = OtherWork()
    results = _train(base, args.budgets, args.policy)
    busy = others.line("times are too long and ratios are uncertain; bits and memory do not depend on it")
    for line in busy:
        print(line, file=sys.stderr)
    if args.quick:
        print("a tiny model: memmgr's work for each op counts for more than with a larger one", file=sys.stderr)
    verdicts = [_judge(result, results[0]) for result in results]
    good = all(verdict.good for verdict in verdicts)
    if picture is not None:
        claim = "the same bits in less memory" if good else "NOT what was promised: see the table"
        plot.memory_over_time(results, picture, f"GPT, {results[0].parameters / 1e6:.1f} M parameters: {claim}")
    if args.json:
        runs = [v.result.to_json() | {"same_bits": v.same_bits, "within": v.within} for v in verdicts]
        print(json.dumps({"good": good, "picture": str(picture) if picture else None, "runs": runs}, indent=1))
    else:
        _report(verdicts, picture)
    return 0 if good else 1


def _picture(out: Path) -> Path:
    """The path of the picture; problems are reported before minutes of training."""
    picture = out / "memmgr-demo.png" if out.is_dir() else out
    if picture.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--out: {picture} ends in none of .png, .svg and .pdf")
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        new = not picture.exists()
        picture.open("ab").close()
        if new:
            picture.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {picture}: {error.strerror}; name another place with --out") from None
    return picture


def _train(base: RunSpec, shares: Sequence[float], policy: str) -> list[RunResult]:
    """The unmanaged run and one per share of its need, in turns. Only the first if its need cannot be measured."""
    with ProgressBar((1 + len(shares)) * base.steps) as bar:

        def show(spec: RunSpec, event: Event) -> None:
            if event["event"] == "step":
                loss, seconds = float.fromhex(event["loss"]), event["seconds"]
                bar.say(f"{spec.label}: step {event['index'] + 1}, loss {loss:.3f}, {seconds:.2f} s", advance=1)

        bar.say("unmanaged: measuring its need")
        need = measured(base)
        if need.failure:
            return [replace(need, spec=base)]
        together, there = int((1 + sum(shares)) * need.need_bytes), memory_bytes()
        if together > there:
            raise UsageError(
                f"the runs take turns and hold {show_size(together)} together, more than the {show_size(there)} that there are "
                "for this process: name fewer or smaller --budgets, or take --quick"
            )
        bar.say("starting")
        managed = [
            replace(base, label=f"{100 * share:g} %", budget_bytes=int(share * need.need_bytes), policy=policy)
            for share in shares
        ]
        first, *others = in_turns([base, *managed], show)
        return [with_need(first, need), *others]


def _judge(result: RunResult, unmanaged: RunResult) -> Verdict:
    budget = result.spec.budget_bytes
    if budget is None or result.failure:
        return Verdict(result, None, None)
    within = result.peak_bytes <= budget and result.rss_bytes <= budget + RSS_SLACK_BYTES
    return Verdict(result, None if unmanaged.failure or result.failure else result.same_bits(unmanaged), within)


_HEAD = tuple("run,budget,peak,process RSS,s/step,ratio,evicted,offloaded,recomputed,same bits".split(","))


def _report(verdicts: Sequence[Verdict], picture: Path | None) -> None:
    unmanaged = verdicts[0].result
    rows = []
    for verdict in verdicts:
        result, stats = verdict.result, verdict.result.stats
        if result.failure:
            rows.append((result.spec.label, megabytes(result.spec.budget_bytes or 0), *["-"] * 7, "failed"))
            continue
        budget = megabytes(result.spec.budget_bytes) if result.spec.budget_bytes is not None else "none"
        moved = ("", "", "")
        if stats:
            moved = (
                _counted(stats, "evictions", "evicted_bytes"),
                _counted(stats, "offloads", "offload_bytes"),
                f"{stats.get('recomputes', 0):,.0f} ({stats.get('recompute_seconds', 0):.1f} s)",
            )
        bits = {None: "", True: "yes", False: "NO"}[verdict.same_bits]
        ratio = "-" if unmanaged.failure else f"{result.seconds_a_step / unmanaged.seconds_a_step:.2f}x"
        peak = megabytes(result.peak_bytes)
        seconds = f"{result.seconds_a_step:.2f}"
        rows.append((result.spec.label, budget, peak, megabytes(result.rss_bytes), seconds, ratio, *moved, bits))
    print(
        f"\n{unmanaged.parameters / 1e6:.1f} M parameters, {unmanaged.spec.steps} steps, batch {unmanaged.spec.batch}"
    )
    table(_HEAD, rows)
    losses = [float.fromhex(loss) for loss in unmanaged.losses]
    if losses:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; bits {unmanaged.digest[:16]}")
    for verdict in verdicts:
        if verdict.result.failure:
            print(f"{verdict.result.spec.label} failed:\n{verdict.result.failure}")
        elif verdict.within is False:
            print(f"{verdict.result.spec.label}: the budget was passed")
    compared = [verdict.same_bits for verdict in verdicts[1:]]
    if unmanaged.failure:
        print("same bits: not compared, because the unmanaged run failed")
    else:
        failed = any(verdict.result.failure for verdict in verdicts)
        print(f"same bits: {'NO' if False in compared else 'not of all, because a run failed' if failed else 'yes'}")
    print(f"picture: {picture}" if picture else f"no picture without matplotlib: {pip_line('demo')}")


def _counted(stats: dict[str, float], count: str, total: str) -> str:
    """ "12 (34 MB)"; just the count where the bytes are not known."""
    number = f"{stats.get(count, 0):,.0f}"
    return f"{number} ({megabytes(stats[total])})" if total in stats else number
