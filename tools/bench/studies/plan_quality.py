"""How good decisions are: the online policy and the planner, compared with DTR's and with the lower bound.

    python tools/bench/studies/plan_quality.py [--logs DIR]
                                               [--sections logs,floor,link,shapes,big,sensitivity] [--json FILE] [--quick]

Sections:
  logs         operator logs x ratios of the unmanaged peak, recompute only. dtr_eq and the lower bound are those of the logs'
               reference.json. Each schedule of ours goes through the judge (check_schedule.py beside the logs, a process of
               its own); a figure that it does not confirm ends the run.
  floor        the smallest budgets at which there is a plan, on a fine scan, beside the largest op's need; and holes.
  link         logs x ratios x 12 and 50 GB/s: recompute alone, offload alone, both, and the bound with a link.
  shapes       the same figures on made-up passes of seven shapes (_passes.py); dtr_eq is our simulator's here.
  big          10,000 ops: seconds to plan.
  sensitivity  the online policy with other constants, without its table of derivatives, and without the mark of backward.

Geometric means are of (overhead - 1) over another's, over the points where both are feasible; points where dtr_eq's or the
bound's overhead is under 0.2 % are left out (issue 4, point 5). Times are of this machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy

sys.path.insert(0, str(Path(__file__).resolve().parent))  # `make bench` runs with -P

from _passes import SHAPES

from memmgr.policies.online import policy as online_policy
from memmgr.policies.online import saved as online_saved
from memmgr.policies.online.policy import run_online
from memmgr.policies.plan.bound import lower_bound_seconds
from memmgr.policies.plan.planner import plan
from memmgr.policies.plan.smallest_budget import smallest_budget_bytes
from memmgr.policies.rules.registry import parse_policy
from memmgr.policies.simulate.simulator import simulate
from memmgr.policies.trace import TierLink, Trace
from memmgr.policies.trace.columns import Problem
from memmgr.policies.trace.least_memory import least_bytes
from memmgr.policies.trace.schedule import Step, judge_records, replay
from memmgr.tools.common.dtr_log import read_dtr_log

RATIOS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
BELOW = (0.2, 0.1)
SMALL = 0.002  # overheads under it are left out of means
MOST = 2.0  # reference.json leaves out slower runs; ours is reported all the same


@dataclass(frozen=True)
class Point:
    """One pass at one budget; overheads, None where there is none."""

    name: str
    ratio: float
    dtr_eq: float | None
    online: float | None
    plan: float | None
    bound: float | None
    plan_seconds: float
    online_seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    beside = Path(os.environ.get("MEMMGR_SHARED", Path(__file__).resolve().parents[4] / "shared"))
    parser.add_argument("--logs", type=Path, default=beside / "dtr-logs")
    parser.add_argument("--sections", default="logs,floor,link,shapes,big,sensitivity")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer ratios, smaller passes")
    args = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}", end=", ")
    print(f"numpy {np.__version__}, scipy {scipy.__version__}")
    sections = {"logs": logs, "floor": floor, "link": link, "shapes": shapes, "big": big, "sensitivity": sensitivity}
    found: dict[str, Any] = {}
    for name in args.sections.split(","):
        if name in ("logs", "floor", "link", "sensitivity") and not args.logs.is_dir():
            print(f"\n## {name}: no operator logs in {args.logs}")
            continue
        print(f"\n## {name}\n")
        found[name] = sections[name](args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1, default=vars))
    return 0


# ---- recompute only


def logs(args: argparse.Namespace) -> list[Point]:
    reference = json.loads((args.logs / "reference.json").read_text())
    points = []
    for name in sorted(reference):
        file = args.logs / f"{name}.log"
        trace = read_dtr_log(file)
        theirs = reference[name]["overhead"]
        for ratio in (0.7, 0.4) if args.quick else (*RATIOS, *BELOW):
            budget = int(trace.unmanaged_peak[0] * ratio)
            steps, seconds = _decided(trace, budget)
            ours = [_judged(file, trace, s, budget) if s is not None else None for s in steps]
            told = [theirs[key][str(ratio)] for key in ("dtr_eq", "lower_bound")]
            points.append(Point(name, ratio, told[0], ours[0], ours[1], told[1], seconds[1], seconds[0]))
            _check(points[-1], trace, budget)
    _table(points)
    return points


def shapes(args: argparse.Namespace) -> list[Point]:
    points = []
    for name, make in SHAPES.items():
        trace = make(150 if args.quick else 600, 0)
        for ratio in (0.7, 0.4) if args.quick else RATIOS:
            budget = int(trace.unmanaged_peak[0] * ratio)
            steps, seconds = _decided(trace, budget)
            ours = []
            for s in steps:
                cost = replay(trace, s, budget) if s is not None else None
                if cost is not None and not cost.valid:
                    raise SystemExit(f"{name} at {ratio}: {cost.why}")
                ours.append(cost.seconds / trace.seconds if cost is not None else None)
            dtr = simulate(trace, budget, parse_policy("dtr_eq"))
            extra = lower_bound_seconds(trace, budget)
            bound = 1 + extra / trace.seconds if extra < math.inf else None
            eq = dtr.overhead if dtr.feasible and dtr.overhead <= MOST else None
            points.append(Point(name, ratio, eq, ours[0], ours[1], bound, seconds[1], seconds[0]))
    _table(points)
    return points


def _decided(trace: Trace, budget: int) -> tuple[list[Sequence[Step] | None], list[float]]:
    """Steps and seconds of (online, plan)."""
    began = time.perf_counter()
    fits, machine = run_online(trace, budget)
    between = time.perf_counter()
    made = plan(trace, budget)
    seconds = [between - began, time.perf_counter() - between]
    return [machine.steps if fits else None, made.steps if made.feasible else None], seconds


def _judged(file: Path, trace: Trace, steps: Iterable[Step], budget: int) -> float:
    """The overhead of a schedule, by the judge."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as written:
        written.writelines(json.dumps(record) + "\n" for record in judge_records(trace, steps))
        written.flush()
        judge = file.parents[1] / "check_schedule.py"
        words = [sys.executable, str(judge), str(file), written.name, str(budget)]
        said = json.loads(subprocess.run(words, capture_output=True, text=True, check=False).stdout)
    if not said["valid"]:
        raise SystemExit(f"{file.stem} at {budget} bytes: the judge says {said}")
    return float(said["overhead"])


def _check(point: Point, trace: Trace, budget: int) -> None:
    """Our bound is the reference's, and nothing is below it."""
    extra = lower_bound_seconds(trace, budget)
    ours = 1 + extra / trace.seconds if extra < math.inf else None
    if (ours is None) != (point.bound is None) or (ours is not None and abs(ours - (point.bound or 0)) > 1e-5):
        raise SystemExit(f"{point.name} at {point.ratio}: our bound is {ours}, the reference's {point.bound}")
    for value in (point.online, point.plan):
        if value is not None and ours is not None and value < ours - 1e-6:
            raise SystemExit(f"{point.name} at {point.ratio}: {value} is below the bound {ours}")


def _table(points: list[Point]) -> None:
    shares = ("online/dtr_eq", "plan/dtr_eq", "plan/bound")
    _header("pass", "ratio", "dtr_eq", "online", "plan", "lower bound", *shares, "plan takes")
    for p in points:
        each = [_share(p.online, p.dtr_eq), _share(p.plan, p.dtr_eq), _share(p.plan, p.bound)]
        columns = [_over(x) for x in (p.dtr_eq, p.online, p.plan, p.bound)]
        _row(p.name, p.ratio, *columns, *(_two(x) for x in each), f"{p.plan_seconds:.1f} s")
    within = [p for p in points if p.ratio >= min(RATIOS)]
    counted = [p for p in within if not any(x is not None and x - 1 < SMALL for x in (p.dtr_eq, p.bound))]
    print()
    for label, pairs in {
        "online/dtr_eq": [_share(p.online, p.dtr_eq) for p in counted],
        "plan/dtr_eq": [_share(p.plan, p.dtr_eq) for p in counted],
        "plan/bound": [_share(p.plan, p.bound) for p in counted],
        "plan/bound where dtr_eq fits": [_share(p.plan, p.bound) for p in counted if p.dtr_eq is not None],
        "online/bound": [_share(p.online, p.bound) for p in counted],
    }.items():
        there = [x for x in pairs if x is not None]
        print(f"geometric mean {label}: {_mean(there):.3f} over {len(there)} points, worst {max(there, default=0):.2f}")
    for label, lost in {
        "online does not fit where dtr_eq does": [p for p in points if p.online is None and p.dtr_eq is not None],
        "no plan at 0.3 or more": [p for p in points if p.plan is None and p.ratio >= min(RATIOS)],
    }.items():
        print(f"{label}: {', '.join(f'{p.name} {p.ratio}' for p in lost) or 'nowhere'}")


def _row(*cells: object) -> None:
    print("|", " | ".join(str(cell) for cell in cells), "|", flush=True)


def _header(*cells: str) -> None:
    _row(*cells)
    print("|" + "---|" * len(cells))


def _share(ours: float | None, theirs: float | None) -> float | None:
    return (ours - 1) / (theirs - 1) if ours is not None and theirs is not None and theirs > 1 else None


def _mean(shares: list[float]) -> float:
    return math.exp(sum(math.log(max(x, 1e-6)) for x in shares) / len(shares)) if shares else math.nan


def _over(x: float | None) -> str:
    return f"{x:.4f}" if x is not None else "–"


def _two(x: float | None) -> str:
    return f"{x:.2f}" if x is not None else "–"


# ---- how low it goes


def floor(args: argparse.Namespace) -> dict[str, Any]:
    """Budgets from the largest op's need, in steps of half a percent of the peak, then of five percent."""
    _header("pass", "largest op needs", "provably none below", "online fits from", "plan from", "holes")
    found = {}
    passes = [(name, read_dtr_log(args.logs / f"{name}.log")) for name in _names(args)]
    passes += [(name, make(150, 0)) for name, make in SHAPES.items()]
    for name, trace in sorted(passes, key=lambda item: len(item[1].ops)):
        peak = trace.unmanaged_peak[0]
        least = least_bytes(Problem.of(trace)) / peak
        step = 0.02 if args.quick else 0.005
        ratios = [least + i * step for i in range(-1, int(0.06 / step))]
        ratios += list(np.arange(least + 0.06, 1.0, 0.08))
        online_fits = [run_online(trace, math.ceil(peak * r))[0] for r in ratios]
        plan_fits = [plan(trace, math.ceil(peak * r), effort=30_000).feasible for r in ratios]
        holes = [
            sum(late < early for early, late in zip(fits, fits[1:], strict=False)) for fits in (online_fits, plan_fits)
        ]
        first = [
            next((r for r, fit in zip(ratios, fits, strict=False) if fit), None) for fits in (online_fits, plan_fits)
        ]
        proved = smallest_budget_bytes(trace) / peak
        _row(name, f"{least:.3f}", f"{proved:.3f}", _first(first[0]), _first(first[1]), f"{holes[0]}, {holes[1]}")
        found[name] = {"least": least, "proved": proved, "online": first[0], "plan": first[1], "holes": holes}
    return found


def _first(x: float | None) -> str:
    return f"{x:.3f}" if x is not None else "–"


def _names(args: argparse.Namespace) -> list[str]:
    return sorted(json.loads((args.logs / "reference.json").read_text()))


# ---- with a link


def link(args: argparse.Namespace) -> list[dict[str, Any]]:
    _header("pass", "ratio", "GB/s", "recompute", "offload", "both", "bound with the link", "plan takes")
    rows = []
    for name in _names(args):
        trace = read_dtr_log(args.logs / f"{name}.log")
        for ratio in (0.5,) if args.quick else (*RATIOS, *BELOW):
            budget = int(trace.unmanaged_peak[0] * ratio)
            alone = plan(trace, budget)
            for rate in (12, 50):
                tier = TierLink("host", rate * 1e9, rate * 1e9, 1e-5)
                swapped = plan(trace, budget, link=tier, recompute=False)
                began = time.perf_counter()
                both = plan(trace, budget, link=tier)
                seconds = time.perf_counter() - began
                for made in (swapped, both):
                    if made.feasible:
                        cost = replay(trace, made.steps, budget, **_rates(tier))
                        if not cost.valid or abs(cost.seconds - made.seconds) > 1e-9 * cost.seconds:
                            raise SystemExit(f"{name} at {ratio}, {rate} GB/s: {cost}")
                if both.seconds > min(alone.seconds, swapped.seconds):
                    raise SystemExit(f"{name} at {ratio}, {rate} GB/s: worse than one of them alone")
                columns = [_over(m.overhead if m.feasible else None) for m in (alone, swapped, both)]
                bound = both.lower_bound if both.bound_seconds < math.inf else None
                _row(name, ratio, rate, *columns, _over(bound), f"{seconds:.1f} s")
                rows.append({"name": name, "ratio": ratio, "rate": rate, "recompute": alone.overhead,
                             "offload": swapped.overhead, "both": both.overhead, "bound": bound})  # fmt: skip
    return rows


def _rates(tier: TierLink) -> dict[str, float]:
    return {
        "write_rate": tier.write_bytes_per_second,
        "read_rate": tier.read_bytes_per_second,
        "latency_seconds": tier.latency_seconds,
    }


# ---- size, and sensitivity of the online policy


def big(args: argparse.Namespace) -> list[dict[str, Any]]:
    _header("pass", "ops", "ratio", "plan", "bound", "takes")
    rows = []
    for name, make in SHAPES.items():
        n = 2_000 if args.quick else 10_000
        trace = make(n, 0)
        trace = make(round(n * n / len(trace.ops)), 0)  # as many as were asked for, about
        for ratio in (0.8, 0.5, 0.3):
            began = time.perf_counter()
            made = plan(trace, int(trace.unmanaged_peak[0] * ratio))
            seconds = time.perf_counter() - began
            bound = made.lower_bound if made.bound_seconds < math.inf else None
            overhead = made.overhead if made.feasible else None
            _row(name, len(trace.ops), ratio, _over(overhead), _over(bound), f"{seconds:.2f} s")
            rows.append({"name": name, "ops": len(trace.ops), "ratio": ratio, "seconds": seconds})
    return rows


def sensitivity(args: argparse.Namespace) -> dict[str, float]:
    """Geometric mean of (overhead - 1) over that of the policy as it is; logs and shapes."""
    passes = [read_dtr_log(args.logs / f"{name}.log") for name in _names(args)]
    passes += [make(300, 0) for make in SHAPES.values()]
    ratios = (0.7,) if args.quick else (0.8, 0.6, 0.4)

    def overheads(passes: Sequence[Trace]) -> list[float | None]:
        found = []
        for trace in passes:
            for ratio in ratios:
                fits, machine = run_online(trace, int(trace.unmanaged_peak[0] * ratio))
                found.append(machine.seconds / trace.seconds if fits else None)
        return found

    base = overheads(passes)

    def say(label: str, other: list[float | None]) -> None:
        pairs = [(_share(o, b)) for o, b in zip(other, base, strict=True) if b is not None and b - 1 >= SMALL]
        there = [x for x in pairs if x is not None]
        result[label] = _mean(there)
        lost = sum(o is None and b is not None for o, b in zip(other, base, strict=True))
        print(f"{label}: {result[label]:.3f} of the overhead, {lost} of {len(base)} points no longer fit", flush=True)

    result: dict[str, float] = {}
    for attribute, label, values in (
        ("_NEAR", "w = {} of the budget", (0.03, 0.3)),
        ("_ROOM", "segments of {} of the budget", (0.125, 0.5, 1e6)),
        ("saved_by", "all that is held counts as needed", (lambda name, sizes: online_saved._ALL,)),
    ):
        as_it_is = getattr(online_policy, attribute)
        for value in values:
            setattr(online_policy, attribute, value)
            say(label.format(value), overheads(passes))
        setattr(online_policy, attribute, as_it_is)
    say("backward is not announced", overheads([replace(trace, backward_at=None) for trace in passes]))
    return result


if __name__ == "__main__":
    sys.exit(main())
