"""Time of a decision: rank and pick among 10,000 candidates, by policy. Prints min and median, with the machine.

    python tools/bench/studies/policy_cost.py [--cells 10000] [--repeats 200]

The goal is 2 ms for the victims of one request or of one look ahead (up to a tenth of all cells).
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from memmgr.policies import (
    DIRECTORS,
    FILTERS,
    PREFETCHERS,
    Candidates,
    DtrOptions,
    Link,
    Price,
    Upcoming,
    rank,
)


def cells(n: int, seed: int = 0) -> Candidates:
    """Like a pass: sizes and costs over three decades, a quarter clean, a few without a recipe, used in reverse
    order."""
    rng = np.random.default_rng(seed)
    size = (10 ** rng.uniform(4, 7, n)).astype(np.int64)
    return Candidates.build(
        size,
        staleness_seconds=np.sort(rng.uniform(0, 1, n))[::-1],
        cost_seconds=size * 10 ** rng.uniform(-10, -8, n),
        chain_seconds=rng.exponential(1e-4, n) * (rng.random(n) < 0.3),
        recomputable=rng.random(n) > 0.05,
        clean=rng.random(n) < 0.25,
        next_use=np.arange(n)[::-1],
        seconds_until_use=np.arange(n)[::-1] / n * 2.0 + 0.2,
    )


def timed(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """(min, median) in milliseconds."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times), statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    c = cells(options.cells)
    total = int(c.size_bytes.sum())
    print(
        f"{options.cells} candidates, numpy {np.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, {os.cpu_count()} cores"
    )
    print(f"{'what':44} {'min ms':>8} {'median':>8}  victims")

    def row(what: str, call: Callable[[], object]) -> None:
        least, median = timed(call, options.repeats)
        result = call()
        count = len(result) if hasattr(result, "__len__") else ""
        print(f"{what:44} {least:8.3f} {median:8.3f}  {count}")

    pace = total / 1.0  # all of it saved in a second of forward
    links = {
        "50 MB/s": Link(50e6, 50e6, slack_seconds=0.01, demand_bytes_per_second=pace, seconds_until_reads=0.2),
        "2 GB/s": Link(2e9, 2e9, slack_seconds=0.01, demand_bytes_per_second=pace, cpu_seconds_per_byte=3e-10),
        "100 GB/s": Link(1e11, 1e11, slack_seconds=0.5, demand_bytes_per_second=pace),
    }
    due = np.arange(options.cells // 4)
    links["2 GB/s, 1/4 below"] = replace(links["2 GB/s"], due_bytes=due * 0 + 10**5, due_seconds=1.0 + due / 1e3)
    fast = links["2 GB/s"]
    price, auto = FILTERS["price"], DIRECTORS["auto"]
    for name, score in FILTERS.items():
        row(f"filter {name}", partial(score, c))
    row("filter price, bound", partial(Price().bind(fast), c))
    row("filter dtr, sqrt(n) sampling", partial(DtrOptions(FILTERS["dtr"], sample_seed=1), c))
    for share in (0.001, 0.01, 0.1, 0.5):
        need = int(share * total)
        row(f"rank dtr+evict, {share:.1%}", partial(rank, c, FILTERS["dtr"], DIRECTORS["evict"], fast, need))
        for name, link in links.items():
            row(f"rank auto, {share:.1%}, {name}", partial(rank, c, price, auto, link, need, urgent_bytes=0))
    row("rank auto, everything, 2 GB/s", partial(rank, c, price, auto, fast, urgent_bytes=0))
    upcoming = Upcoming.build(c.size_bytes)
    for name, prefetch in PREFETCHERS.items():
        row(f"prefetch {name}", partial(prefetch, upcoming, fast, total // 10, 1e-4, 0))


if __name__ == "__main__":
    main()
