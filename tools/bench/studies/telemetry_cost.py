"""Cost of the telemetry for a training step: interleaved chunks of steps in one process and one budget, as ratios.

    python tools/bench/studies/telemetry_cost.py [--rounds N] [--steps N] [--share 0.6] [--quick] [--json out.json]

Settings, each a chunk of steps in every round, in an order that rotates:
  nobody    the socket is there and no reader is connected
  again     the same: its difference from `nobody` is noise
  reader    another process reads samples and events every 0.5 s
  all       it also asks for cells, map and holders, as `memmgr top` does
  attach    the same one comes, takes three lines and goes, four times a second

The figure is the median over rounds of the ratio to `nobody`, by several measures: of the chunk's median step by the wall
clock, of the processor time of the whole process, and where the processor has counters for us, of the instructions and the
cycles that the whole chunk took in the thread that trains (with one OpenMP thread that is all of the training; other
work of the machine adds no instructions, so a thousandth is seen). Beside each the half width of its 95 % interval, by
bootstrap over the rounds. The last column is the processor time of the telemetry's thread as a share of the wall clock.
A step pays at most the last column (while that thread has the GIL, the other may wait) and the additional work of the
training thread.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import memmgr
from memmgr.telemetry import stream
from memmgr.tools.bench.gpt import GPT, GPTConfig

sys.path.insert(0, str(Path(__file__).resolve().parent))  # `make bench` runs with -P

from _counters import counters

LEAST_SECONDS = 1.5  # of a chunk
SETTINGS = ("nobody", "again", "reader", "all", "attach")

# Another process, so that its own time is not the training's. One word a line on stdin; it answers when that is so.
_READER = """
import json, select, socket, sys, threading
address = sys.argv[1]
stop = None
def connect(wants):
    s = socket.socket(socket.AF_UNIX)
    s.connect(address)
    s.sendall((json.dumps({"interval_seconds": 0.5, "want": wants}) + chr(10)).encode())
    return s
def read(wants, stop, again):
    while not stop.is_set():
        s = connect(wants)
        end = 3 if again else 1 << 30
        while not stop.is_set() and end:
            if select.select([s], [], [], 0.02)[0] and not s.recv(1 << 16):
                return
            end -= 1
        s.close()
        stop.wait(0.25)
thread = None
for word in sys.stdin:
    if thread:
        stop.set()
        thread.join()
        thread = None
    word = word.strip()
    if word in ("reader", "all", "attach"):
        stop = threading.Event()
        wants = [] if word == "reader" else ["cells", "map", "holders"]
        thread = threading.Thread(target=read, args=(wants, stop, word == "attach"), daemon=True)
        thread.start()
    print(word, flush=True)
"""


def training(quick: bool) -> Callable[[], None]:
    """One step of a GPT, as a function."""
    torch.manual_seed(0)
    config = GPTConfig(layers=2, heads=4, width=128, context=64) if quick else GPTConfig()
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens, targets = (torch.randint(256, (8, config.context)) for _ in range(2))

    def step() -> None:
        model(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def need(quick: bool) -> int:
    """Unmanaged peak of two steps, in bytes."""
    with memmgr.budget(None, quiet=True) as mm:
        step = training(quick)
        step()
        step()
        del step
    return int(mm.stats()["unmanaged_peak_bytes"])


def telemetry_thread_seconds() -> float:
    """Processor time of the telemetry's thread so far."""
    for thread in threading.enumerate():
        if thread.name == "memmgr-telemetry" and thread.native_id is not None:
            return time.clock_gettime(_thread_clock(thread.native_id))
    return 0.0


def _thread_clock(native_id: int) -> int:
    return (~native_id << 3) | 6  # the kernel's number for a thread's processor clock (Linux)


def interval(ratios: list[float]) -> float:
    """Half the width of the 95 % interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return (medians[1949] - medians[50]) / 2


@dataclass
class Rounds:
    """The figures by kind of measure and setting, a value a round.

    Attributes:
        share: by setting, the telemetry thread's processor time over the time of the chunk.
        steps: of a chunk.
    """

    found: dict[str, dict[str, list[float]]]
    share: dict[str, list[float]]
    steps: int


def measured(rounds: int, least_steps: int, limit: int, quick: bool) -> Rounds:
    """A chunk of steps under each setting in turn, in one budget."""
    ours = counters()
    found: dict[str, dict[str, list[float]]] = {
        kind: {name: [] for name in SETTINGS} for kind in ("wall", "process", *ours)
    }
    share: dict[str, list[float]] = {name: [] for name in SETTINGS}
    with memmgr.budget(limit, quiet=True):
        address = str(stream.socket_of(os.getpid()))
        reader = subprocess.Popen(
            [sys.executable, "-S", "-c", _READER, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert reader.stdin is not None and reader.stdout is not None
        step = training(quick)
        for _ in range(5):
            begun = time.perf_counter()
            step()
        # A reader asks for a sample twice a second, so a shorter chunk would meet none.
        steps = max(least_steps, math.ceil(LEAST_SECONDS / (time.perf_counter() - begun)))
        for r in range(rounds):
            turn = r % len(SETTINGS)
            for name in SETTINGS[turn:] + SETTINGS[:turn]:
                reader.stdin.write(name + "\n")
                reader.stdin.flush()
                reader.stdout.readline()
                step()  # the one in which it changes
                seconds = []
                cpu, theirs, begun = time.process_time(), telemetry_thread_seconds(), time.perf_counter()
                counted = {event: counter.read() for event, counter in ours.items()}
                for _ in range(steps):  # on the CPU backward runs in this thread, too
                    at = time.perf_counter()
                    step()
                    seconds.append(time.perf_counter() - at)
                for event, counter in ours.items():
                    found[event][name].append(counter.read() - counted[event])
                found["wall"][name].append(statistics.median(seconds))
                found["process"][name].append(time.process_time() - cpu)
                share[name].append((telemetry_thread_seconds() - theirs) / (time.perf_counter() - begun))
        reader.stdin.close()
        reader.wait(30)
        reader.stdout.close()
        del step
    return Rounds(found, share, steps)


def table(of: Rounds) -> list[dict[str, Any]]:
    """Prints a row a setting, as ratios to `nobody`, and returns the rows."""
    rows: list[dict[str, Any]] = []
    print(f"{'':<9}{'step':>10}" + "".join(f"   {kind:^17}" for kind in of.found) + "   telemetry's thread")
    for name in SETTINGS:
        row: dict[str, Any] = {"setting": name, "step_ms": 1e3 * statistics.median(of.found["wall"][name])}
        line = f"{name:<9}{row['step_ms']:8.2f}ms"
        for kind, by_setting in of.found.items():
            ratios = [a / b for a, b in zip(by_setting[name], by_setting["nobody"], strict=True)]
            row[f"{kind}_ratio"], row[f"{kind}_half_width"] = statistics.median(ratios), interval(ratios)
            line += f"   {row[f'{kind}_ratio']:.4f} +- {row[f'{kind}_half_width']:.4f}"
        row["telemetry_thread_share"] = statistics.mean(of.share[name])
        rows.append(row)
        print(f"{line}   {row['telemetry_thread_share']:8.3%}")
    return rows


def main() -> None:
    """Runs the rounds and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=10, help="least steps of a chunk")
    parser.add_argument("--share", type=float, default=0.6, help="the budget, of what the training needs")
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    of = measured(args.rounds, args.steps, int(need(args.quick) * args.share), args.quick)
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f};")
    print(f"budget {args.share:.0%} of the need; {args.rounds} rounds of {of.steps} steps; ratios to 'nobody'")
    rows = table(of)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
