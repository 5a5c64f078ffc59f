"""Run a policy over a recorded pass: the cost of a budget, before any training.

    memmgr simulate run.trace --ratio 60%                the planner
    memmgr simulate run.trace --ratio 60% --policy all   a table
    memmgr simulate run.trace --sweep --picture sweep.png
    memmgr simulate --job traces --total 48GB            each rank's best budget

The pass is a file of memmgr trace, or an operator log of DTR. Policies are plan (the default: a live run follows it from
about its third step), auto (a live run before it has a plan), the published systems, and every name that
memmgr.budget(policy=...) takes. --policy help lists them.

Exit code: 0 for an answer, "does not fit" included; 2 for a file or an option that makes no sense.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from memmgr.config.did_you_mean import meant
from memmgr.config.sizes import UNLIMITED, Need, Room, parse_budget, parse_share, round_up, show_size
from memmgr.policies.online.policy import run_online
from memmgr.policies.plan.bound import lower_bound_seconds
from memmgr.policies.plan.knee import knee
from memmgr.policies.plan.paging import least_seconds
from memmgr.policies.plan.planner import plan
from memmgr.policies.published.milp import LIMIT_SECONDS, limited_to
from memmgr.policies.published.systems import PUBLISHED, applicable
from memmgr.policies.rules.registry import parse_policy
from memmgr.policies.simulate.simulator import Run, simulate
from memmgr.policies.trace import TierLink, Trace, TraceError
from memmgr.policies.trace.schedule import Step, judge_records, replay
from memmgr.telemetry.trace_file import is_trace, read_trace
from memmgr.tools.common.console import ProgressBar, megabytes, table
from memmgr.tools.common.dtr_log import read_dtr_log
from memmgr.tools.common.outlook import fitting, outlook
from memmgr.tools.common.outputs import check_output, quiet_output, write_whole
from memmgr.tools.common.policy_option import Listed, listing
from memmgr.tools.common.sweep import cut, no_worse
from memmgr.tools.common.usage_error import UsageError, check_readable
from memmgr.tools.view import plot, simulate_job, sweep_text
from memmgr.tools.view.run_state import is_log

_PUBLISHED = """\
of simulate alone:
  plan          the planner, which knows the whole pass (the default)
  auto          a live run before it has a plan; online for operator logs
  online        decides op by op which ops run again, for operator logs
  all           a table of all of these
  capuchin      swaps by free time, recomputes by memory saving per second
  delta_paper   DELTA's online algorithm as published
  sqrt_n, chen_greedy   checkpointing of segments (Chen 2016)
  coop, tcontrol        DTR's successors: windows of addresses, locked tensors
  checkmate, moccasin   integer programs that choose which ops run again (scipy)
  rotor, rockmate       dynamic programs over chains of blocks
  pofo                  the same with a tier
  vdnn_all, vdnn_conv, flashneuron, swapadvisor, autotm   swap only, with a tier
  superneurons          convolutions to the tier, ops between them run again
  tsplit                from bottleneck to bottleneck, least time for each byte
  zero_offload, zero_infinity, patrickstar, l2l           model states are offloaded"""

RULES = (
    "dtr_eq",
    "dtr",
    "dtr_local",
    "msps",
    "lru+evict",
    "largest+evict",
)
RULES_WITH_LINK = ("delta", "offload", "dtr_eq")


@dataclass(frozen=True)
class Result:
    """One policy at one budget; the fields of --json."""

    policy: str  # as it was asked for
    ratio: float  # budget over the unmanaged peak
    budget_bytes: int  # most bytes resident
    feasible: bool  # whether the pass fits
    overhead: float | None  # time over the unmanaged one's, None if infeasible
    peak_bytes: int  # most bytes resident
    lower_bound: float | None  # an overhead that no schedule can go below; None if it cannot be had (or none exists)
    seconds: float  # time to decide
    unmanaged_peak_bytes: int  # without a budget
    unmanaged_seconds: float  # time of the pass without a budget
    wait_seconds: float = 0.0  # of the pass, waited for copies
    recomputes: int = 0  # ops that ran again
    why: str = ""  # if infeasible
    least_bytes: int = 0  # the smallest budget that the policy can keep; 0: unknown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE", help="the pass")
    parser.add_argument("--format", choices=("dtr", "trace"), help="default: by the file's contents")
    parser.add_argument(
        "--policy",
        action=Listed,
        listing=lambda: f"{_PUBLISHED}\n\n{listing()}",
        metavar="NAME",
        help="default: plan (operator logs: auto); help lists all",
    )
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--ratio", metavar="R", help="budget as a share of the unmanaged peak: 0.6, 60%%")
    budget.add_argument("--budget", metavar="SIZE", help="12GB, 800MiB, need*0.6, auto, none")
    budget.add_argument("--sweep", action="store_true", help="all of the need down to a tenth of it")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="of --sweep or --job: the curves, a .png or .svg")
    simulate_job.add_arguments(parser)
    parser.add_argument("--link", type=float, metavar="GB/S", help="bandwidth of a tier, each way")
    parser.add_argument(
        "--solver-seconds", type=float, default=LIMIT_SECONDS.get(), metavar="S",
        help="limit of an integer program (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--schedule-out", type=Path, metavar="FILE", help="write the schedule, one JSON object a line")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Simulates; see the module's text for the exit code."""
    with _one_line():
        if not args.solver_seconds >= 0:
            raise UsageError(f"--solver-seconds must not be negative, is {args.solver_seconds}")
        with limited_to(args.solver_seconds):
            return _run(args)


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except (TraceError, ValueError, OSError, simulate_job.Refused) as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        raise UsageError(" ".join(text.split())) from None


def _run(args: argparse.Namespace) -> int:
    if args.job is not None:
        return _job(args)
    if args.file is None:
        raise UsageError("a file is needed: FILE of a pass, or --job FILE ... of the ranks of a distributed job")
    check_readable(args.file)
    if args.ratio is None and args.budget is None and not args.sweep:
        _read(args.file, args.format)  # a wrong file is the first error
        raise UsageError("a budget is needed: --ratio 60%, --budget 12GB or --sweep")
    if args.total or args.host_total or args.limit:
        raise UsageError("--total, --host-total and --limit are of a --job")
    if args.schedule_out is not None:
        check_output(args.schedule_out, "--schedule-out", [args.file])
    share = parse_share(args.ratio).share if args.ratio is not None else None
    if args.budget is not None:
        parse_budget(args.budget, what="--budget")
    if args.policy not in (None, "all"):
        _policy(args.policy, None)
    trace = _read(args.file, args.format)
    if not trace.ops:
        raise UsageError(f"{args.file}: no ops")
    if not trace.complete:
        print(f"memmgr simulate: {args.file} ends inside an op, which is left out", file=sys.stderr)
    if args.policy is None:
        args.policy = "auto" if trace.copy_on_write else "plan"
    peak = trace.unmanaged_peak[0]
    if args.sweep:
        return _sweep(args, trace)
    if args.picture:
        raise UsageError("--picture is drawn of a --sweep")
    tier = _tier(trace, args.link)
    budget = int(peak * share) if share is not None else _bytes(args, trace, tier)
    ratio = share if share is not None else budget / max(peak, 1)
    bound = _lower_bound(trace, budget, tier)
    if args.policy == "all":
        if args.schedule_out:
            raise UsageError("--schedule-out needs one policy, not all")
        results = []
        names = _all(trace, tier)
        with ProgressBar(len(names)) as progress:
            for name in names:
                progress.say(name, 1)
                results.append(_simulate(trace, name, ratio, budget, tier, bound)[0])
        if args.json:
            print(json.dumps({"policy": "all", "results": [asdict(r) for r in results]}))
        else:
            _show(results, tier)
        return 0
    result, steps = _simulate(trace, args.policy, ratio, budget, tier, bound)
    if args.policy == "plan" and not result.feasible:
        result = replace(result, least_bytes=fitting(trace, outlook(trace, budget, tier)[0], tier))
    if args.schedule_out and steps:
        _write(args.schedule_out, trace, steps)
    if args.json:
        print(json.dumps(asdict(result)))
    else:
        _show([result], tier)
    return 0


def _job(args: argparse.Namespace) -> int:
    """The budgets of a job's ranks."""
    if args.file or args.ratio or args.budget or args.sweep or args.format:
        raise UsageError(
            "--job takes --total, --host-total or --limit; FILE, --ratio, --budget, --sweep and --format are of one pass"
        )
    if args.policy == "all":
        raise UsageError("--job needs one policy, not all")
    plot.check_picture(args.picture)
    name = args.policy or "plan"

    def seconds(trace: Trace, budget: int) -> float | None:
        peak = max(trace.unmanaged_peak[0], 1)
        found = _simulate(trace, name, budget / peak, budget, _tier(trace, args.link), None)[0]
        return None if found.overhead is None else found.overhead * trace.seconds

    return simulate_job.run(args, seconds)


def _sweep(args: argparse.Namespace, trace: Trace) -> int:
    """The slowdown by budget: a row a budget, a column a policy, and the bound."""
    if args.schedule_out:
        raise UsageError("--schedule-out needs one budget, not --sweep")
    plot.check_picture(args.picture)
    peak, tier = trace.unmanaged_peak[0], _tier(trace, args.link)
    names = _all(trace, tier) if args.policy == "all" else [args.policy]
    found: list[list[Result]] = []
    with ProgressBar(10 * len(names)) as progress:
        for tenths in range(10, 0, -1):
            budget = peak * tenths // 10
            bound = _lower_bound(trace, budget, tier)
            found.append([])
            for name in names:
                progress.say(f"{name} at {tenths * 10} %", 1)
                found[-1].append(_simulate(trace, name, tenths / 10, budget, tier, bound)[0])
    if "plan" in names:  # the policies that are compared are shown as they are
        column = names.index("plan")
        for row, best in zip(found, _with_smaller([row[column] for row in found]), strict=True):
            row[column] = best
    if args.picture:
        points = [[plot.Point(r.ratio, r.overhead, r.lower_bound, r.policy) for r in row] for row in found]
        plot.slowdown(
            points,
            args.picture,
            f"{args.file.name}: {megabytes(peak)} and {trace.seconds * 1e3:,.1f} ms unmanaged"
            + cut([r.overhead for row in found for r in row], plot.HIGHEST),
        )
    if args.json:
        print(json.dumps({"policy": args.policy, "sweep": [asdict(result) for row in found for result in row]}))
        return 0
    print(
        f"unmanaged: {megabytes(peak)}, {trace.seconds * 1e3:,.1f} ms; time over unmanaged, by budget (-: no schedule)"
    )
    _show_assumed(tier)
    if len(names) == 1:
        sweep_text.show_one(found)
    else:
        sweep_text.show_systems(names, found)
    _show_why(row[i] for i in range(len(names)) for row in found if not any(other[i].feasible for other in found))
    if args.picture:
        print(args.picture)
    return 0


def _with_smaller(curve: list[Result]) -> list[Result]:
    return [
        replace(
            curve[k], ratio=own.ratio, budget_bytes=own.budget_bytes, lower_bound=own.lower_bound, seconds=own.seconds
        )
        for own, k in zip(curve, no_worse([r.overhead for r in curve]), strict=True)
    ]


def _read(path: Path, form: str | None) -> Trace:
    if form is None:
        try:
            return read_trace(path)
        except TraceError as error:
            if is_trace(path):
                raise
            if is_log(path):
                raise UsageError(
                    f"{path} is a run's log, for memmgr report; memmgr trace records a pass to simulate"
                ) from None
            try:
                return read_dtr_log(path)
            except TraceError as no_log:
                told = no_log if "not a trace file" in str(error) else error
                raise UsageError(f"{told}; FILE is a pass that memmgr trace has recorded, or an operator log") from None
    return read_dtr_log(path) if form == "dtr" else read_trace(path)


def _bytes(args: argparse.Namespace, trace: Trace, tier: TierLink | None) -> int:
    """The budget. Here the need is known: `need*0.6` is a share of it, `none` all of it, `auto` the knee of the
    policy's curve.
    """
    need = trace.unmanaged_peak[0]
    asked = parse_budget(args.budget, what="--budget")
    if isinstance(asked, Room):
        raise UsageError("--budget device: a recorded pass has no device; name a size, need*0.6 or auto")
    if isinstance(asked, Need) and asked.share is None:
        if args.policy == "all":
            raise UsageError("--budget auto needs one policy, not all: each has a knee of its own")
        return knee(
            need, lambda size: _simulate(trace, args.policy, size / need, size, tier, None)[0].overhead
        ).budget_bytes
    if isinstance(asked, Need):
        return max(1, int(need * (asked.share or 1.0)))
    return need if asked == UNLIMITED else asked


def _tier(trace: Trace, gigabytes_per_second: float | None) -> TierLink | None:
    if gigabytes_per_second is None:
        return trace.links[0] if trace.links else None
    if not gigabytes_per_second >= 0:
        raise UsageError(f"--link must not be negative, is {gigabytes_per_second}")
    rate = gigabytes_per_second * 1e9
    return TierLink("host", rate, rate) if rate else None


def _lower_bound(trace: Trace, budget: int, tier: TierLink | None) -> float | None:
    if trace.cycle and tier is not None:
        return least_seconds(trace, budget, tier) / trace.seconds if trace.seconds else None
    extra = lower_bound_seconds(trace, budget, link=tier)
    return 1.0 + extra / trace.seconds if trace.seconds and extra < float("inf") else None


def _all(trace: Trace, tier: TierLink | None) -> list[str]:
    return ["auto", "plan", *applicable(trace, tier), *(RULES_WITH_LINK if tier else RULES)]


class _Outcome(NamedTuple):
    """A policy's result; `away` and `clean`: of a cycle, as `replay` takes them."""

    feasible: bool
    steps: list[Step]
    why: str
    away: Sequence[int] = ()
    clean: Sequence[int] = ()
    least_bytes: int = 0


def _simulate(
    trace: Trace, name: str, ratio: float, budget: int, tier: TierLink | None, bound: float | None
) -> tuple[Result, list[Step]]:
    decide = _policy(name, tier)
    began = time.perf_counter()
    with quiet_output():
        feasible, steps, why, away, clean, least = decide(trace, budget)
    seconds = time.perf_counter() - began
    rates: dict[str, Any] = {}
    if tier is not None:
        rates = {"write_rate": tier.write_bytes_per_second, "read_rate": tier.read_bytes_per_second}
        rates["latency_seconds"] = tier.latency_seconds
        rates["shared"] = tier.shared
    cost = replay(trace, steps, budget, away=away, clean=clean, **rates)
    if feasible and not cost.valid:
        raise AssertionError(f"{name} broke a rule: {cost.why}")  # a bug of memmgr, with its stack
    overhead = cost.seconds / trace.seconds if feasible and trace.seconds else (1.0 if feasible else None)
    result = Result(
        name, ratio, budget, feasible, overhead, cost.peak_bytes, bound, seconds, trace.unmanaged_peak[0], trace.seconds,
        cost.wait_seconds, cost.recomputes, why, least,
    )  # fmt: skip
    return result, steps


def _policy(name: str, tier: TierLink | None) -> Callable[[Trace, int], _Outcome]:
    if name == "plan":
        return lambda trace, budget: _plan(trace, budget, tier)
    if name in ("online", "auto") and (tier is None or name == "online"):
        return _online if name == "online" else _auto
    if name in PUBLISHED:
        return lambda trace, budget: _outcome(PUBLISHED[name](trace, budget, tier))
    try:
        policy = parse_policy(name)
    except ValueError as error:
        near = meant(name, (*PUBLISHED, "plan", "online", "all"))
        raise UsageError(f"unknown policy {name!r}{near}" if near else f"{error}; --policy help lists all") from None
    return lambda trace, budget: _outcome(simulate(trace, budget, policy, tier))


def _outcome(run: Run) -> _Outcome:
    return _Outcome(run.feasible, run.steps, run.why, run.away, run.clean, run.least_bytes)


def _auto(trace: Trace, budget: int) -> _Outcome:
    if trace.copy_on_write:
        return _online(trace, budget)
    return _outcome(simulate(trace, budget, parse_policy("auto"), None))


def _online(trace: Trace, budget: int) -> _Outcome:
    if not trace.copy_on_write:
        raise UsageError("online is for operator logs: in a measured pass the program itself holds tensors; try auto")
    feasible, machine = run_online(trace, budget)
    return _Outcome(feasible, machine.steps, machine.why)


def _plan(trace: Trace, budget: int, tier: TierLink | None) -> _Outcome:
    made = plan(trace, budget, link=tier)
    why = "" if made.feasible else "no plan was found"
    return _Outcome(made.feasible, list(made.steps), why, made.away, made.clean)


def _write(path: Path, trace: Trace, steps: list[Step]) -> None:
    try:
        records = [json.dumps(record) for record in judge_records(trace, steps)]
    except ValueError:  # with a link: our own words, beside the judge's
        records = [_own_record(trace, step) for step in steps]
    write_whole(path, "".join(f"{record}\n" for record in records))


def _own_record(trace: Trace, step: Step) -> str:
    do = step.do.value
    return json.dumps(
        {"do": do, "op": step.target}
        if do in ("compute", "recompute")
        else {"do": do, "storage": trace.storages[step.target].name}
    )


def _too_small(result: Result) -> str:
    if result.least_bytes > result.budget_bytes:
        return f"does not fit below {show_size(round_up(result.least_bytes))}"
    return "-" if result.why else "does not fit"


def _show_why(results: Iterable[Result]) -> None:
    """Below a table: why there is no figure where that is not for the budget's size (a package that is missing, no tier)."""
    said = {f"{r.policy}: {r.why}" for r in results if not r.feasible and r.why and r.least_bytes <= r.budget_bytes}
    print("".join(f"{line}\n" for line in sorted(said)), end="")


def _show_assumed(link: TierLink | None) -> None:
    if link is not None:
        rate = show_size(link.read_bytes_per_second)
        print(f"assumed: a link that moves {rate} a second each way and does nothing else, and no cost per op")


def _show(results: list[Result], link: TierLink | None) -> None:
    first = results[0]
    bound = f", no method below {first.lower_bound:.4f}" if first.lower_bound is not None else ""
    print(
        f"unmanaged: {megabytes(first.unmanaged_peak_bytes)}, {first.unmanaged_seconds * 1e3:,.1f} ms; "
        f"budget: {megabytes(first.budget_bytes)} ({first.ratio:.0%}){bound}"
    )
    _show_assumed(link)
    rows = [
        [
            r.policy,
            f"{r.overhead:.4f}" if r.overhead is not None else _too_small(r),
            megabytes(r.peak_bytes) if r.feasible else "",
            f"{r.recomputes:,}" if r.feasible else "",
            f"{r.wait_seconds * 1e3:,.1f} ms" if r.feasible else "",
            f"{r.seconds:.2f} s",
        ]
        for r in results
    ]
    table(["policy", "time over unmanaged", "peak", "recomputed ops", "waits", "decided in"], rows)
    _show_why(results)
