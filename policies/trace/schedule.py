"""A schedule of a pass, step by step: the common language of planner, simulator and judge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from .trace import OpKind, Trace


class Do(Enum):
    """The action of a step. Values are the judge's words where it has one."""

    COMPUTE = "compute"  # target: op, for the first time
    RECOMPUTE = "recompute"  # target: op, again: makes those of its storages that are not resident
    FREE = "free"  # target: storage; if a write of it is under way, waits for its end
    OFFLOAD = "offload"  # target: storage; starts its copy to the tier after the earlier transfers of the link
    RELOAD = "reload"  # target: storage; its room is taken now, the read starts when the link is free; its users wait


@dataclass(frozen=True, slots=True)
class Step:
    """One step; see `Do`."""

    do: Do
    target: int


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a schedule."""

    valid: bool  # no rule is broken
    why: str = ""  # the rule that is broken; empty if valid
    peak_bytes: int = 0  # most bytes resident at any step
    seconds: float = 0.0  # time of all ops that ran, and waits
    wait_seconds: float = 0.0  # of which compute waited for a copy
    recomputes: int = 0  # ops that ran again


class Broken(ValueError):
    """A step that the rules forbid."""


def replay(
    trace: Trace, steps: Iterable[Step], budget_bytes: int, *, write_rate: float = 0.0, read_rate: float = 0.0,
    latency_seconds: float = 0.0, shared: bool = False, away: Iterable[int] = (), clean: Iterable[int] = (),
) -> Cost:  # fmt: skip
    """Runs a schedule by the rules of trace.py and returns its cost.

    `steps`: the schedule; any object with a `do` whose value is a word of `Do`, and a `target`. `write_rate`: bytes per
    second to the tier; 0: nothing can be written. `read_rate`: bytes per second from the tier. `latency_seconds`: of
    each copy. `shared`: the two directions take turns. `away`: of a cycle, the constants that are in the tier, and not
    resident, when the pass begins; at its end their successors are in the tier again. `clean`: of a cycle, the
    constants that are resident then and have a copy in the tier.

    A cycle's cost is that of the second of two passes, which begins with the unfinished copies of the first.

    Known limitations: a tier is as large as needed.
    """
    steps = list(steps)
    run = Replay(trace, budget_bytes, write_rate, read_rate, latency_seconds, shared=shared, away=away, clean=clean)
    try:
        _play(run, steps)
        if trace.cycle:  # transfers that the link has not ended by the end of a pass take their time in the next
            run = run.next_pass()
            _play(run, steps)
    except Broken as broken:
        return Cost(False, str(broken))
    return Cost(True, "", run.peak, run.now, run.waited, run.recomputes)


def _play(run: Replay, steps: Iterable[Step]) -> None:
    for number, step in enumerate(steps, 1):
        try:
            run.step(Do(step.do.value), step.target)
        except Broken as broken:
            raise Broken(f"step {number}: {broken}") from None
    run.end()


class Replay:
    """Bytes, clock and link of a schedule that is being run."""

    def __init__(
        self, trace: Trace, budget: int, write_rate: float, read_rate: float, latency: float, *, shared: bool = False,
        away: Iterable[int] = (), clean: Iterable[int] = (),
    ) -> None:  # fmt: skip
        self.trace, self.budget = trace, budget
        self.rates = {Do.OFFLOAD: write_rate, Do.RELOAD: read_rate}
        self.latency = latency
        self.free_at = {Do.OFFLOAD: 0.0, Do.RELOAD: 0.0}  # when each direction has ended its queued transfers
        self.resident: set[int] = set()
        # Constants with a copy in the tier; those of `away` begin without bytes.
        self.away, self.clean = frozenset(away), frozenset(clean)
        self.copied_at: dict[int, float] = dict.fromkeys(self.away | self.clean, 0.0)  # when a copy is whole
        self.ready_at: dict[int, float] = {}  # storages that are being read
        self.used = self.peak = self.computed = self.recomputes = 0
        self.now = self.waited = 0.0
        self.shared = shared

    def next_pass(self) -> Replay:
        """The state before the next pass of a cycle, with the transfers that the link has not ended in this one."""
        rates = self.rates[Do.OFFLOAD], self.rates[Do.RELOAD]
        begins = self.away | self.clean
        run = Replay(
            self.trace, self.budget, *rates, self.latency, shared=self.shared, away=self.away, clean=self.clean
        )
        run.free_at = {do: max(at - self.now, 0.0) for do, at in self.free_at.items()}
        for end, begin in self.trace.cycle:
            if begin in begins:
                run.copied_at[begin] = max(self.copied_at.get(end, 0.0) - self.now, 0.0)
        return run

    def _wait(self, until: float) -> None:
        if until > self.now:
            self.waited += until - self.now
            self.now = until

    def _take(self, storages: Sequence[int], who: str) -> None:
        self.resident.update(storages)
        self.used += sum(self.trace.storages[s].size_bytes for s in storages)
        self.peak = max(self.peak, self.used)
        if self.used > self.budget:
            raise Broken(f"{who}: {self.used} bytes resident, over the budget of {self.budget}")

    def step(self, do: Do, target: int) -> None:
        if do in (Do.COMPUTE, Do.RECOMPUTE):
            self._run(target, again=do is Do.RECOMPUTE)
        elif do is Do.FREE:
            self._free(target)
        else:
            self._copy(do, target)

    def _run(self, k: int, again: bool) -> None:
        op = self.trace.ops[k] if 0 <= k < len(self.trace.ops) else None
        if op is None or (not again and k != self.computed) or (again and k >= self.computed):
            raise Broken(f"op {k} {'again' if again else 'for the first time'} after {self.computed} ops")
        if again and op.kind in (OpKind.CONSTANT, OpKind.ONCE):
            raise Broken(f"op {k} ({op.name}) cannot run again")
        missing = [self.trace.storages[s].name for s in op.inputs if s not in self.resident]
        if missing:
            raise Broken(f"op {k} runs without its inputs {missing[:3]}")
        for s in op.inputs:
            self._wait(self.ready_at.get(s, 0.0))
        if not self.trace.copy_on_write and not again:
            for old, _ in op.writes:  # the new version takes the old one's block
                self._leave(old)
        made = [s for s in op.outputs if s not in self.resident]
        self._take([s for s in made if s not in self.away] if op.kind == OpKind.CONSTANT else made, f"op {k}")
        if again:
            self.recomputes += 1
        else:
            self.computed += 1
        if not (again and op.kind == OpKind.VIEW):
            self.now += op.seconds

    def _free(self, s: int) -> None:
        name = self.trace.storages[s].name
        if s not in self.resident:
            raise Broken(f"{name} freed while not resident")
        held = self.computed < self.trace.storages[s].released
        if s in self.trace.constants and held and s not in self.copied_at:
            raise Broken(f"constant {name} freed while held")
        if s in self.trace.made_once and held and s not in self.copied_at:
            raise Broken(f"{name} freed while held, though nothing makes it again")
        if held and self.computed < self.trace.storages[s].pinned_until:
            raise Broken(f"{name} freed while the program itself holds it")
        self._leave(s)

    def _leave(self, s: int) -> None:
        self._wait(self.copied_at.get(s, 0.0))
        self.resident.remove(s)
        self.ready_at.pop(s, None)
        self.used -= self.trace.storages[s].size_bytes

    def _copy(self, do: Do, s: int) -> None:
        storage = self.trace.storages[s]
        if self.rates[do] <= 0:
            raise Broken(f"{do.value} of {storage.name}: the link carries nothing that way")
        start = max(self.now, self.free_at[do])
        if do is Do.OFFLOAD:
            if s not in self.resident:
                raise Broken(f"{storage.name} offloaded while not resident")
            start = max(start, self.ready_at.get(s, 0.0))
        else:
            if s in self.resident or s not in self.copied_at:
                raise Broken(f"{storage.name} reloaded, but it is {'resident' if s in self.resident else 'not below'}")
            start = max(start, self.copied_at[s])
            self._take([s], f"reload of {storage.name}")
        done = start + self.latency + storage.size_bytes / self.rates[do]
        for direction in self.free_at if self.shared else (do,):
            self.free_at[direction] = done
        (self.copied_at if do is Do.OFFLOAD else self.ready_at)[s] = done

    def end(self) -> None:
        if self.computed < len(self.trace.ops):
            raise Broken(f"only {self.computed} of {len(self.trace.ops)} ops computed")
        begins = dict(self.trace.cycle)
        below = {s for s in self.trace.held_at_end if begins.get(s) in self.away and s in self.copied_at}
        lost = [self.trace.storages[s].name for s in self.trace.held_at_end if s not in self.resident | below]
        if lost:
            raise Broken(f"{len(lost)} storages held at the end are gone, {lost[:3]}")
        for s in self.trace.held_at_end:
            self._wait(self.ready_at.get(s, 0.0))


def judge_records(trace: Trace, steps: Iterable[Step]) -> Iterator[dict[str, object]]:
    """The schedule as the judge reads it, one JSON object a line.

    Raises `ValueError`: a step that the judge does not know (offload, reload).
    """
    for step in steps:
        do = Do(step.do.value)
        if do is Do.FREE:
            yield {"do": "free", "storage": trace.storages[step.target].name}
        elif do in (Do.COMPUTE, Do.RECOMPUTE):
            yield {"do": do.value, "op": step.target}
        else:
            raise ValueError(f"the judge knows no {do.value}")
