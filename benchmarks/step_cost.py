"""What memmgr costs a training step: interleaved runs in one process, as ratios of the unmanaged run.

    python benchmarks/step_cost.py [--quick] [--json FILE] [--only ops,full,asleep,half,planned,own,prefetch,link] [--rounds N]

Sections:
  ops       microseconds per recorded op and per saved tensor, over plain torch: median and p99. An empty dispatch mode
            and identity hooks stand beside them.
  full      a step at 100 % of what it needs, the recorder on and (the default) asleep once that proved enough: a model
            whose ops take 100 us and more, one whose ops take about 10 us, and a launch-bound one whose ops take 1 to 2. An
            empty dispatch mode stands beside them.
  asleep    the same three with 10 % to spare and more, after the recorder has gone to sleep.
  half      the demo's GPT and a convnet in 50 % of what they need: auto, evict, offload; full activation checkpointing of
            the GPT beside them.
  planned   at the peak that full activation checkpointing reaches: auto, evict and offload with plans and without them; the
            plan's own prediction and the bound that no recompute-only schedule passes beside evict.
  own       at the same peak, in planned passes: which share of a step memmgr itself takes, by part.
  prefetch  both, offload at 50 % with the prefetcher and without it, on the tier as it is, throttled so that a step's reads take
            0.3 of it (what is read is waited for without a prefetcher, and hidden with one), and to 1 GB/s; and the share of
            reloads that were hits.
  link      both, auto at 50 % beside evict and offload, on the tier as it is and throttled.

Each ratio is of two runs that take turns, step by step or block by block, so that what else the machine does falls on
both. A step's time is that of the steps after the first three of its block: those are measured, proven and planned in.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import memmgr
from memmgr import _budget, _replay
from memmgr._sleep import TIGHT_PASSES
from memmgr.policies.plan.planner import plan as plan_of
from memmgr.policies.trace import Trace
from memmgr.policies.trace.smooth import smoothed

sys.path.insert(0, str(Path(__file__).resolve().parent))  # `make bench` runs with -P

from _training import MODELS, TIGHT, Run, demo_gpt

WARM_STEPS = 3
READ_SHARE = 0.3  # of a step: enough to be seen when it is waited for, and less than backward has
CHAIN = 100  # ops of a pass, where a tensor's way through forward and backward is timed


# ---- measuring -----------------------------------------------------------------------------------------------------


@dataclass
class Series:
    """Seconds of steps, and what memmgr said."""

    seconds: list[float] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    failed: str = ""
    plan: Any = None
    trace: Trace | None = None  # that the plan was made from


Setting = Callable[[], contextlib.AbstractContextManager[Any]]


def interleaved(
    make: dict[str, tuple[Callable[[], Run], Setting]], rounds: int, steps: int, warm: int = WARM_STEPS
) -> dict[str, Series]:
    """Runs the settings in turns: in each round every one trains a block of steps, in an order that rotates."""
    series = {name: Series() for name in make}
    names = list(make)
    for r in range(rounds):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            build, setting = make[name]
            if series[name].failed:
                continue
            gc.collect()
            try:
                with setting() as budget:
                    run = build()
                    for _ in range(warm):
                        run.step()
                    for _ in range(steps):
                        start = time.perf_counter()
                        run.step()
                        series[name].seconds.append(time.perf_counter() - start)
                    del run
                    series[name].plan, series[name].trace = _plan()
                if budget is not None:
                    series[name].stats = budget.stats()
            except torch.OutOfMemoryError as error:
                series[name].failed = str(error).splitlines()[0]
    return series


def _plan() -> tuple[Any, Trace | None]:
    """The plan that the open budget follows and the trace that it was made from, if it does."""
    manager = _budget.current()
    if manager is None or manager.plans.latest() is None:
        return None, None
    known = next(k for k in reversed(manager.plans.known.values()) if k.made is not None and k.made.plan is not None)
    return manager.plans.latest(), smoothed(known.measured.trace)


def plain() -> contextlib.AbstractContextManager[None]:
    """No memmgr."""
    return contextlib.nullcontext()


def budget(limit: int | None, **options: Any) -> Setting:
    """A budget, closed after each block."""
    return lambda: memmgr.budget(limit, quiet=True, **options)


def needs(build: Callable[[], Run]) -> int:
    """What two steps need unmanaged, in bytes."""
    gc.collect()
    with memmgr.budget(None, quiet=True) as mm:
        run = build()
        run.step()
        run.step()
        del run
    return int(mm.stats()["unmanaged_peak_bytes"])


# ---- sections ------------------------------------------------------------------------------------------------------

Row = dict[str, Any]


def ratio_rows(section: str, series: dict[str, Series], of: str = "plain") -> list[Row]:
    """One row per setting: its step over that of `of`, by the minimum and by the median."""
    base = series[of].seconds
    rows = []
    for name, run in series.items():
        if run.failed:
            rows.append({"section": section, "what": name, "failed": run.failed})
            continue
        rows.append(
            {
                "section": section,
                "what": name,
                "ratio_min": min(run.seconds) / min(base),
                "ratio_median": statistics.median(run.seconds) / statistics.median(base),
                "step_min_ms": 1e3 * min(run.seconds),
                "step_median_ms": 1e3 * statistics.median(run.seconds),
                "steps": len(run.seconds),
                **{
                    key: run.stats[key]
                    for key in (
                        "evictions",
                        "offloads",
                        "reloads",
                        "prefetch_hits",
                        "recompute_seconds",
                        "stall_seconds",
                    )
                    if key in run.stats
                },
            }
        )
    return rows


class _Counting(TorchDispatchMode):
    """How many ops a step dispatches, the optimizer's included."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


def op_row(section: str, build: Callable[[], Run], seconds: list[float]) -> Row:
    """Ops of a step, and what one takes on average without memmgr, torch's own overhead included."""
    run = build()
    for _ in range(WARM_STEPS):
        run.step()
    with _Counting() as counting:
        run.step()
    us = 1e6 * statistics.median(seconds) / counting.ops
    return {"section": section, "what": "an op, on average", "ops_a_step": counting.ops, "us_an_op": us}


@contextlib.contextmanager
def empty_mode() -> Iterator[None]:
    """A dispatch mode that does nothing, without memmgr: what watching ops from Python costs at the least."""
    with _Empty():
        yield


class _Empty(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _calls(call: Callable[[], object], count: int) -> np.ndarray:
    """Nanoseconds of each call."""
    times = np.empty(count)
    clock = time.perf_counter_ns
    for i in range(count):
        start = clock()
        call()
        times[i] = clock() - start
    return times


def ops(quick: bool, rounds: int) -> list[Row]:
    """An op that saves nothing and one that saves a tensor, of four elements; what each takes over plain torch.

    "Saved and used" is from passes of 100 such ops, forward and backward: the p99 is that of passes, not of single ops.
    """
    count = 2_000 if quick else 20_000
    a = torch.ones(4, requires_grad=True)
    b = torch.ones(4)

    def op() -> object:
        return a + b  # recorded; saves nothing

    def save() -> object:
        return a * b  # recorded; saves b

    def chain(saves: bool) -> Callable[[], object]:
        factor = torch.ones(4)

        def run() -> None:
            y = a
            for _ in range(CHAIN):
                y = y * factor if saves else y + factor
            y.backward(factor)
            a.grad = None

        return run

    settings: dict[str, Setting] = {
        "plain": plain,
        "empty mode": _Empty,
        "identity hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        "no limit": budget(None),
        "memmgr": budget(8 << 30, _sleep=False),
    }
    kinds = ("op", "save", "op chain", "save chain")
    seen: dict[str, dict[str, list[np.ndarray]]] = {name: {kind: [] for kind in kinds} for name in settings}
    gc.disable()
    try:
        for _ in range(rounds):
            for name, setting in settings.items():
                with setting():
                    for what, call in (("op", op), ("save", save)):
                        _calls(call, 200)
                        seen[name][what].append(_calls(call, count // rounds + 1))
                    for what, saves in (("op chain", False), ("save chain", True)):
                        _calls(chain(saves), 5)
                        seen[name][what].append(_calls(chain(saves), count // CHAIN // rounds + 1) / CHAIN)
    finally:
        gc.enable()
    rows: list[Row] = []
    figures = {
        name: {what: np.concatenate(parts) / 1e3 for what, parts in by_kind.items()} for name, by_kind in seen.items()
    }

    def at(name: str, what: str, q: float) -> float:
        return float(np.percentile(figures[name][what], q))

    for name in settings:
        if name == "plain":
            rows.append(
                {"section": "ops", "what": "plain op", "median_us": at(name, "op", 50), "p99_us": at(name, "op", 99)}
            )
            continue
        over = {q: at(name, "op", q) - at("plain", "op", q) for q in (50, 99)}
        # What saving adds to the op that saves, over what it adds in plain torch.
        saved = {q: at(name, "save", q) - at("plain", "save", q) - over[q] for q in (50, 99)}
        used = {
            q: (at(name, "save chain", q) - at("plain", "save chain", q))
            - (at(name, "op chain", q) - at("plain", "op chain", q))
            for q in (50, 99)
        }
        for what, figure in (("op", over), ("saved tensor", saved), ("saved and used tensor", used)):
            rows.append(
                {"section": "ops", "what": f"{name}: per {what}", "median_us": figure[50], "p99_us": figure[99]}
            )
    return rows


def full(quick: bool, rounds: int) -> list[Row]:
    """At exactly what it needs, with the recorder on and as it is by default: asleep after some passes that fitted."""
    rows: list[Row] = []
    for name, model in MODELS.items():
        build = functools.partial(model, quick)
        limit = needs(build)
        series = interleaved(
            {
                "plain": (build, plain),
                "at 100 %, recording": (build, budget(limit, _sleep=False)),
                "at 100 %": (build, budget(limit)),
                "no limit": (build, budget(None)),
                "an empty dispatch mode": (build, empty_mode),
            },
            rounds,
            3 if quick else 20,
            warm=TIGHT_PASSES + WARM_STEPS,
        )
        rows += ratio_rows(f"full, {name}", series)
        rows.append(op_row(f"full, {name}", build, series["plain"].seconds))
    return rows


def asleep(quick: bool, rounds: int) -> list[Row]:
    """With a quarter to spare: the recorder sleeps after a few passes."""
    rows: list[Row] = []
    for name, model in MODELS.items():
        build = functools.partial(model, quick)
        limit = int(1.25 * needs(build))
        series = interleaved(
            {
                "plain": (build, plain),
                "at 125 %": (build, budget(limit)),
                "kept awake": (build, budget(limit, _sleep=False)),
            },
            rounds,
            3 if quick else 20,
        )
        rows += ratio_rows(f"asleep, {name}", series)
    return rows


def half(quick: bool, rounds: int) -> list[Row]:
    """Half of what they need."""
    rows: list[Row] = []
    for name, model in TIGHT.items():
        build = functools.partial(model, quick)
        limit = needs(build) // 2
        make: dict[str, tuple[Callable[[], Run], Setting]] = {"plain": (build, plain)}
        for policy in ("auto", "evict", "offload"):
            make[policy] = (build, budget(limit, policy=policy))
        if model is demo_gpt:
            make["full checkpointing"] = (lambda: demo_gpt(quick, checkpointed=True), plain)
        found = ratio_rows(f"half, {name}", interleaved(make, rounds, 2 if quick else 5))
        for row in found:
            row["budget_share"] = 0.5 if row["what"] in ("auto", "evict", "offload") else 1.0
            if row["what"] == "full checkpointing":
                row["budget_share"] = round(needs(lambda: demo_gpt(quick, checkpointed=True)) / (2 * limit), 3)
        rows += found
    return rows


def planned(quick: bool, rounds: int) -> list[Row]:
    """With plans and without, at checkpointing's peak. Blocks warm up until a plan is followed."""

    build = functools.partial(demo_gpt, quick)
    checkpointing = functools.partial(demo_gpt, quick, checkpointed=True)
    limit, whole = needs(checkpointing), needs(build)
    make: dict[str, tuple[Callable[[], Run], Setting]] = {
        "plain": (build, plain),
        "full checkpointing": (checkpointing, plain),
    }
    for policy in ("evict", "auto", "offload"):
        make[f"{policy}, planned"] = (build, budget(limit, policy=policy))
        make[f"{policy}, dynamic"] = (build, budget(limit, policy=policy, _plan=False))
    series = interleaved(make, rounds, 2 if quick else 5, warm=2 * WARM_STEPS)
    rows = ratio_rows("planned", series)
    for row in rows:
        row["budget_share"] = round(limit / whole, 3)
        plan = series[row["what"]].plan if row["what"] in series else None
        if plan is not None:
            row["predicted"] = round(plan.overhead, 3)
            trace = series[row["what"]].trace
            # With the linear program, which live runs do without.
            if trace is not None and row["what"].startswith("evict"):
                row["lower_bound"] = round(plan_of(trace, limit).lower_bound, 3)
            row["planned_passes"] = series[row["what"]].stats["planned_passes"]
    return rows


def own(quick: bool, rounds: int) -> list[Row]:
    """What memmgr itself takes of a planned step: recording, handles, replay around the ops that run again, its threads."""

    build = functools.partial(demo_gpt, quick)
    costs = {row["what"]: row["median_us"] * 1e-6 for row in ops(quick, rounds) if "what" in row}
    limit = needs(lambda: demo_gpt(quick, checkpointed=True))
    rows: list[Row] = []
    in_ops = 0.0
    whole = _replay.run_recipe

    def timed(*args: Any) -> Any:
        nonlocal in_ops
        begun = time.perf_counter()
        try:
            return whole(*args)
        finally:
            in_ops += time.perf_counter() - begun

    for policy in ("evict", "auto", "offload"):
        gc.collect()
        with memmgr.budget(limit, policy=policy, quiet=True) as mm:
            manager = _budget.current()
            assert manager is not None
            run = build()
            for _ in range(2 * WARM_STEPS):
                run.step()
            _replay.run_recipe, in_ops = timed, 0.0
            before, threads, replayed = mm.stats(), _threads_seconds(), manager.replayer.seconds
            begun, steps = time.perf_counter(), (2 if quick else 5)
            for _ in range(steps):
                run.step()
            seconds = time.perf_counter() - begun
            after = mm.stats()
            threads, replayed = _threads_seconds() - threads, manager.replayer.seconds - replayed
            _replay.run_recipe = whole
            del run
        count = {
            key: after[key] - before[key] for key in ("recorded_ops", "saved_tensors", "planned_passes", "rankings")
        }
        parts = {
            "recording": count["recorded_ops"] * costs["memmgr: per op"],
            "handles": count["saved_tensors"] * costs["memmgr: per saved and used tensor"],
            "replay": max(0.0, replayed - in_ops),
            "threads": threads,
        }
        row: Row = {"section": "own, at checkpointing's peak", "what": policy, "share": sum(parts.values()) / seconds}
        row |= {f"{name}_share": part / seconds for name, part in parts.items()}
        rows.append(row | {key: count[key] / steps for key in count} | {"step_ms": 1e3 * seconds / steps})
    return rows


def _threads_seconds() -> float:
    """Processor time of memmgr's Python threads so far: daemon, planner, telemetry. Not of those that copy."""
    ours = {thread.native_id for thread in threading.enumerate() if getattr(thread, "memmgr_own", False)}
    return float(sum(t.user_time + t.system_time for t in psutil.Process().threads() if t.id in ours))


def prefetch(quick: bool, rounds: int) -> list[Row]:
    """Offload with the prefetcher and without."""
    rows: list[Row] = []
    for name, model in TIGHT.items():
        build = functools.partial(model, quick)
        limit = needs(build) // 2
        paced = 0  # bytes per second at which a step's reads take `READ_SHARE` of it
        for speed in ("the tier as it is", "paced", "1 GB/s"):
            throttle = {"1 GB/s": 1_000_000_000, "paced": paced}.get(speed, 0)
            if speed == "paced":
                if not paced:
                    continue  # it did not run as it is
                speed = f"{paced / 1e9:.1f} GB/s"
            series = interleaved(
                {
                    "plain": (build, plain),
                    "offload": (build, budget(limit, policy="lru+offload+bandwidth", _throttle=throttle)),
                    "offload, no prefetch": (build, budget(limit, policy="lru+offload+off", _throttle=throttle)),
                },
                rounds,
                2 if quick else 5,
            )
            section = f"prefetch, {name}, {speed}"
            rows += ratio_rows(section, series)
            stats = series["offload"].stats
            if stats:
                bytes_read = stats["reload_bytes"] / max(1, stats["passes"])
                paced = paced or int(bytes_read / (READ_SHARE * statistics.median(series["plain"].seconds)))
                with_it, without = (statistics.median(series[n].seconds) for n in ("offload", "offload, no prefetch"))
                hits = stats["prefetch_hits"] / max(1, stats["reloads"])
                faster = without / with_it
                rows.append({"section": section, "what": "hits", "hit_share": hits, "step_without_over_with": faster})
    return rows


def link(quick: bool, rounds: int) -> list[Row]:
    """Auto beside the two that it chooses from, by the speed of the tier."""
    rows: list[Row] = []
    for name, model in TIGHT.items():
        build = functools.partial(model, quick)
        limit = needs(build) // 2
        for speed, throttle in (("as it is", 0), ("2 GB/s", 2_000_000_000), ("50 MB/s", 50_000_000)):
            make: dict[str, tuple[Callable[[], Run], Setting]] = {"plain": (build, plain)}
            for policy in ("auto", "evict", "offload"):
                if policy == "offload" and throttle == 50_000_000 and not quick:
                    continue  # minutes a step
                make[policy] = (build, budget(limit, policy=policy, _throttle=throttle))
            section = f"link, {name}, {speed}"
            series = interleaved(make, rounds, 2 if quick else 3)
            rows += ratio_rows(section, series)
            others = [run.seconds for n, run in series.items() if n in ("evict", "offload") and run.seconds]
            auto, s = series["auto"], series["auto"].stats
            if auto.seconds and others:
                over = statistics.median(auto.seconds) / min(statistics.median(seconds) for seconds in others)
                left = max(1, s["evicted_bytes"] + s["offload_bytes"])
                share = s["offload_bytes"] / left
                row: Row = {"section": section, "what": "auto over the better", "auto_over_better": over}
                rows.append(row | {"offloaded_share": share})
    return rows


SECTIONS: dict[str, Callable[[bool, int], list[Row]]] = {
    "ops": ops,
    "full": full,
    "asleep": asleep,
    "half": half,
    "planned": planned,
    "own": own,
    "prefetch": prefetch,
    "link": link,
}


def machine() -> dict[str, Any]:
    """What it ran on."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in open("/proc/cpuinfo"):  # noqa: SIM115 - closed with the loop's end
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "memmgr": memmgr.__version__,
        "tier": os.environ.get("MEMMGR_DISK") or "the system's temporary folder",
    }


def show(row: Row) -> str:
    """A row as a line of text."""
    parts = []
    for key, value in row.items():
        if key in ("section", "what"):
            continue
        parts.append(f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}")
    return f"  {row['what']:38} " + "  ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="small models, few rounds: shows that it works, not what it costs"
    )
    parser.add_argument("--json", metavar="FILE", help="write everything there too")
    parser.add_argument("--only", default=",".join(SECTIONS), help="comma-separated sections (default: all)")
    parser.add_argument(
        "--rounds", type=int, default=0, help="how often each setting takes its turn (default: 5, quick: 1)"
    )
    options = parser.parse_args()
    chosen = [name.strip() for name in options.only.split(",") if name.strip()]
    for name in chosen:
        if name not in SECTIONS:
            parser.error(f"no section {name!r}; there are {', '.join(SECTIONS)}")
    rounds = options.rounds or (1 if options.quick else 5)
    about = machine()
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    if options.quick:
        print("--quick: these figures show that the benchmark works, and nothing else")
    rows: list[Row] = []
    for name in chosen:
        section = ""
        for row in SECTIONS[name](options.quick, rounds):
            if row["section"] != section:
                section = row["section"]
                print(section, flush=True)
            print(show(row), flush=True)
            rows.append(row)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": about, "quick": options.quick, "rounds": rounds, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
