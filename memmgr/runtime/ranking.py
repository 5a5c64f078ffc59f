"""Policies that malloc does not have built in rank the candidates ahead of need, on a thread of their own.

Malloc never takes the GIL (rule 11): it takes victims from the last order. While it uses up the first half of that, the
next one is made. Where there is none yet, malloc's own order decides, which is DTR's.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from memmgr.common.constants import Order, Way
from memmgr.common.threads import join
from memmgr.policies import NO_LINK, Action, Candidates, Link, Policy, rank
from memmgr.policies.rules.directors import DIRECTORS
from memmgr.policies.rules.filters import FILTERS

if TYPE_CHECKING:
    from memmgr.native._pager import Pager

BUILT_IN = {
    "dtr": Order.DTR,
    "dtr_eq": Order.DTR,  # the neighbourhood is the chain, looked at up to 48 ops deep
    "price": Order.DTR,
    "lru": Order.LRU,
    "largest": Order.LARGEST,
    "delta": Order.DELTA,
}
"""By filter: the order that malloc has for it, with the same scores (`allocator/pager/residency/score.h`)."""
_WAYS = {int(Action.EVICT): Way.EVICT, int(Action.OFFLOAD): Way.OFFLOAD}


def order_of(policy: Policy) -> Order:
    """Malloc's own order for this policy; `Order.RANKED`: it has none."""
    name = next((name for name, function in FILTERS.items() if function is policy.filter), "")
    ours = policy.director in (DIRECTORS["auto"], DIRECTORS["evict"], DIRECTORS["offload"])
    # Where a planner decides how each leaves, the net beneath it takes the cheaper way; where nothing may leave, none is asked.
    plain = ours or policy.planner or policy.torture or not (policy.recomputes or policy.offloads)
    return BUILT_IN.get(name, Order.RANKED) if plain else Order.RANKED


class Ranker:
    """The thread of one budget whose policy is not built in."""

    def __init__(self, pager: Pager, policy: Policy, *, offload: bool) -> None:
        self._pager = pager
        self._policy = policy
        self._offload = offload
        self._stop = False
        self._thread: threading.Thread | None = None
        self.rankings = 0
        self.error = ""

    def start(self) -> None:
        """From here on it ranks."""
        self._pager.sleeps_in(self._loop)
        self._thread = threading.Thread(target=self._loop, name="memmgr-rank", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits for the thread."""
        self._stop = True
        if self._thread is not None:
            self._pager.end_wait_for_pressure()
            join(self._thread)

    def complaints(self) -> list[str]:
        """Errors of the policy, to report when the budget ends."""
        failed = f"the policy {self._policy.name!r} failed ({self.error}): malloc's own order decided from there on"
        return [failed] if self.error else []

    def _loop(self) -> None:
        try:
            while True:
                self._pager.wait_for_pressure()
                if self._stop:
                    return
                self._rank()
        except Exception as error:  # a policy that fails costs its order, not the run
            self.error = f"{type(error).__name__}: {error}"

    def _rank(self) -> None:
        columns = self._pager.candidates()
        size = np.frombuffer(columns["sizes"], dtype=np.int64)
        if not len(size):
            return
        candidates = Candidates.build(
            size,
            staleness_seconds=np.frombuffer(columns["stale_seconds"]),
            cost_seconds=np.frombuffer(columns["cost_seconds"]),
            chain_seconds=np.frombuffer(columns["chain_seconds"]),
            recomputable=np.frombuffer(columns["recomputable"], dtype=np.bool_),
            clean=np.frombuffer(columns["clean"], dtype=np.bool_),
            offloadable=np.frombuffer(columns["offloadable"], dtype=np.bool_),
            next_use=np.arange(len(size)),  # backward reads the tensor touched last first
        )
        ranking = rank(candidates, self._policy.filter, self._policy.director, self._link())
        self.rankings += 1
        chosen = np.frombuffer(columns["serials"], dtype=np.int64)[ranking.order]
        ways = np.array([_WAYS.get(action, Way.CHEAPER) for action in ranking.action.tolist()], dtype=np.uint8)
        self._pager.set_ranking(chosen.tobytes(), ways.tobytes())

    def _link(self) -> Link:
        if not self._offload:
            return NO_LINK
        link = self._pager.link()
        return Link(1 / link["write_seconds_per_byte"], 1 / link["read_seconds_per_byte"])
