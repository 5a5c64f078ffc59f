"""What memmgr decides, apart from what it does: pure functions from plain data to plain data.

No torch, no memmgr, no clock, no I/O, no state: the same code runs live, in the simulator and in property tests.
"""

from .rules.directors import DIRECTORS, Alternate, Auto
from .rules.filters import FILTERS, DtrOptions, Price
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
    "DtrOptions",
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
