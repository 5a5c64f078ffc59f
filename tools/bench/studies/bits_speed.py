"""Time to evict and restore a dropout mask as bits, compared with drawing it again.

    python tools/bench/studies/bits_speed.py [--rounds 20]

Each round draws a mask of each size as dropout does (`bernoulli_`, `div_`), packs it, and unpacks it. Medians; "beyond
two values" is the time to find that noise has more of them.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch

import memmgr
from memmgr.native import binding

SIZES = (1 << 16, 1 << 20, 6 << 20)


def _timed(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def rounds_of(n: int, rounds: int) -> tuple[float, float, float, float]:
    """Seconds to draw, to take away, to bring back, and to find out that noise is no mask, for n numbers."""
    native = binding.load()
    rows: list[tuple[float, float, float, float]] = []
    for _ in range(rounds):
        mask = torch.empty(n)
        drawn = _timed(lambda mask=mask: mask.bernoulli_(0.9).div_(0.9))
        away = _timed(lambda mask=mask: native.take_away(mask, 0))
        found = native.describe(mask)
        assert found is not None and found["residency"] == "packed", found
        back = _timed(lambda mask=mask: native.pin([mask]))
        noise = torch.empty(n).uniform_().div_(0.9)
        rows.append((drawn, away, back, _timed(lambda noise=noise: native.take_away(noise, 0))))
    draw, away, back, other = (statistics.median(column) for column in zip(*rows, strict=True))
    return draw, away, back, other


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="three rounds")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} threads")
    print(f"{'numbers':>10} {'drawn':>10} {'as bits':>10} {'back':>10} {'beyond two values':>18}   (ms)")
    with memmgr.budget("4GB", policy="evict", quiet=True):
        for n in SIZES:
            row = rounds_of(n, 3 if options.quick else options.rounds)
            print(f"{n:>10} " + "{:10.3f} {:10.3f} {:10.3f} {:18.3f}".format(*(1e3 * s for s in row)))


if __name__ == "__main__":
    main()
