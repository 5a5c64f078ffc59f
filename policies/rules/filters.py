"""Filters: which cells leave first. A heuristic is one short function from columns to scores; the smaller goes first.

None looks at whether a cell can leave, nor how: `rank` and the director do.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import numpy as np

from .types import Candidates, Filter, Floats, Link

_TINY_SECONDS = 1e-9  # one tick: an access "just now" is stale by something, and scores stay finite
# no transfer is quite free, so that cells with hidden transfers are still evicted in order of staleness
_FLOOR_SECONDS_PER_BYTE = 1e-12


def _bytes(c: Candidates) -> Floats:
    return np.maximum(c.size_bytes, 1).astype(np.float64)


def _staleness(c: Candidates) -> Floats:
    return np.maximum(c.staleness_seconds, _TINY_SECONDS)


def dtr(c: Candidates) -> Floats:
    """(c + sum of e* c) / (m s), in 1/byte. Source: DTR (Kirisame et al., ICLR 2021), section 3, h_DTR.

    Known limitations: `chain_seconds` holds ancestors; evicted descendants (the other half of e*) count only if
    the caller adds them. Staleness is a guess at the next use; here it happens to be right, as backward reverses.
    """
    return (c.cost_seconds + c.chain_seconds) / (_bytes(c) * _staleness(c))


def dtr_eq(c: Candidates) -> Floats:
    """(c + c(component)) / (m s), in 1/byte. Source: DTR, section 3 and appendix, h_DTR^eq (union-find components).

    Known limitations: components are not split exactly when a cell comes back, so the estimate drifts upwards.
    """
    return (c.cost_seconds + c.component_seconds) / (_bytes(c) * _staleness(c))


def dtr_local(c: Candidates) -> Floats:
    """c / (m s), in 1/byte. Source: DTR, section 4, h_DTR^local.

    Known limitations: the cost of the evicted neighbourhood is left out, so chains of cheap ops are evicted whole.
    """
    return c.cost_seconds / (_bytes(c) * _staleness(c))


def delta(c: Candidates) -> Floats:
    """1 / (m s), in 1/(byte second). Source: DELTA (Tang et al., arXiv 2203.15980), Filter.

    Known limitations: blind to cost; a large convolution output goes before two cheap activations.
    """
    return 1.0 / (_bytes(c) * _staleness(c))


def msps(c: Candidates) -> Floats:
    """(c + chain) / m, in seconds per byte: the inverse of memory saving per second. Source: Capuchin (Peng et al.,
    ASPLOS 2020), MSPS.

    Known limitations: ignores time; the cell that is needed next can be the first victim.
    """
    return (c.cost_seconds + c.chain_seconds) / _bytes(c)


def lru(c: Candidates) -> Floats:
    """-s, in seconds: least recently used first. In training this is also "needed last first" (DTR's baseline)."""
    return -c.staleness_seconds


def largest(c: Candidates) -> Floats:
    """-m, in bytes: the fewest cells leave. DTR's and DELTA's "greedy" baseline.

    Known limitations: blind to cost and time.
    """
    return -c.size_bytes.astype(np.float64)


@runtime_checkable
class LinkFilter(Protocol):
    """A filter that wants to see the link: `rank` binds it first."""

    def __call__(self, c: Candidates, /) -> Floats: ...

    def bind(self, link: Link) -> Filter:
        """The same filter, knowing the link."""
        ...


@dataclass(frozen=True, slots=True)
class Price:
    """min(recompute, transfer) / (m s^a): DTR's score with the price of the cheaper of the two ways to restore the
    cell.

    On a slow link the price is `dtr`'s, on one that hides all transfers every byte costs the same and the stalest cell
    is evicted first. Ours; the numerator is DELTA's comparison as a price. Without a link (`bind`) it is DTR with the
    exponent.

    The exponent a = 1/4 says how much the time until use matters beside cost. DTR's 1 evicts old but expensive cells
    before young cheap ones. In training each saved cell is used about once more, so cost per byte adds up. Staleness
    breaks near-ties and keeps cells in use resident. On a toy pass a = 1 costs up to 2.3 % more.

    Attributes:
        link: the one that `bind` has set.
        staleness_exponent: a, in [0, 1].

    Known limitations: prices are those of an unsaturated link that keeps `Link.demand_bytes_per_second`; the director
    accounts for the queue, since that depends on earlier evictions.
    """

    link: Link | None = None
    staleness_exponent: float = 0.25

    def bind(self, link: Link) -> Filter:
        """The same filter with the prices of `link`."""
        return Price(link, self.staleness_exponent)

    def __call__(self, c: Candidates) -> Floats:
        size = _bytes(c)
        price = c.recompute_seconds
        if self.link is not None:
            price = np.minimum(price, np.where(c.can_offload, _transfer_price_seconds(c, self.link), np.inf))
        else:
            price = np.where(c.recomputable, price, c.cost_seconds + c.chain_seconds)
        per_byte = np.maximum(price / size, _FLOOR_SECONDS_PER_BYTE)
        return np.asarray(per_byte / _staleness(c) ** self.staleness_exponent, dtype=np.float64)


def _transfer_price_seconds(c: Candidates, link: Link) -> Floats:
    """float64 (n,): CPU for the copies, plus the part of the write beyond demand, plus the part of the read beyond the
    time until use.
    """
    size = _bytes(c)
    dirty = (~c.clean).astype(np.float64)
    write_lag = max(0.0, link.write_seconds_per_byte - 1.0 / link.demand_bytes_per_second)
    with np.errstate(invalid="ignore"):  # 0 * inf: a clean cell on a link that cannot write
        write = np.where(c.clean, 0.0, size * write_lag)
        until = np.nan_to_num(c.seconds_until_use, nan=0.0, posinf=np.inf) - link.seconds_until_reads
        late = link.latency_seconds + size * link.read_seconds_per_byte - np.maximum(until, 0.0)
        read = np.where(np.isnan(late), np.inf, np.maximum(late, 0.0))
    return np.asarray(size * link.cpu_seconds_per_byte * (1.0 + dirty) + write + read, dtype=np.float64)


price = Price()
"""The default of `auto`; see `Price`."""


def bound(score: Filter, link: Link) -> Filter:
    """`score` knowing `link`, if it cares; else itself."""
    return score.bind(link) if isinstance(score, LinkFilter) else score


FILTERS: MappingProxyType[str, Filter] = MappingProxyType(
    {
        "dtr": dtr,
        "dtr_eq": dtr_eq,
        "dtr_local": dtr_local,
        "delta": delta,
        "msps": msps,
        "lru": lru,
        "largest": largest,
        "price": price,
    }
)
