"""Decisions of memmgr: pure functions from plain data to plain data, apart from the code that acts. No torch, no
memmgr, no clock, no I/O, no state, so simulator and property tests run the same code. Live, `plan` acts, and the published
systems that `memmgr.runtime.planners` lists. Of `rules`, malloc has C++ versions of the common filters and directors; the others
are called live (`memmgr.runtime.ranking`). Prefetchers run in the simulator only: without a plan the pager reads ahead by itself.
"""

from .rules.directors import DIRECTORS, Alternate, Auto
from .rules.filters import FILTERS, Price
from .rules.prefetchers import PREFETCHERS, Prefetcher, Upcoming, fifo
from .rules.rank import rank
from .rules.registry import POLICIES, Policy, parse_policy
from .rules.types import NO_LINK, Action, Candidates, Director, Filter, Link, Ranking

__all__ = [
    "DIRECTORS",
    "FILTERS",
    "NO_LINK",
    "POLICIES",
    "PREFETCHERS",
    "Action",
    "Alternate",
    "Auto",
    "Candidates",
    "Director",
    "Filter",
    "Link",
    "Policy",
    "Prefetcher",
    "Price",
    "Ranking",
    "Upcoming",
    "fifo",
    "parse_policy",
    "rank",
]
