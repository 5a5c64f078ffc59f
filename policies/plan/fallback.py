"""The planner's last resort when it finds no schedule of its own: the best schedule of the online policies, as the
simulator runs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from memmgr.policies.online.policy import run_online
from memmgr.policies.rules.registry import parse_policy
from memmgr.policies.simulate.simulator import Simulation, finished
from memmgr.policies.trace import TierLink, Trace
from memmgr.policies.trace.schedule import Cost, Do, Step, replay

_POLICIES = ("dtr_eq", "dtr")
"""Beside online/policy.py, without a link."""

_POLICIES_WITH_LINK = ("auto", "offload")

_MOST_SECONDS = 4.0
"""A schedule that takes so many times the pass is not waited for."""


def best_online(
    trace: Trace, budget_bytes: int, link: TierLink | None, *, recompute: bool
) -> tuple[tuple[Step, ...], Cost] | None:
    """The fastest schedule of an online policy and its cost by the rules; None if none of them fits.

    Args:
        trace: the pass.
        budget_bytes: most bytes resident.
        link: the tier that may be used.
        recompute: whether ops may run again.
    """
    rates = (link.write_bytes_per_second, link.read_bytes_per_second, link.latency_seconds) if link else (0.0, 0.0, 0.0)
    best: tuple[tuple[Step, ...], Cost] | None = None
    for steps in _schedules(trace, budget_bytes, link, recompute):
        cost = replay(
            trace, steps, budget_bytes, write_rate=rates[0], read_rate=rates[1], latency_seconds=rates[2],
            shared=link is not None and link.shared,
        )  # fmt: skip
        allowed = cost.valid and (recompute or not cost.recomputes) and _finds_room(trace, steps, link)
        if allowed and (best is None or cost.seconds < best[1].seconds):
            best = tuple(steps), cost
    return best


def _finds_room(trace: Trace, steps: Iterable[Step], link: TierLink | None) -> bool:
    """Tells if the tier holds all bytes that the schedule writes. The simulator takes the tier to be as large as
    needed.
    """
    written = {step.target for step in steps if step.do is Do.OFFLOAD}
    if link is None or link.capacity_bytes is None:
        return True
    return sum(trace.storages[s].size_bytes for s in written) <= link.capacity_bytes


def _schedules(trace: Trace, budget_bytes: int, link: TierLink | None, recompute: bool) -> Iterator[Sequence[Step]]:
    if recompute and trace.copy_on_write:  # the online policy knows no block that is handed on
        fits, machine = run_online(trace, budget_bytes, most_again=_MOST_SECONDS - 1.0)
        if fits:
            yield machine.steps
    names: Iterable[tuple[str, TierLink | None]] = [(name, None) for name in _POLICIES] if recompute else []
    if link is not None:
        names = [*names, *((name, link) for name in (_POLICIES_WITH_LINK if recompute else ("offload",)))]
    for name, tier in names:
        run = finished(Simulation(trace, budget_bytes, parse_policy(name), tier, most=_MOST_SECONDS))
        if run.feasible:
            yield run.steps
