"""What an evicted dropout mask takes as bits, beside drawing it again.

    python benchmarks/bits_speed.py [--rounds 20] [--json FILE]

Each round draws a mask of each size as dropout does (`bernoulli_`, `div_`), evicts it in a budget, and brings it back. Medians;
"beyond two values" is the same for noise, which is found out and dropped.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import memmgr
from memmgr import _budget
from memmgr.policies import Action

SIZES = (1 << 16, 1 << 20, 6 << 20)


def rounds_of(n: int, rounds: int) -> dict[str, Any]:
    """Seconds of each part, for n numbers."""
    manager = _budget.current()
    assert manager is not None
    native = manager.native
    x = torch.randn(n, requires_grad=True)
    took: dict[str, list[float]] = {"draw": [], "evict": [], "back": [], "noise": []}
    for k in range(rounds + 2):
        begun = time.perf_counter()
        mask = torch.empty(n).bernoulli_(0.9).div_(0.9)
        drawn = time.perf_counter() - begun
        loss = (x * mask).sum()
        noise = torch.randn(n)
        other = (x * noise).sum()
        del mask, noise
        cells = [c for c in native.handled() if c.nbytes == 4 * n and c.recipe is not None]
        times = [drawn]
        for cell in cells:
            begun = time.perf_counter()
            native.release(cell, Action.EVICT)
            times.append(time.perf_counter() - begun)
            if cell.stored:
                begun = time.perf_counter()
                native.bring_back(cell)
                times.append(time.perf_counter() - begun)
        if k >= 2 and len(times) == 4:  # the first two prove the kinds
            for name, seconds in zip(took, times, strict=True):
                took[name].append(seconds)
        del cells, cell, loss, other
    return {"numbers": n, **{name: statistics.median(seconds) if seconds else None for name, seconds in took.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write everything there too")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} threads")
    with memmgr.budget("4GB", policy="evict", quiet=True, _sleep=False):
        rows = [rounds_of(n, options.rounds) for n in SIZES]
    print(f"{'numbers':>10} {'drawn':>10} {'as bits':>10} {'back':>10} {'beyond two values':>18}   (ms)")
    for row in rows:
        if row["draw"] is None:
            print(f"{row['numbers']:>10} no bits here: they need the compiled shim")
            continue
        print(
            "{numbers:>10} ".format(**row)
            + "{:10.3f} {:10.3f} {:10.3f} {:18.3f}".format(*(1e3 * row[k] for k in ("draw", "evict", "back", "noise")))
        )
    if options.json:
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
