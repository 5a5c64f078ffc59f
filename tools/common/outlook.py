"""Effect of a budget on a traced step: the plan, evicted bytes by kind, and memory over the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from memmgr.policies.plan.planner import EFFORT, plan
from memmgr.policies.trace import OpKind, TierLink, Trace
from memmgr.policies.trace.blocks import plain, program_of, roles
from memmgr.policies.trace.plan import Plan
from memmgr.policies.trace.schedule import Do, Replay, Step

KINDS = ("parameter", "gradient", "optimizer state", "activation", "other")
"""`other`: tensors too small to be evicted, and workspaces of ops."""

_WORTH_HALVING = 0.02
_HALVINGS = 4


@dataclass(frozen=True)
class Outlook:
    """One step at one budget; the fields of --json."""

    device: str  # the one whose rates were taken
    budget_bytes: int  # most bytes resident
    fits: bool  # a plan was found
    overhead: float | None  # its time over the unmanaged step's; None: it does not fit
    seconds: float | None  # predicted time of a step, waits included
    lower_bound: float | None  # no schedule's overhead is smaller; None: not known
    unmanaged_seconds: float  # of the step without a budget
    unmanaged_peak_bytes: int  # without a budget
    least_bytes: int  # bytes that the largest op touches: no budget below it works
    held_bytes: dict[str, int] = field(default_factory=dict)  # by kind, bytes that live from step to step
    written_bytes: dict[str, int] = field(default_factory=dict)  # by kind, to the tier in a step
    read_bytes: dict[str, int] = field(default_factory=dict)  # by kind, back
    remade_bytes: dict[str, int] = field(default_factory=dict)  # by kind, dropped and made again
    remade_ops: int = 0  # ops that run again
    tier_bytes: int = 0  # most bytes in the tier at a time
    tier_room_bytes: int | None = None  # how many there may be; None: any number
    # the budget at which half of the overhead is left; None: not computed, the overhead is too small
    half_overhead_budget_bytes: int | None = None
    # where it does not fit, the smallest in steps of 5 % of the need that does; None: none is known
    fitting_budget_bytes: int | None = None


@dataclass(frozen=True)
class Level:
    """Memory at one moment."""

    seconds: float  # since the step began
    resident: tuple[int, ...]  # bytes by kind


def outlook(trace: Trace, budget_bytes: int, link: TierLink | None, *, effort: int = EFFORT) -> tuple[Outlook, Plan]:
    """Effect of a budget.

    `trace`: with times. `link`: the tier below; None: recompute only. `effort`: of the planner.
    """
    made = plan(trace, budget_bytes, link=link, effort=effort, solve=False)
    kind = kind_of(trace)
    moved: dict[Do, Counter[str]] = {do: Counter() for do in Do}
    for step in made.steps:
        targets = trace.ops[step.target].outputs if step.do is Do.RECOMPUTE else (step.target,)
        if step.do in (Do.OFFLOAD, Do.RELOAD, Do.RECOMPUTE):
            for s in targets:
                moved[step.do][kind[s]] += trace.storages[s].size_bytes
    held: Counter[str] = Counter()
    for _, start in trace.cycle:
        held[kind[start]] += trace.storages[start].size_bytes
    room = link.capacity_bytes if link is not None else None
    below = tier_bytes(trace, made)
    fits = made.feasible and (room is None or below <= room)
    return Outlook(
        device=trace.device,
        budget_bytes=budget_bytes,
        fits=fits,
        overhead=made.overhead if fits else None,
        seconds=made.seconds if fits else None,
        lower_bound=made.lower_bound if made.bound_seconds < float("inf") else None,
        unmanaged_seconds=trace.seconds,
        unmanaged_peak_bytes=trace.unmanaged_peak[0],
        least_bytes=least_bytes(trace),
        held_bytes=_shown(held),
        written_bytes=_shown(moved[Do.OFFLOAD]),
        read_bytes=_shown(moved[Do.RELOAD]),
        remade_bytes=_shown(moved[Do.RECOMPUTE]),
        remade_ops=sum(step.do is Do.RECOMPUTE for step in made.steps),
        tier_bytes=below,
        tier_room_bytes=room,
    ), made


def half_overhead(trace: Trace, of: Outlook, link: TierLink | None, *, effort: int = EFFORT) -> int | None:
    """The smallest budget, of some that are tried, at which at most half of the overhead is left.

    Returns bytes; None: the overhead is small, or there is none.
    """
    if of.overhead is None or of.overhead - 1 < _WORTH_HALVING:
        return None
    low, high = of.budget_bytes, of.unmanaged_peak_bytes
    for _ in range(_HALVINGS):
        middle = (low + high) // 2
        made = plan(trace, middle, link=link, effort=effort, solve=False)
        if made.feasible and made.overhead - 1 <= (of.overhead - 1) / 2:
            high = middle
        else:
            low = middle
    return high


def fitting(trace: Trace, of: Outlook, link: TierLink | None, *, effort: int = EFFORT) -> int:
    """The smallest budget in steps of 5 % of the need that fits, by bisection between a budget that does not fit and
    the whole need.

    `of`: a budget that does not fit.
    """
    peak = trace.unmanaged_peak[0]
    too_small = max(of.budget_bytes, of.least_bytes - 1)
    low, high = min(19, (20 * (too_small + 1) - 1) // peak), 20
    while high - low > 1:
        middle = (low + high) // 2
        fits = outlook(trace, peak * middle // 20, link, effort=effort)[0].fits
        low, high = (low, middle) if fits else (middle, high)
    return peak * high // 20


def kind_of(trace: Trace) -> list[str]:
    """The kind of each storage in the training."""
    program = program_of(trace, plain(trace))
    found = ["activation"] * len(trace.storages)
    of_blocks = roles(program)
    for block, kind in zip(program.blocks, of_blocks, strict=True):
        if block.held:  # all others are activations, also those that one of these becomes
            for _, s in block.versions:
                found[s] = kind.value
    for first, late in program.handed.items():  # the same thing, of the next step
        for _, s in program.blocks[late].versions:
            found[s] = of_blocks[first].value
    for s, storage in enumerate(trace.storages):
        if storage.name == "c.elsewhere" or storage.name.endswith(".scratch"):
            found[s] = "other"
    return found


def least_bytes(trace: Trace) -> int:
    """Bytes that the largest op touches, and those that can never be evicted."""
    size = [storage.size_bytes for storage in trace.storages]
    handed = trace.handed_bytes
    ops = (
        sum(size[s] for s in {*op.inputs, *op.outputs}) - handed[k]
        for k, op in enumerate(trace.ops)
        if op.kind != OpKind.CONSTANT
    )
    elsewhere = sum(storage.size_bytes for storage in trace.storages if storage.name == "c.elsewhere")
    return elsewhere + max(ops, default=0)


def tier_bytes(trace: Trace, made: Plan) -> int:
    """Most bytes that the tier holds: a copy stays until its storage changes or is released."""
    size = [storage.size_bytes for storage in trace.storages]
    there = {*made.away, *made.clean}
    level = most = sum(size[s] for s in there)

    def gone(storages: Iterator[int] | list[int]) -> None:
        nonlocal level
        for s in storages:
            if s in there:
                there.remove(s)
                level -= size[s]

    for step in made.steps:
        if step.do is Do.OFFLOAD and step.target not in there:
            there.add(step.target)
            level += size[step.target]
            most = max(most, level)
        elif step.do is Do.COMPUTE:
            gone(old for old, _ in trace.ops[step.target].writes)
            gone(list(trace.released_before[step.target + 1]))
    return most


def levels(trace: Trace, steps: tuple[Step, ...] | None = None, made: Plan | None = None) -> list[Level]:
    """Memory by kind after each op, by the rules of `Replay`: of a plan, or of the step without one.

    `trace`: with times. `steps`: the schedule; None: the program as it is.
    """
    kind = [KINDS.index(name) for name in kind_of(trace)]
    size = [storage.size_bytes for storage in trace.storages]
    link = trace.links[0] if trace.links else None
    rates = (link.write_bytes_per_second, link.read_bytes_per_second, link.latency_seconds) if link else (0.0, 0.0, 0.0)
    away, clean = (made.away, made.clean) if made is not None else ((), ())
    run = Replay(trace, 2**62, *rates, shared=bool(link and link.shared), away=away, clean=clean)
    found: list[Level] = []
    resident = [0] * len(KINDS)
    before: set[int] = set()
    for step in plain(trace) if steps is None else steps:
        run.step(step.do, step.target)
        touched = {step.target}
        if step.do in (Do.COMPUTE, Do.RECOMPUTE):
            op = trace.ops[step.target]
            touched = {*op.outputs, *op.inputs}
        for s in touched:
            if (s in run.resident) != (s in before):
                there = s in run.resident
                (before.add if there else before.discard)(s)
                resident[kind[s]] += size[s] if there else -size[s]
        if run.computed and trace.ops[run.computed - 1].kind != OpKind.CONSTANT:
            found.append(Level(run.now, tuple(resident)))
    return found


def _shown(sizes: Counter[str]) -> dict[str, int]:
    return {kind: sizes[kind] for kind in KINDS if sizes[kind]}
