"""Runs any filter, director and prefetcher, or a plan, over a trace: the code that decides live, on a made-up device."""

from __future__ import annotations

from .plan_saves import EFFORT, Made, budgets
from .planner import plan
from .registry import Policy
from .simulation import Run, Simulation, finished
from .simulator_followed import FollowedSimulation
from .simulator_live import LiveSimulation
from .simulator_remake import DoesNotFit
from .steady import steadied
from .trace import TierLink, Trace


def simulate(trace: Trace, budget_bytes: int, policy: Policy, tier: TierLink | None = None) -> Run:
    """One pass under a policy.

    Args:
        trace: the pass; its forward time is what a live manager knows from the pass before.
        budget_bytes: most bytes resident.
        policy: as `parse_policy` returns it.
        tier: the tier below; None: recompute only.

    A measured pass says what autograd saves and asks for: of one the run is as the live manager makes it (simulator_live.py). Of
    an operator log everything is ranked when room is short, and made again depth first.

    Known limitations: no trust that has to be earned, one tier. A cell is a whole storage.
    """
    return finished((LiveSimulation if trace.saved else Simulation)(trace, budget_bytes, policy, tier))


def follow(
    trace: Trace,
    budget_bytes: int,
    policy: Policy,
    tier: TierLink | None,
    made: Made | None = None,
    of: Trace | None = None,
) -> Run:
    """One measured pass that follows a plan as a live run does (simulator_followed.py).

    Args:
        trace: the pass.
        budget_bytes: most bytes resident.
        policy: what decides where the plan's decisions are not enough.
        tier: the tier below; None: recompute only.
        made: the plan. None: the one that a live run makes, of steady times and for a little less than the budget.
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
        even = steadied(trace)
        plans = (plan(even, most, link=tier, effort=EFFORT, solve=False) for most in budgets(budget_bytes))
        found = next((one for one in plans if one.feasible), None)
        if found is None:
            return Run(policy.name, budget_bytes, False, [], 0, 0.0, trace.seconds, why="no plan was found")
        made = Made.of(trace, found)
    return finished(FollowedSimulation(trace, budget_bytes, policy, tier, made, of))


__all__ = ["DoesNotFit", "Run", "Simulation", "finished", "follow", "simulate"]
