"""Policies by name: `policy="auto"`, `"dtr"`, `"lru+offload"`, `"filter:dtr,director:offload,prefetch:off"`."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from types import MappingProxyType

from .directors import DIRECTORS, Alternate, keep
from .filters import FILTERS
from .prefetchers import PREFETCHERS, Prefetcher, fifo, off
from .types import Director, Filter


@dataclass(frozen=True, slots=True)
class Policy:
    """Which cells are evicted, how, and which are prefetched.

    Attributes:
        name: as it was asked for, tidied.
        filter: see filters.py.
        director: see directors.py.
        prefetcher: see prefetchers.py.
        torture: each cell is evicted as soon as it can be, pressure or not (tests).
        planner: the planner of measured passes ("plan", "capuchin", "zero_offload"). Filter and director then act only
            where no plan does. Empty: no planner.
        recomputes: cells may be dropped at all, to be made again; False: not even to make room in an emergency.
        offloads: a tier below is wanted; False: none is opened.
    """

    name: str
    filter: Filter
    director: Director
    prefetcher: Prefetcher
    torture: bool = False
    planner: str = ""
    recomputes: bool = True
    offloads: bool = True


def _policy(
    name: str, filter_: str, director: str, prefetch: str | Prefetcher, planner: str = "", *, recomputes: bool
) -> Policy:
    """The policy of these parts. A planner other than ours chooses the eviction method itself; the director does not
    count for it.
    """
    return Policy(
        name,
        FILTERS[filter_],
        DIRECTORS[director],
        PREFETCHERS[prefetch] if isinstance(prefetch, str) else prefetch,
        planner=planner,
        recomputes=recomputes,
        offloads=director != "evict",
    )


STREAMING = ("zero_offload", "zero_infinity", "patrickstar", "l2l")
"""Planners that move model states, and run nothing again."""

SWAPPING = ("vdnn_all", "vdnn_conv")
"""Planners that move the tensors that backward needs, and run no op again."""

_KEEP = Policy("keep", FILTERS["lru"], keep, off, recomputes=False, offloads=False)

POLICIES: MappingProxyType[str, Policy] = MappingProxyType(
    {
        "auto": _policy("auto", "price", "auto", "bandwidth", "plan", recomputes=True),
        "evict": _policy("evict", "dtr_eq", "evict", "off", "plan", recomputes=True),
        "offload": _policy("offload", "lru", "offload", "bandwidth", "plan", recomputes=False),
        "delta": _policy("delta", "delta", "delta", "bandwidth", recomputes=True),
        "capuchin": _policy("capuchin", "lru", "offload", "off", "capuchin", recomputes=True),
        "delta_taco": _policy("delta_taco", "delta", "delta", "fifo", "delta_taco", recomputes=True),
        "coop": _policy("coop", "dtr_eq", "evict", "off", "coop", recomputes=True),
        **{name: _policy(name, "lru", "offload", "off", name, recomputes=False) for name in (*STREAMING, *SWAPPING)},
        "keep": _KEEP,
        "nothing": _KEEP,
        "torture": Policy("torture", FILTERS["lru"], Alternate(), off, torture=True),
    }
)

ALONE: MappingProxyType[str, str] = MappingProxyType(
    {
        "dtr": "evict",
        "dtr_eq": "evict",
        "dtr_local": "evict",
        "msps": "evict",
        "lru": "auto",
        "largest": "auto",
        "price": "auto",
        "delta": "delta",
    }
)
"""The director of a filter that is named alone: DTR's are recompute only, as published; the neutral orders get
`auto`."""

_KEYS = ("filter", "director", "prefetch")


def parse_policy(text: str) -> Policy:
    """The policy that `text` names.

    Args:
        text: a name ("auto", "evict", "offload", "delta", "keep", "nothing", "torture"), a filter ("dtr"),
            "FILTER+DIRECTOR", "FILTER+DIRECTOR+PREFETCHER", or pairs "filter:F,director:D,prefetch:P" of which each may
            be missing (then: the director of the filter alone, `auto`'s filter, the bandwidth prefetcher). Case,
            blanks, "-" for "_" and "=" for ":" do not matter. Prefetchers: "bandwidth", "fifo" (5 ahead), "fifoN" or
            "fifo(N)", "off".

    Raises:
        ValueError: unknown; the message has a name that is near, or the usual ones.
    """
    tidy = re.sub(r"\s+", "", text).lower().replace("-", "_").replace("=", ":") if isinstance(text, str) else ""
    if tidy in POLICIES:
        return POLICIES[tidy]
    chosen = _pairs(tidy) if ":" in tidy else dict(zip(_KEYS, tidy.split("+"), strict=False))
    if chosen is None or not tidy or (":" not in tidy and tidy.count("+") > 2):
        raise _unknown(text)
    filter_ = chosen.get("filter", "price")
    if filter_ not in FILTERS:
        raise _unknown(text)
    director = chosen.get("director", ALONE[filter_] if "filter" in chosen else "auto")
    if director not in DIRECTORS:
        raise _unknown(text)
    prefetch = chosen.get("prefetch", "off" if director == "evict" else "bandwidth")
    prefetcher = _prefetcher(prefetch)
    if prefetcher is None:
        raise _unknown(text)
    return _policy(tidy, filter_, director, prefetcher, recomputes=director != "offload")


def _pairs(tidy: str) -> dict[str, str] | None:
    chosen: dict[str, str] = {}
    for part in tidy.split(","):
        key, colon, value = part.partition(":")
        if not colon or key not in _KEYS or key in chosen:
            return None
        chosen[key] = value
    return chosen


def _prefetcher(name: str) -> Prefetcher | None:
    if name in PREFETCHERS:
        return PREFETCHERS[name]
    match = re.fullmatch(r"fifo\(?([1-9]\d{0,5})\)?", name)
    return fifo(int(match[1])) if match else None


def _unknown(text: object) -> ValueError:
    near = difflib.get_close_matches(str(text).lower(), [*POLICIES, *FILTERS], n=1, cutoff=0.7)
    instead = f"did you mean {near[0]!r}?" if near else "the usual ones are 'auto', 'evict' and 'offload';"
    return ValueError(f"unknown policy {text!r}; {instead} `memmgr run --policy help` lists all")
