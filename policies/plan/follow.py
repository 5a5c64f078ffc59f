"""Simulates a pass that follows a plan, and makes the plan that a live run would make of it."""

from __future__ import annotations

from memmgr.policies.rules.registry import Policy
from memmgr.policies.simulate.base import Run, finished
from memmgr.policies.simulate.planned import PlannedSimulation
from memmgr.policies.trace import TierLink, Trace
from memmgr.policies.trace.live_terms import EFFORT, Made, budgets
from memmgr.policies.trace.smooth import smoothed

from .planner import plan


def follow(
    trace: Trace,
    budget_bytes: int,
    policy: Policy,
    tier: TierLink | None,
    made: Made | None = None,
    of: Trace | None = None,
) -> Run:
    """One measured pass that follows a plan as a live run does (simulate/planned.py).

    Args:
        trace: the pass.
        budget_bytes: most bytes resident.
        policy: what decides where the plan's decisions are not enough.
        tier: the tier below; None: recompute only.
        made: the plan. None: the one that a live run makes, of smoothed times and for a little less than the budget.
        of: the pass that `made` is a plan for, if it is another one that saves the same in the same order.

    Raises:
        ValueError: the trace is an operator log, which does not say what autograd saves; or `made` is for a pass that saves other
            sizes.

    Known limitations: those of `simulate`; reads begin as in the first pass that follows the plan, before feedback of late
    ones has moved any (Capuchin, section 4.4).
    """
    if not trace.saved:
        raise ValueError("only a measured pass can be followed: an operator log does not say what autograd saves")
    if made is None:
        even = smoothed(trace)
        plans = (plan(even, most, link=tier, effort=EFFORT, solve=False) for most in budgets(budget_bytes))
        found = next((one for one in plans if one.feasible), None)
        if found is None:
            return Run(policy.name, budget_bytes, False, [], 0, 0.0, trace.seconds, why="no plan was found")
        made = Made.of(trace, found)
    return finished(PlannedSimulation(trace, budget_bytes, policy, tier, made, of))
