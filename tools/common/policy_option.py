"""The option `--policy`, whose `help` lists all policies."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from memmgr.policies import DIRECTORS, FILTERS, POLICIES

_LINES = {
    "auto": "recompute or copy, whichever is cheaper, and follow a plan (the default)",
    "evict": "recompute only",
    "offload": "copy only, to the disk or to host memory",
    "delta": "DELTA, with its mistakes corrected",
    "capuchin": "Capuchin's plan of a measured pass",
    "delta_taco": "TACO's knapsack over a measured pass",
    "coop": "Coop's choice in a measured pass",
    "zero_offload": "optimizer states are offloaded, as published",
    "zero_infinity": "all model states are offloaded, as published",
    "patrickstar": "model states are offloaded in chunks, as published",
    "l2l": "one layer's states at a time, as published",
    "vdnn_all": "vDNN: every saved tensor is copied",
    "vdnn_conv": "vDNN: the inputs of convolutions are copied",
    "keep": "nothing is evicted; `nothing` is another name of it",
    "torture": "for tests: everything is evicted at once",
}


def listing() -> str:
    """All policies, as `--policy help` prints them."""
    names = [name for name in POLICIES if name != "nothing"]
    lines = [f"  {name:<14}{_LINES.get(name, '')}".rstrip() for name in names]
    return "\n".join(
        [
            "policies: which tensors are evicted, and how",
            *lines,
            "",
            "or a filter, which orders the tensors, alone or as FILTER+DIRECTOR:",
            f"  filters       {', '.join(FILTERS)}",
            f"  directors     {', '.join(DIRECTORS)}",
        ]
    )


class Listed(argparse.Action):
    """Prints a list for `help`, before anything that is missing on the command line is an error."""

    def __init__(self, *words: Any, listing: Callable[[], str] = listing, **options: Any) -> None:
        super().__init__(*words, **options)
        self._listing = listing

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if values == "help":
            print(self._listing())
            parser.exit()
        setattr(namespace, self.dest, values)


def add_policy(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Adds the option."""
    parser.add_argument(
        "--policy",
        action=Listed,
        default=default,
        metavar="NAME",
        help="auto (default), evict, offload; help lists all",
    )
