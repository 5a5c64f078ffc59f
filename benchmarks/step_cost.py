"""What memmgr costs a training step: interleaved runs in one process, as ratios of the unmanaged run.

    python benchmarks/step_cost.py [--quick] [--json FILE] [--only ops,full,asleep,half,planned,own,prefetch,link] [--rounds N]

Sections:
  ops       microseconds per recorded op and per saved tensor, over plain torch: median and p99. An empty dispatch mode
            and identity hooks stand beside them.
  full      a step at 100 % of what it needs, the recorder on and (the default) asleep once that proved enough: a model
            whose ops take 100 us and more, one whose ops take about 10 us, and a launch-bound one whose ops take 1 to 2. An
            empty dispatch mode stands beside them.
  asleep    the same three with 10 % to spare and more, after the recorder has gone to sleep.
  half      the demo's GPT in 50 % of what it needs: auto, evict, offload; full activation checkpointing beside them.
  planned   at the peak that full activation checkpointing reaches: auto, evict and offload with plans and without them; the
            plan's own prediction and the bound that no recompute-only schedule passes beside evict.
  own       at the same peak, in planned passes: which share of a step memmgr itself takes, by part.
  prefetch  offload at 50 % with the prefetcher and without it, on the tier as it is and throttled to 1 GB/s, and the share
            of reloads that were hits.
  link      auto at 50 % beside evict and offload, on the tier as it is and throttled.

Each ratio is of two runs that take turns, step by step or block by block, so that what else the machine does falls on
both. A step's time is that of the steps after the first three of its block: those are measured, proven and planned in.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import memmgr
from memmgr import _budget, _replay
from memmgr._sleep import TIGHT_PASSES
from memmgr.tools.gpt import GPT, GPTConfig

WARM_STEPS = 3
CHAIN = 100  # ops of a pass, where a tensor's way through forward and backward is timed


# ---- what is trained -----------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A model, its optimizer and one batch."""

    model: nn.Module
    loss: Callable[[], Tensor]
    optimizer: torch.optim.Optimizer

    def step(self) -> None:
        """Forward, backward, update."""
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _run(model: nn.Module, loss: Callable[[], Tensor]) -> Run:
    return Run(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-4))


def demo_gpt(quick: bool, checkpointed: bool = False) -> Run:
    """The demo's GPT; `checkpointed` recomputes each block, which is full activation checkpointing."""
    torch.manual_seed(0)
    config = GPTConfig(layers=2, heads=4, width=128, context=64) if quick else GPTConfig()
    model = GPT(config)
    if checkpointed:
        for block in model.blocks:
            block.forward = _checkpointed(block.forward)  # type: ignore[method-assign]
    batch = 8 if quick else 16
    tokens, targets = (torch.randint(256, (batch, config.context)) for _ in range(2))
    return _run(model, lambda: model(tokens, targets))


def _checkpointed(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(forward, x, use_reentrant=False)  # type: ignore[no-any-return]


def heavy(quick: bool) -> Run:
    """Every op takes 100 us or more: wide layers, a large batch."""
    torch.manual_seed(0)
    width, batch = (256, 512) if quick else (1024, 1024)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(width, 16))
    x, y = torch.randn(batch, width), torch.randint(16, (batch,))
    return _run(model, lambda: F.cross_entropy(model(x), y))


def launch_bound(quick: bool) -> Run:
    """Hundreds of ops that take microseconds each: torch's own overhead is what it costs."""
    torch.manual_seed(0)
    cell, head = nn.GRUCell(16, 16), nn.Linear(16, 4)
    time_steps = 10 if quick else 60
    x, y = torch.randn(time_steps, 4, 16), torch.randint(4, (4,))
    model = nn.ModuleList([cell, head])

    def loss() -> Tensor:
        h = x.new_zeros(4, 16)
        for t in range(time_steps):
            h = torch.tanh(cell(x[t], h) * 0.5 + h)
        return F.cross_entropy(head(h), y)

    return _run(model, loss)


def small_ops(quick: bool) -> Run:
    """A GPT so narrow that its ops take about ten microseconds, which is what launching one on a GPU takes."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2 if quick else 4, heads=2, width=96, context=64))
    tokens, targets = (torch.randint(256, (4, 64)) for _ in range(2))
    return _run(model, lambda: model(tokens, targets))


MODELS = {"100 us ops": heavy, "10 us ops": small_ops, "launch-bound": launch_bound}


# ---- measuring -----------------------------------------------------------------------------------------------------


@dataclass
class Series:
    """Seconds of steps, and what memmgr said."""

    seconds: list[float] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    failed: str = ""
    plan: Any = None


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
                    series[name].plan = _plan()
                if budget is not None:
                    series[name].stats = budget.stats()
            except torch.OutOfMemoryError as error:
                series[name].failed = str(error).splitlines()[0]
    return series


def _plan() -> Any:
    """The plan that the open budget follows, if it does."""
    manager = _budget.current()
    return None if manager is None else manager.plans.latest()


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

        def build(model: Callable[[bool], Run] = model) -> Run:
            return model(quick)

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

        def build(model: Callable[[bool], Run] = model) -> Run:
            return model(quick)

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
    """The demo's GPT in half."""

    def build() -> Run:
        return demo_gpt(quick)

    limit = needs(build) // 2
    make: dict[str, tuple[Callable[[], Run], Setting]] = {"plain": (build, plain)}
    for policy in ("auto", "evict", "offload"):
        make[policy] = (build, budget(limit, policy=policy))
    make["full checkpointing"] = (lambda: demo_gpt(quick, checkpointed=True), plain)
    rows = ratio_rows("half", interleaved(make, rounds, 2 if quick else 5))
    for row in rows:
        row["budget_share"] = 0.5 if row["what"] in ("auto", "evict", "offload") else 1.0
        if row["what"] == "full checkpointing":
            row["budget_share"] = round(needs(lambda: demo_gpt(quick, checkpointed=True)) / (2 * limit), 3)
    return rows


def planned(quick: bool, rounds: int) -> list[Row]:
    """With plans and without, at checkpointing's peak. Blocks warm up until a plan is followed."""

    def build() -> Run:
        return demo_gpt(quick)

    def checkpointing() -> Run:
        return demo_gpt(quick, checkpointed=True)

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
            row["predicted"], row["lower_bound"] = round(plan.overhead, 3), round(plan.lower_bound, 3)
            row["planned_passes"] = series[row["what"]].stats["planned_passes"]
    return rows


def own(quick: bool, rounds: int) -> list[Row]:
    """What memmgr itself takes of a planned step: recording, handles, replay around the ops that run again, its threads."""

    def build() -> Run:
        return demo_gpt(quick)

    costs = {row["what"]: row["median_us"] * 1e-6 for row in ops(quick, rounds) if "what" in row}
    limit = needs(lambda: demo_gpt(quick, checkpointed=True))
    rows: list[Row] = []
    in_ops = 0.0
    whole = _replay.run_recipe

    def timed(native: Any, recipe: Any) -> Any:
        nonlocal in_ops
        begun = time.perf_counter()
        try:
            return whole(native, recipe)
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

    def build() -> Run:
        return demo_gpt(quick)

    limit = needs(build) // 2
    rows: list[Row] = []
    for speed, throttle in (("the tier as it is", 0), ("1 GB/s", 1_000_000_000)):
        series = interleaved(
            {
                "plain": (build, plain),
                "offload": (build, budget(limit, policy="lru+offload+bandwidth", _throttle=throttle)),
                "offload, no prefetch": (build, budget(limit, policy="lru+offload+off", _throttle=throttle)),
            },
            rounds,
            2 if quick else 5,
        )
        rows += ratio_rows(f"prefetch, {speed}", series)
        stats = series["offload"].stats
        if stats:
            with_it, without = (statistics.median(series[n].seconds) for n in ("offload", "offload, no prefetch"))
            rows.append(
                {
                    "section": f"prefetch, {speed}",
                    "what": "hits",
                    "hit_share": stats["prefetch_hits"] / max(1, stats["reloads"]),
                    "step_without_over_with": without / with_it,
                }
            )
    return rows


def link(quick: bool, rounds: int) -> list[Row]:
    """Auto beside the two that it chooses from, by the speed of the tier."""

    def build() -> Run:
        return demo_gpt(quick)

    limit = needs(build) // 2
    rows: list[Row] = []
    for speed, throttle in (("as it is", 0), ("2 GB/s", 2_000_000_000), ("50 MB/s", 50_000_000)):
        make: dict[str, tuple[Callable[[], Run], Setting]] = {"plain": (build, plain)}
        for policy in ("auto", "evict", "offload"):
            if policy == "offload" and throttle == 50_000_000 and not quick:
                continue  # minutes a step
            make[policy] = (build, budget(limit, policy=policy, _throttle=throttle))
        series = interleaved(make, rounds, 2 if quick else 3)
        rows += ratio_rows(f"link, {speed}", series)
        better = min(
            statistics.median(series[n].seconds) for n in ("evict", "offload") if n in series and series[n].seconds
        )
        auto, s = series["auto"], series["auto"].stats
        if auto.seconds:
            left = max(1, s["evicted_bytes"] + s["offload_bytes"])
            rows.append(
                {
                    "section": f"link, {speed}",
                    "what": "auto over the better",
                    "auto_over_better": statistics.median(auto.seconds) / better,
                    "offloaded_share": s["offload_bytes"] / left,
                }
            )
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
