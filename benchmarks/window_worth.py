"""What the window is worth: window, score, DTE and remap on recorded and made-up traces, into one report.

    python benchmarks/window_worth.py [--report docs/reports/<date>-window.md] [--only name] [--keep folder]

Records a few training steps of each model (`_window_trace.py`), replays them through the arena under 50 % of their peak
and near the floor, once for each way of finding who leaves (`window_replay.cpp`), and writes the table. Needs cmake and a
C++ compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]  # `make bench` runs with -P

import _window_trace  # noqa: E402
from budget import models  # noqa: E402

WAYS = ("window", "score", "dte", "remap", "window, then remap")


def _llama() -> Callable[[], object]:
    """Steps of lengths that differ each time, as sentences do."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    dice = random.Random(0)

    def step() -> None:
        tokens = torch.randint(64, (4, dice.randrange(24, 257)))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


MODELS: dict[str, tuple[Callable[[], Callable[[], object]], int]] = {
    "GPT": (lambda: models.gpt().step, 3),
    "ResNet-like": (lambda: models.convnet(batch=16).step, 3),
    "U-Net": (lambda: models.unet().step, 3),
    "DenseNet block": (lambda: models.densenet().step, 3),
    "Llama, any length": (_llama, 10),
}
VARIABLE = ("Llama, any length", "any size")


def build(folder: Path) -> Path:
    """The replay, compiled."""
    cmake = Path(sys.executable).parent / "cmake"
    tool = str(cmake) if cmake.exists() else "cmake"
    commands = (
        [tool, "-S", str(ROOT / "allocator"), "-B", str(folder), "-DMEMMGR_BENCH=ON"],
        [tool, "--build", str(folder), "--target", "window_replay"],
    )
    for command in commands:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "window_replay"


def traces(folder: Path, only: str | None) -> dict[str, Path]:
    """All of them, recorded or made up, as files."""
    torch.set_num_threads(1)
    found = {}
    for name, (training, steps) in MODELS.items():
        if only in (None, name):
            found[name] = folder / f"{name.replace(' ', '-')}.trace"
            _window_trace.record(training, steps, found[name])
    for name, text in _window_trace.adversarial().items():
        if only in (None, name):
            found[name] = folder / f"{name.replace(' ', '-')}.trace"
            found[name].write_text(text)
    return found


Row = dict[str, Any]


def replay(tool: Path, trace: Path) -> list[Row]:
    """Every way, switch and budget."""
    done = subprocess.run([str(tool), str(trace)], check=True, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


# ---- the report --------------------------------------------------------------------------------------------------


def _mb(value: float) -> str:
    return f"{value / 1e6:.1f}"


def _cells(row: Row) -> str:
    """One way under one budget; how it ended first."""
    works = "" if row["works"] else " ✗"
    return (
        f"{_mb(row['budget'])}{works} | {row['evictions']:.0f} | {_mb(row['evicted'])} | "
        f"{_mb(row['beyond'])} | {_mb(row['excess'])} | "
        f"{row['contiguity']:.0f} of {row['episodes']:.0f} | {100 * row['rate']:.1f} / {100 * row['rate_max']:.1f} | "
        f"{100 * row['fragmentation']:.0f} / {100 * row['fragmentation_max']:.0f} | "
        f"{row['search_us']:.1f} / {row['search_max_us']:.0f} | "
        f"{100 * row['recompute_seconds'] / max(row['op_seconds'], 1e-12):.1f} | {_mb(row['remapped'])}"
    )


HOW = """## How it was taken

Every model took its training steps once in a real process, on memmgr's CPU plug-in without a budget and without its
recorder: the core logged each block that it handed out and got back (operator-internal temporaries, parameters,
gradients and optimizer states included), and a dispatch mode and saved-tensor hooks noted the ops with their inputs,
outputs and seconds, what autograd saved, and from when to when the program itself held it. `window_replay.cpp` then
makes the same requests of the same arena, by its C interface, under a budget. A saved storage that the program does
not hold may leave; when it is used again its op's inputs (made again first if need be), temporaries and outputs are
allocated and the virtual clock moves on. Prices are DTR's for everybody: (own op + evicted ancestors) / staleness.
Nothing is offloaded; memory is mapped, not touched. 50 % is of the trace's peak; *near the floor* is 1.05 times the
highest floor among the five ways with writes in place, so that all of them can work. Floors are by bisection to a
thousandth of the peak; success is not quite monotonous in the budget, and op times differ a little from one recording
to the next, so differences of a few percent between floors are noise. ✗: ran out of memory; its figures are those
until then.

*window*, *score* and *dte* never remap (the arena is one piece of memory of the budget's length); *remap* evicts by
score and takes addresses further up where there is no run; *window, then remap* searches first and remaps when no
window exists. *Beyond shortage*: evicted bytes, less those by which the request would have passed the budget; *beyond
request*: less all of the request's own. *Rate*: free bytes / budget when a reclaim begins (Coop's rate). *1 −
run/free*: longest run / free bytes then. *Recompute*: of the ops' time. *Apart*: dear and cheap tensors from opposite
ends. *Writes move*: each in-place write gives its block a new place, as copy on write would; the product never does
that.
"""

HEADS = (
    "budget MB",
    "evictions",
    "evicted MB",
    "beyond shortage MB",
    "beyond request MB",
    "reclaims though bytes sufficed",
    "rate % mean / worst",
    "1 − run/free % mean / worst",
    "search µs mean / worst",
    "recompute %",
    "remapped MB",
)


def _table(rows: list[Row], where: str, apart: int) -> list[str]:
    lines = ["| way | " + " | ".join(HEADS) + " |", "|---" + "|---:" * len(HEADS) + "|"]
    for way in WAYS:
        for row in rows:
            if (row["way"], row["where"], row["apart"], row["moves"]) == (way, where, apart, 0):
                lines.append(f"| {way} | {_cells(row)} |")
    return lines


def _floors(results: dict[str, list[Row]]) -> list[str]:
    lines = ["| trace | peak MB | switches | " + " | ".join(WAYS) + " |", "|---|---:|---" + "|---:" * len(WAYS) + "|"]
    for name, rows in results.items():
        for apart, moves in ((0, 0), (1, 0), (0, 1), (1, 1)):
            of_way = {r["way"]: r for r in rows if (r["apart"], r["moves"]) == (apart, moves)}
            least = min(r["floor"] for way, r in of_way.items())
            cells = []
            for way in WAYS:
                share = f"{100 * of_way[way]['floor'] / of_way[way]['peak']:.1f}"
                cells.append(f"**{share}**" if of_way[way]["floor"] <= 1.002 * least else share)
            switches = ("apart" if apart else "together") + (", writes move" if moves else ", in place")
            lines.append(f"| {name} | {_mb(rows[0]['peak'])} | {switches} | " + " | ".join(cells) + " |")
    return lines


def _ratios(results: dict[str, list[Row]]) -> list[str]:
    """The window beside the others: bytes beyond need and recomputation, where both work."""
    lines = [
        "| trace | budget | beyond shortage: window / score | beyond request: window / score | window / DTE "
        "| recompute: window / score | remap / window |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for name, rows in results.items():
        for where in ("50 %", "near the floor"):
            of = {r["way"]: r for r in rows if (r["apart"], r["moves"], r["where"]) == (0, 0, where)}

            def ratio(a: Row, b: Row, field: str) -> str:
                if not (a["works"] and b["works"]):
                    return "–"
                return f"{a[field] / b[field]:.2f}" if b[field] else "–"

            window, score, dte, remap = of["window"], of["score"], of["dte"], of["remap"]
            lines.append(
                f"| {name} | {where} | {ratio(window, score, 'beyond')} | {ratio(window, score, 'excess')} | "
                f"{ratio(window, dte, 'excess')} | "
                f"{ratio(window, score, 'recompute_seconds')} | {ratio(remap, window, 'recompute_seconds')} |"
            )
    return lines


def _switch(results: dict[str, list[Row]], switch: str) -> list[str]:
    """What a switch of point 2 does: means over the traces, of ratios on / off."""
    lines = ["| way | floor | evicted | beyond shortage | recompute |", "|---|---:|---:|---:|---:|"]
    for way in WAYS:
        sums: dict[str, list[float]] = {"floor": [], "evicted": [], "beyond": [], "recompute_seconds": []}
        for rows in results.values():
            pairs: dict[tuple[Any, ...], dict[int, Row]] = {}
            other = "moves" if switch == "apart" else "apart"
            for r in rows:
                if r["way"] == way and r[other] == 0:
                    pairs.setdefault((r["where"],), {})[r[switch]] = r
            for (where,), pair in pairs.items():
                if where == "50 %":
                    sums["floor"].append(pair[1]["floor"] / pair[0]["floor"])
                if pair[0]["works"] and pair[1]["works"]:
                    for field in ("evicted", "beyond", "recompute_seconds"):
                        if pair[0][field] and pair[1][field]:
                            sums[field].append(pair[1][field] / pair[0][field])
        means = [f"{_geometric(values):.3f}" if values else "–" for values in sums.values()]
        lines.append(f"| {way} | " + " | ".join(means) + " |")
    return lines


def _geometric(values: list[float]) -> float:
    product = 1.0
    for value in values:
        product *= value ** (1 / len(values))
    return product


def report(results: dict[str, list[Row]]) -> str:
    """The whole report, without its introduction and conclusion."""
    parts: list[str] = [HOW, "## Smallest budget that works, % of the peak", "", *_floors(results), ""]
    parts += ["## The window beside the others (together, in place)", "", *_ratios(results), ""]
    parts += ["## Cheap tensors apart: on / off, geometric mean over the traces", "", *_switch(results, "apart"), ""]
    parts += ["## Writes move blocks: on / off, geometric mean over the traces", "", *_switch(results, "moves"), ""]
    for name, rows in results.items():
        for where in ("50 %", "near the floor"):
            for apart in (0, 1):
                parts += [f"### {name}, {where}, {'apart' if apart else 'together'}", ""]
                parts += [*_table(rows, where, apart), ""]
    return "\n".join(parts)


def machine() -> str:
    """Hardware and versions."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.split(":")[1].strip() for line in cpuinfo if "model name" in line),
        "?",
    )
    return f"{model}, {os.cpu_count()} cores; Python {platform.python_version()}, torch {torch.__version__}, Linux"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, help="a file to write the tables into (default: print)")
    parser.add_argument("--only", help="one trace by its name")
    parser.add_argument("--keep", type=Path, help="a folder for traces and results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        tool = build(Path(scratch) / "build")
        results = {}
        for name, trace in traces(folder, options.only).items():
            results[name] = replay(tool, trace)
            print(f"{name}: {len(results[name])} runs", file=sys.stderr, flush=True)
            (folder / f"{trace.stem}.json").write_text(json.dumps(results[name]))
    text = f"{machine()}\n\n{report(results)}"
    if options.report:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
