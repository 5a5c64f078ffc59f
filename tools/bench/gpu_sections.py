"""The sections of the GPU check, each a process: `python -m memmgr.tools.bench.gpu_sections NAME cuda|cpu SECONDS [--quick]`.

A section prints Markdown, a line as soon as it is known, and ends with 0 if what it checks held, 3 if it did not. What failed is
told whole below its tables, and the first run that did is tried once more, slowly, for its stack. On a GPU, runs whose time is
not measured go side by side. Long: each section is a page of its own, and they share how a run is started and told.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from memmgr.tools.bench import cuda_probe, driver_probe
from memmgr.tools.bench.runs import RunResult, RunSpec, run, unmanaged
from memmgr.tools.common.console import megabytes

SIZES: dict[bool, tuple[RunSpec, RunSpec]] = {
    False: (
        RunSpec("gpt", steps=6, sizes={"layers": 12, "heads": 12, "width": 768, "context": 512}, batch=16),
        RunSpec(
            "convnet", steps=6, model="convnet", sizes={"width": 64, "stages": 3, "blocks": 3, "height": 64}, batch=64
        ),
    ),
    True: (
        RunSpec("gpt", steps=2, sizes={"layers": 3, "heads": 4, "width": 64, "context": 128}, batch=16),
        RunSpec(
            "convnet", steps=2, model="convnet", sizes={"width": 16, "stages": 2, "blocks": 2, "height": 24}, batch=48
        ),
    ),
}
"""By `quick`: a transformer and a convnet. The quick ones only show that the machinery runs."""


def _line(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def _head(*names: str) -> None:
    _line(*names)
    _line(*["---"] * len(names))


def _yes(held: bool) -> str:
    return "yes" if held else "**NO**"


DID_NOT_HOLD = 3
"""Exit code; a traceback ends with 1."""
_AT_ONCE = 4
_LEAST_SECONDS = 5.0
# Where kernels run one after the other, C++ says where it was, and the arena checks itself after every call.
_SLOWLY = {"CUDA_LAUNCH_BLOCKING": "1", "TORCH_SHOW_CPP_STACKTRACES": "1", "MEMMGR_DEBUG": "1"}

T = TypeVar("T")
_ends_at = float("inf")
_failed: list[tuple[RunSpec, str]] = []


def _seconds_left() -> float:
    """For a run: it has to end, and say why, before the section does."""
    return max(_LEAST_SECONDS, min(120.0, _ends_at - time.monotonic()))


def _together(device: str, acts: Sequence[Callable[[], T]]) -> list[Future[T]]:
    """What they return, or raise; side by side on a GPU."""
    # Plain memory is all that is free.
    side_by_side = device == "cuda" and os.environ.get("MEMMGR_CUDA_MEMORY", "mapped") == "mapped"
    with ThreadPoolExecutor(_AT_ONCE if side_by_side else 1) as pool:
        return [pool.submit(act) for act in acts]


def _run(spec: RunSpec) -> RunResult:
    result = run(spec, timeout_seconds=_seconds_left())
    if result.failure:
        _failed.append((spec, result.failure))
    return result


class _Failed(Exception):
    """A run that the section cannot do without came to nothing."""


def _unmanaged(spec: RunSpec, **changes: Any) -> RunResult:
    result = unmanaged(replace(spec, **changes), timeout_seconds=_seconds_left())
    if result.failure or result.need_bytes <= 0:
        raise _Failed(f"{spec.label} unmanaged: {result.failure or 'its need could not be measured'}")
    return result


def _managed(spec: RunSpec, need_bytes: int, share: float, **changes: Any) -> RunResult:
    return _run(replace(spec, budget_bytes=int(share * need_bytes), **changes))


def _last_line(result: RunResult) -> str:
    return result.failure.splitlines()[-1].replace("|", "/")[:160]


def exactness(device: str, quick: bool) -> bool:
    """Under deterministic algorithms a run in 60 % of its memory ends with the bits of the unmanaged one."""
    good = True
    _head("model", "parameters", "need", "budget", "peak", "evictions", "offloads", "recomputes", "same bits")

    def compare(spec: RunSpec) -> tuple[RunResult, RunResult | None, RunResult]:
        # Without another one, a difference could be torch's own.
        acts = [partial(_unmanaged, spec), *([partial(_run, spec)] if device == "cuda" else [])]
        plain, *again = (future.result() for future in _together(device, acts))
        return plain, again[0] if again else None, _managed(spec, plain.need_bytes, 0.6)

    specs = [replace(base, device=device, deterministic=True) for base in SIZES[quick]]
    for spec, future in zip(specs, _together(device, [partial(compare, spec) for spec in specs]), strict=True):
        try:
            plain, again, managed = future.result()
        except _Failed as error:
            good = False
            _failed.append((spec, str(error)))
            _line(spec.label, *["-"] * 7, "**failed**")
            continue
        if again is not None:
            row = (f"{spec.label}, unmanaged again", f"{plain.parameters:,}", megabytes(plain.need_bytes))
            _line(*row, "none", "-", "-", "-", "-", _yes(plain.same_bits(again)))
        if managed.failure:
            good = False
            _line(spec.label, *["-"] * 7, f"**failed**: {_last_line(managed)}")
            continue
        same, budget = managed.same_bits(plain), managed.spec.budget_bytes or 0
        good = good and same and managed.peak_bytes <= budget
        counts = (f"{managed.stats.get(key, 0):,.0f}" for key in ("evictions", "offloads", "recomputes"))
        sizes = (megabytes(plain.need_bytes), megabytes(budget), megabytes(managed.peak_bytes))
        _line(spec.label, f"{plain.parameters:,}", *sizes, *counts, _yes(same))
    return good


def _apart(a: RunResult, b: RunResult) -> str:
    """By how much two runs' losses differ at most."""
    pairs = zip(a.losses, b.losses, strict=False)
    most = max((abs(float.fromhex(x) - float.fromhex(y)) for x, y in pairs), default=float("nan"))
    return "the same bits" if a.same_bits(b) else f"{most:.2e}"


def verified(device: str, quick: bool) -> bool:
    """Rule 1 where torch itself does not promise the same bits: each restored cell equals what was dropped, or the run
    raises; how far two unmanaged runs are apart is printed beside how far ours is."""
    good = True
    _head("model", "cudnn.benchmark", "evictions", "offloads", "unmanaged twice", "managed", "every cell as it was")

    def compare(spec: RunSpec) -> tuple[RunResult, RunResult, RunResult]:
        plain = _unmanaged(spec)
        return plain, _run(spec), _managed(spec, plain.need_bytes, 0.6, options={"verify": True})

    specs = [
        replace(base, device=device, steps=min(base.steps, 3), benchmark=benchmark)
        for base in (SIZES[quick][1:] if quick else reversed(SIZES[quick]))
        for benchmark in ((True,) if quick else (False, True))
    ]
    for spec, future in zip(specs, _together(device, [partial(compare, spec) for spec in specs]), strict=True):
        name = (spec.label, "on" if spec.benchmark else "off")
        try:
            plain, again, managed = future.result()
        except _Failed as error:
            good = False
            _failed.append((spec, str(error)))
            _line(*name, *["-"] * 4, "**failed**")
            continue
        if managed.failure:
            good = False
            _line(*name, *["-"] * 4, f"**failed**: {_last_line(managed)}")
            continue
        counts = (managed.stats.get("evictions", 0), managed.stats.get("offloads", 0))
        good = good and sum(counts) > 0 and managed.peak_bytes <= (managed.spec.budget_bytes or 0)
        told = (_apart(plain, again), _apart(plain, managed))
        _line(*name, *(f"{count:,.0f}" for count in counts), *told, _yes(sum(counts) > 0))
    return good


def peak(device: str, quick: bool) -> bool:
    """What the driver sees over the process's start, against the budget.

    NVML counts code and library workspaces that are loaded on first use too: the unmanaged row says how much that is.
    """
    spec = replace(SIZES[quick][0], device=device, nvml=device == "cuda")
    plain = _unmanaged(spec)
    good = True
    _head(
        "run", "budget", "peak by torch or memmgr", "NVML over the start", "NVML - peak", "process RSS over the start"
    )
    shares = (0.75, 0.5) if not quick else (0.6,)
    for result in (plain, *(_managed(spec, plain.need_bytes, share) for share in shares)):
        budget = result.spec.budget_bytes
        name = "unmanaged" if budget is None else f"{budget / plain.need_bytes:.0%}"
        if result.failure:
            good = False
            _line(name, megabytes(budget or 0), f"**failed**: {_last_line(result)}", "-", "-", "-")
            continue
        good = good and (budget is None or result.peak_bytes <= budget)
        seen = megabytes(result.nvml_bytes) if result.nvml_bytes else "n/a"
        more = megabytes(max(0, result.nvml_bytes - result.peak_bytes)) if result.nvml_bytes else "n/a"
        limit = megabytes(budget) if budget else "none"
        _line(name, limit, megabytes(result.peak_bytes), seen, more, megabytes(result.rss_bytes))
    return good


def overlap(device: str, quick: bool) -> bool:
    """Offloading alone at 50 %, with the prefetcher on and off: how much of the copying lies under compute."""
    spec = replace(SIZES[quick][0], device=device, profile=device == "cuda")
    plain = _unmanaged(replace(spec, profile=False))
    good = True
    _head(
        "prefetcher", "s/step", "ratio", "offloaded", "reloads", "prefetch hits", "stalled", "copying", "under compute"
    )
    _line("(unmanaged)", f"{plain.seconds_a_step:.4f}", "1.00x", *["-"] * 6)
    timelines: list[str] = []
    for name in ("off", "bandwidth"):
        result = _managed(spec, plain.need_bytes, 0.5, policy=f"lru+offload+{name}")
        if result.failure:
            good = False
            _line(name, f"**failed**: {_last_line(result)}", *["-"] * 7)
            continue
        stats = result.stats
        copies = result.overlap.get("copy_seconds", 0.0)
        _line(
            name,
            f"{result.seconds_a_step:.4f}",
            f"{result.seconds_a_step / plain.seconds_a_step:.2f}x",
            megabytes(stats.get("offload_bytes", 0)),
            f"{stats.get('reloads', 0):,.0f}",
            f"{stats.get('prefetch_hits', 0):,.0f}",
            f"{stats.get('stall_seconds', 0):.3f} s",
            f"{1e3 * copies:.1f} ms" if copies else "n/a",
            f"{result.overlap['hidden_seconds'] / copies:.0%}" if copies else "n/a",
        )
        timelines += [f"prefetcher {name}, one step", *result.strips] if result.strips else []
    if timelines:
        print("\n```", *timelines, "```", sep="\n", flush=True)
    return good


def timings(device: str, quick: bool) -> bool:
    """Host time per recorded op and per saved tensor, then step times at 50 %."""
    _head("host µs per op, median of interleaved rounds", "plain", "under a budget")
    per_op = _op_costs(device, rounds=3 if quick else 15, ops=200 if quick else 1000)
    for name, costs in per_op.items():
        _line(name, *(f"{1e6 * cost:.2f}" for cost in costs))
    saving, not_saving = per_op["sin (saves its input)"], per_op["neg (saves nothing)"]
    saved = (saving[1] - saving[0]) - (not_saving[1] - not_saving[0])
    print(f"\nAn op: {1e6 * (not_saving[1] - not_saving[0]):.2f} µs; a saved tensor: {1e6 * saved:.2f} µs more.\n")
    good = True
    _head("run at 50 % of the need", "s/step", "ratio", "evictions", "offloads", "recomputing", "stalled")
    for base in SIZES[quick][: 1 if quick else 2]:
        spec = replace(base, device=device, steps=base.steps if quick else 12)
        plain = _unmanaged(spec)
        _line(f"{spec.label} unmanaged", f"{plain.seconds_a_step:.4f}", "1.00x", *["-"] * 4)
        for policy in ("auto",) if quick else ("auto", "evict", "offload"):
            result = _managed(spec, plain.need_bytes, 0.5, policy=policy)
            if result.failure:
                good = False
                _line(f"{spec.label} {policy}", f"**failed**: {_last_line(result)}", *["-"] * 5)
                continue
            stats = result.stats
            _line(
                f"{spec.label} {policy}",
                f"{result.seconds_a_step:.4f}",
                f"{result.seconds_a_step / plain.seconds_a_step:.2f}x",
                f"{stats.get('evictions', 0):,.0f}",
                f"{stats.get('offloads', 0):,.0f}",
                f"{stats.get('recompute_seconds', 0):.3f} s",
                f"{stats.get('stall_seconds', 0):.3f} s",
            )
    return good


def _op_costs(device: str, rounds: int, ops: int) -> dict[str, tuple[float, float]]:
    """Seconds per op: plain, and under a budget that nothing has to leave for."""
    import memmgr

    x = torch.zeros(64, device=device, requires_grad=True)

    def chain(op: Callable[[Tensor], Tensor]) -> float:
        y = x
        before = time.perf_counter()
        for _ in range(ops):
            y = op(y)
        return (time.perf_counter() - before) / ops

    costs: dict[str, tuple[float, float]] = {}
    # Nothing leaves, and to page-lock gigabytes at every turn would take longer than all the ops.
    host: dict[str, Any] = {"host": "16MB"} if device == "cuda" else {}
    for name, op in {"neg (saves nothing)": torch.neg, "sin (saves its input)": torch.sin}.items():
        seconds: tuple[list[float], list[float]] = ([], [])
        for index in range(rounds + 1):
            plain = chain(op)
            with memmgr.budget("1GB", device=device, quiet=True, **host):
                managed = chain(op)
            if index:  # the first round warms up
                for measured, value in zip(seconds, (plain, managed), strict=True):
                    measured.append(value)
        costs[name] = (statistics.median(seconds[0]), statistics.median(seconds[1]))
    return costs


def _probed(*words: str, **variables: str) -> dict[str, Any]:
    """What a program of `cuda_probe` says; it runs by path, so that it decides when memmgr is imported."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MEMMGR_")}
    kept = {k: v for k, v in os.environ.items() if k in ("MEMMGR_CACHE", "MEMMGR_CUDA_MEMORY")}
    done = subprocess.run(
        [sys.executable, "-P", str(cuda_probe.__file__), *words],
        env={**clean, **kept, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **variables},
        capture_output=True,
        text=True,
        timeout=_seconds_left(),
    )
    if done.returncode != 0:
        said = done.stderr[-4000:] or "no message"
        raise _Failed(f"{' '.join(words)} {variables}: ended with code {done.returncode}\n{said}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _asked(*words: str, **variables: str) -> dict[str, Any]:
    """As `_probed`; where that fails the rest is worth knowing, and `failed` is all there is."""
    try:
        return _probed(*words, **variables)
    except (_Failed, subprocess.TimeoutExpired) as error:
        _failed.append((RunSpec(" ".join(words), 0), str(error)))
        return {"failed": "**failed**"}


def allocator(device: str, quick: bool) -> bool:
    """What torch.cuda answers under memmgr's allocator; the same bits in all orders of importing; what a block costs."""
    if device != "cuda":
        print("Not rehearsed: there is nothing of it without CUDA.")
        return True
    good = True
    _head("question", "mapped memory", "plain memory")
    # One after the other: plain memory is all that is free.
    mapped, plain = (_asked("answers", MEMMGR_CUDA_MEMORY=memory) for memory in ("mapped", "plain"))
    for name, said in mapped.items():
        other = plain.get(name, "-").replace("|", "/")
        good = (
            good and (name == "allocator" or said == "ok") and (name in ("allocator", "empty_cache") or other == "ok")
        )
        _line(name, said.replace("|", "/"), other)
    print(flush=True)
    native = _probed("train", "native", MEMMGR_INSTALL="0")
    limit = int(0.6 * native["peak_bytes"])
    _head("order", "allocator", "budget", "peak", "reserved at most", "same bits")
    _line("unmanaged", native["allocator"], "none", megabytes(native["peak_bytes"]), "-", "-")
    # The model before the import: torch's own allocator stays, which takes whole segments.
    most = int(0.9 * native["reserved_peak_bytes"])
    acts: list[Callable[[], dict[str, Any]]] = [
        partial(_asked, "train", "environment", str(limit), MEMMGR_BUDGET=str(limit)),
        partial(_asked, "train", "first", str(limit)),
        partial(_asked, "train", "late", str(most), PYTORCH_CUDA_ALLOC_CONF=""),
        partial(_asked, "train", "late", str(most), PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
    ]
    rows = (
        ("environment", "memmgr", limit, "peak_bytes"),
        ("first", "memmgr", limit, "peak_bytes"),
        ("late", "native", most, "reserved_peak_bytes"),
        ("late, expandable segments", "native", most, "reserved_peak_bytes"),
    )
    for (order, whose, allowed, kept), future in zip(rows, _together(device, acts), strict=True):
        ours = future.result()
        if "failed" in ours:
            good = False
            _line(order, *["-"] * 4, "**failed**")
            continue
        same = ours["digest"] == native["digest"]
        good = good and same and ours["allocator"] == whose and ours[kept] <= allowed
        sizes = (megabytes(allowed), megabytes(ours["peak_bytes"]), megabytes(ours["reserved_peak_bytes"]))
        _line(order, ours["allocator"], *sizes, _yes(same))
    print(flush=True)
    _head("host time", "torch's own", "memmgr, mapped")
    theirs, mine = _probed("speed", "native", MEMMGR_INSTALL="0"), _probed("speed")
    for name, value in mine.items():
        if name != "allocator":
            unit = "" if "," in name else " ns"
            _line(name, f"{theirs[name]:,.1f}{unit}" if name in theirs else "-", f"{value:,.1f}{unit}")
    return good


def tests(device: str, quick: bool) -> bool:
    """The core's that are skipped without a GPU, where their folder and pytest are there. What tests/plugin/test_gpu.py asks has
    been asked by `allocator`."""
    files = [name for name in ("tests/driver/test_real_device.py",) if Path(name).is_file()]
    if device != "cuda" or not files or importlib.util.find_spec("pytest") is None:
        print("Left out: no GPU, no tests beside this, or no pytest.")
        return True
    command = [sys.executable, "-P", "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short", *files]
    print("```", flush=True)
    done = subprocess.run(command, stdout=sys.stdout.fileno(), stderr=subprocess.STDOUT)  # as it comes: time may be up
    print("```", flush=True)
    return done.returncode == 0


def driver(device: str, quick: bool) -> bool:
    """What the driver answers to each call that memmgr makes of it; meanwhile what faces torch is compiled, for all sections."""
    if device != "cuda":
        print("Not rehearsed: there is nothing of it without CUDA.")
        return True
    from memmgr import _cuda
    from memmgr.native import pager

    good = True
    acts: dict[str, Callable[[], object]] = {"CUDA's allocator": _cuda.build, "the pager": pager.load}
    with ThreadPoolExecutor(2) as pool:
        compiled = {name: pool.submit(_compiled, act) for name, act in acts.items()}
        _head("call", "answer", "took")
        for row in driver_probe.rows():
            good = good and not row[1].startswith("**")
            _line(*(cell.replace("|", "/") for cell in row))
        for name, future in compiled.items():
            seconds, wrong = future.result()
            good = good and not wrong
            _line(name, wrong.replace("|", "/") or "compiled", f"{seconds:.0f} s")
    try:
        done = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=20)
        said = done.stdout.strip() or done.stderr.strip()
    except (OSError, subprocess.SubprocessError) as error:
        said = str(error)
    print("\n```", said, "```", sep="\n", flush=True)
    return good


def _compiled(act: Callable[[], object]) -> tuple[float, str]:
    """Seconds, and what was wrong."""
    begun = time.perf_counter()
    try:
        act()
    except Exception as error:
        return time.perf_counter() - begun, f"**{type(error).__name__}: {error}**"
    return time.perf_counter() - begun, ""


SECTIONS: dict[str, Callable[[str, bool], bool]] = {
    "driver": driver,
    "exactness": exactness,
    "allocator": allocator,
    "verified": verified,
    "peak": peak,
    "overlap": overlap,
    "timings": timings,
    "tests": tests,
}


def main(argv: list[str]) -> int:
    """Runs one section; its exit code."""
    global _ends_at
    name, device, seconds, *flags = argv
    # Of what this starts: a crash, and what has to be stopped, says where it was.
    os.environ["PYTHONFAULTHANDLER"] = "1"
    _ends_at = time.monotonic() + 0.9 * float(seconds)
    try:
        good = SECTIONS[name](device, "--quick" in flags)
    except _Failed as error:
        print(f"\n**failed**:\n\n```\n{error}\n```", flush=True)
        good = False
    _tell(device)
    return 0 if good else DID_NOT_HOLD


def _tell(device: str) -> None:
    """What failed; if there is time, the first managed run again, slowly."""
    for spec, failure in _failed:
        print(f"\n{_words(spec)}:\n\n```\n{failure}\n```", flush=True)
    again = next((spec for spec, _ in _failed if spec.budget_bytes is not None), None)
    if device != "cuda" or again is None or time.monotonic() + _LEAST_SECONDS > _ends_at:
        return
    os.environ |= _SLOWLY
    result = run(again, timeout_seconds=_seconds_left())
    said = result.failure or f"no failure; losses {result.losses}"
    print(f"\n{_words(again)}, once more with {_SLOWLY}:\n\n```\n{said}\n```", flush=True)


def _words(spec: RunSpec) -> str:
    if spec.steps == 0:
        return spec.label
    settings = {"policy": spec.policy, "deterministic": spec.deterministic, "benchmark": spec.benchmark, **spec.options}
    limit = "unmanaged" if spec.budget_bytes is None else f"in {megabytes(spec.budget_bytes)}"
    return f"{spec.label} {limit}, {settings}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
