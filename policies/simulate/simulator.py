"""Runs any filter, director and prefetcher over a trace: the code that decides live, on a made-up device."""

from __future__ import annotations

from memmgr.policies.rules.registry import Policy
from memmgr.policies.trace import TierLink, Trace

from .base import Run, Simulation, finished
from .runtime import RuntimeSimulation


def simulate(trace: Trace, budget_bytes: int, policy: Policy, tier: TierLink | None = None) -> Run:
    """One pass under a policy.

    Args:
        trace: the pass; its forward time is what a live manager knows from the pass before.
        budget_bytes: most bytes resident.
        policy: as `parse_policy` returns it.
        tier: the tier below; None: recompute only.

    A measured pass says what autograd saves and asks for: of one the run is as the live manager makes it (runtime.py). Of an
    operator log everything is ranked when room is short, and made again depth first.

    Known limitations: no trust that has to be earned, one tier. A cell is a whole storage.
    """
    return finished((RuntimeSimulation if trace.saved else Simulation)(trace, budget_bytes, policy, tier))
