"""Completes the events of a schedule. Published systems choose which ops run again before which, and when each copy is
made. The frees follow from that: a storage stays from the event that makes or reads it to the last event that uses it
before it is made again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from memmgr.policies.simulate.simulator import Run
from memmgr.policies.trace import OpKind, TierLink, Trace
from memmgr.policies.trace.schedule import Do, Step, replay

UNLIMITED = 1 << 62


def completed(trace: Trace, events: Sequence[Step]) -> list[Step]:
    """The schedule of these events, with all its frees.

    A copy to the tier uses its storage, as an op does. A free among the events keeps the storage until there, for
    callers that wait for a copy no earlier. A recomputation or a read whose result no event uses is left out.
    """
    dead, useful = _deaths(trace, events)
    steps: list[Step] = []
    resident: set[int] = set()
    waiting: dict[int, list[int]] = defaultdict(list)  # no op reads them, but the program holds them so long
    spared: set[int] = set()  # of these, the ones that really wait
    copied: set[int] = set()
    computed = 0

    def free(s: int) -> None:
        storage = trace.storages[s]
        until = storage.released
        if s not in trace.constants and (s not in trace.made_once or s in copied):
            until = min(until, storage.pinned_until)
        if s not in resident:
            return
        if computed >= until:
            steps.append(Step(Do.FREE, s))
            resident.remove(s)
        else:
            waiting[until].append(s)
            spared.add(s)

    for event, gone, wanted in zip(events, dead, useful, strict=True):
        if event.do in (Do.COMPUTE, Do.RECOMPUTE):
            op = trace.ops[event.target]
            if wanted and (event.do is Do.COMPUTE or not resident.issuperset(op.outputs)):
                steps.append(event)
            if event.do is Do.COMPUTE:
                computed = event.target + 1
                if not trace.copy_on_write:
                    resident.difference_update(old for old, _ in op.writes)
            if wanted:
                resident.update(op.outputs)
                spared.difference_update(op.outputs)
        elif event.do is Do.RELOAD and wanted:
            spared.discard(event.target)
            if event.target not in resident:
                steps.append(event)
                resident.add(event.target)
        elif event.do is Do.OFFLOAD:
            steps.append(event)
            copied.add(event.target)
        for s in gone:
            free(s)
        if event.do is Do.COMPUTE:
            for s in waiting.pop(computed, ()):
                if s in spared:
                    spared.remove(s)
                    free(s)
    return steps


def _deaths(trace: Trace, events: Sequence[Step]) -> tuple[list[list[int]], list[bool]]:
    """Per event: the storages that no later event uses, and if the event itself is used."""
    dead: list[list[int]] = []
    useful: list[bool] = []
    wanted = set(trace.held_at_end)
    for event in reversed(events):
        s, gone, use = event.target, [], True
        if event.do in (Do.COMPUTE, Do.RECOMPUTE):
            op = trace.ops[s]
            use = event.do is Do.COMPUTE or not wanted.isdisjoint(op.outputs)
            if use:
                gone = [i for i in dict.fromkeys((*op.inputs, *op.outputs)) if i not in wanted]
                wanted.difference_update(op.outputs)
                wanted.update(op.inputs)
        elif event.do is Do.RELOAD:
            use = s in wanted
            wanted.discard(s)
        else:
            gone = [] if s in wanted else [s]
            wanted.add(s)
        dead.append(gone)
        useful.append(use)
    return dead[::-1], useful[::-1]


def judged(name: str, trace: Trace, budget_bytes: int, tier: TierLink | None, events: Sequence[Step]) -> Run:
    """Cost of the events by the rules, and if that fits."""
    steps = completed(trace, events)
    link = tier or TierLink("none", 0.0, 0.0)
    cost = replay(
        trace, steps, UNLIMITED, write_rate=link.write_bytes_per_second, read_rate=link.read_bytes_per_second,
        latency_seconds=link.latency_seconds, shared=link.shared,
    )  # fmt: skip
    if not cost.valid:
        return refused(name, trace, budget_bytes, cost.why)
    if cost.peak_bytes > budget_bytes:
        return refused(name, trace, budget_bytes, f"needs {cost.peak_bytes} bytes", cost.peak_bytes)
    return Run(name, budget_bytes, True, steps, cost.peak_bytes, cost.seconds, trace.seconds, cost.wait_seconds)


def refused(name: str, trace: Trace, budget_bytes: int, why: str, least_bytes: int = 0) -> Run:
    """It does not fit, or does not apply."""
    return Run(name, budget_bytes, False, [], 0, 0.0, trace.seconds, 0.0, why, least_bytes=least_bytes)


def fastest(runs: Iterable[Run]) -> Run:
    """The fastest that fits; where none does, the one that needs least."""
    return min(runs, key=lambda run: (not run.feasible, run.seconds if run.feasible else run.least_bytes or UNLIMITED))


def largest_that_fits(count: int, run: Callable[[int], Run]) -> Run:
    """The fastest way that fits, by bisection over `count` ways in ascending order of need; among equals the last.

    A model of memory differs from the rules, so the order may be slightly wrong. The neighbours of the way that is
    found are tried as well.
    """
    found = {0: run(0)}
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        found[middle] = run(middle)
        low, high = (middle, high) if found[middle].feasible else (low, middle)
    found |= {i: run(i) for i in range(low + 2, min(low + _BESIDE, count))}
    return fastest(found[i] for i in sorted(found, reverse=True))


_BESIDE = 5


def runs_of(ops: Iterable[int], *, again: bool) -> list[Step]:
    """These ops as events."""
    return [Step(Do.RECOMPUTE if again else Do.COMPUTE, k) for k in ops]


def can_run_again(trace: Trace) -> list[bool]:
    """Per op, whether it may run again once the program has gone on: its kind allows it, and nothing that it reads was
    overwritten for good."""
    written = {old for op in trace.ops for old, _ in op.writes} if not trace.copy_on_write else set()
    again: list[bool] = []
    for op in trace.ops:
        lost = (s for s in op.inputs if s in written and not again[trace.storages[s].maker])
        again.append(op.kind == OpKind.COMPUTE and next(lost, None) is None)
    return again
