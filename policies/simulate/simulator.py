"""Runs any filter, director and prefetcher over a trace, on a made-up device.

Room is made before an op runs. A storage that the program releases is freed. A reclaim takes the shortest prefix of
`rank` that is enough. An evicted storage is made again when an op reads it, and intermediates that the program does not
hold are freed again. An offloaded storage is read back, ahead of need if the prefetcher chooses it. The clock, the link
and the rules are `Replay`'s, the same that run a plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from memmgr.policies.rules.prefetchers import Upcoming
from memmgr.policies.rules.rank import rank
from memmgr.policies.rules.registry import Policy
from memmgr.policies.rules.types import NO_LINK, Action, Bools, Candidates, Floats, Ints, Link
from memmgr.policies.trace import OpKind, TierLink, Trace
from memmgr.policies.trace.columns import Problem
from memmgr.policies.trace.least_memory import least_bytes, room_bytes
from memmgr.policies.trace.schedule import Do, Replay, Step

from .neighbourhoods import Neighbourhoods

BACKWARD_RATIO = 2.0  # backward's time over forward's, op by op: about that for products and convolutions
_MOST = 20.0  # a run that takes so many times the unmanaged one is not running


class DoesNotFit(Exception):
    """The storages that must be resident at once exceed the budget."""


@dataclass(frozen=True)
class Run:
    """Result of a simulated pass."""

    policy: str
    budget_bytes: int  # most bytes that may be resident
    feasible: bool  # whether it came to its end within them
    steps: list[Step]  # the schedule, as far as it came
    peak_bytes: int  # most bytes resident
    seconds: float  # time of the pass; of the part that ran, if infeasible
    unmanaged_seconds: float  # time of the pass without a budget
    wait_seconds: float = 0.0  # of which compute waited for copies
    why: str = ""  # if infeasible
    away: tuple[int, ...] = ()  # of a cycle, the constants that are in the tier, and not resident, when the pass begins
    clean: tuple[int, ...] = ()  # of a cycle, the constants that are resident then and have a copy in the tier
    moved_bytes: int = 0  # of a cycle, bytes that a pass writes and reads
    least_bytes: int = 0  # the smallest budget that the policy can keep; 0: unknown

    @property
    def overhead(self) -> float:
        """Time over the unmanaged one's."""
        return self.seconds / self.unmanaged_seconds if self.unmanaged_seconds else 1.0


def simulate(trace: Trace, budget_bytes: int, policy: Policy, tier: TierLink | None = None) -> Run:
    """One pass under a policy.

    `trace`: the pass; its forward time is known to a live run from the pass before. `tier`: the tier below; None:
    recompute only.

    Known limitations: every op signature is trusted, and there is one tier. A cell is a whole storage. All candidates
    are ranked when room is short, which malloc does not do.
    """
    return finished(Simulation(trace, budget_bytes, policy, tier))


def finished(run: Simulation) -> Run:
    """Runs it to its end, or as far as it fits."""
    why = ""
    try:
        run.all()
    except DoesNotFit as error:
        why = str(error)
    clock = run.clock
    return Run(
        run.policy.name, run.budget, not why, run.steps, clock.peak, clock.now, run.trace.seconds, clock.waited, why
    )  # fmt: skip


class Simulation:
    """The state of a run. Subclasses add decisions that were made before it (`before`, `after`)."""

    def __init__(
        self, trace: Trace, budget_bytes: int, policy: Policy, tier: TierLink | None, *, most: float = _MOST
    ) -> None:
        """The state before the first op.

        `tier`: the tier below; None: recompute only. `most`: a run that takes so many times the unmanaged one does not
        fit.
        """
        self.trace, self.policy, self.tier, self.most = trace, policy, tier, most
        rates = (tier.write_bytes_per_second, tier.read_bytes_per_second, tier.latency_seconds) if tier else (0, 0, 0)
        self.clock = Replay(trace, budget_bytes, *rates, shared=tier is not None and tier.shared)
        self.budget = budget_bytes
        self.steps: list[Step] = []
        self.chains = Neighbourhoods(trace, self._gone)
        n = len(trace.storages)
        self.size = np.array([s.size_bytes for s in trace.storages], dtype=np.int64)
        self.cost = np.array([trace.ops[s.maker].seconds for s in trace.storages], dtype=np.float64)
        self.recomputable = np.array(
            [trace.ops[s.maker].kind == OpKind.COMPUTE for s in trace.storages], dtype=np.bool_
        )
        # Where the tier is the alternative, a storage is not dropped if its recomputation needs more room than there is
        # in addition to the floor.
        self.droppable = self.recomputable
        if tier is not None and tier.write_bytes_per_second > 0:
            spare = max(budget_bytes - least_bytes(Problem.of(trace)), 0)
            self.droppable = self.recomputable & (np.array(room_bytes(trace), dtype=np.int64) <= spare + self.size)
        self.resident = np.zeros(n, dtype=np.bool_)
        self.held = np.zeros(n, dtype=np.bool_)
        self.clean = np.zeros(n, dtype=np.bool_)
        self.accessed = np.zeros(n)
        self.made_at = np.zeros(n)  # on the program's own clock
        self.movable = np.array([s not in trace.constants for s in range(n)], dtype=np.bool_)
        self.pinned_until = np.array([s.pinned_until for s in trace.storages], dtype=np.int64)
        self.pins: Counter[int] = Counter()
        turn = len(trace.ops) if trace.backward_at is None else trace.backward_at
        self.forward_seconds = sum(op.seconds for op in trace.ops[:turn])
        self.program = 0.0  # the program's own clock: op costs, without ours
        self.backward_ops = 0

    def _gone(self, s: int) -> bool:
        return not self.resident[s] and not self.clean[s]

    # ---- hooks for decisions made ahead

    def before(self, k: int) -> None:
        """Op k is about to gather its inputs."""

    def after(self, k: int) -> None:
        """Op k has run for the first time."""

    # ---- the pass

    def all(self) -> None:
        """Runs it all. Raises `DoesNotFit`: see there."""
        trace = self.trace
        for k, op in enumerate(trace.ops):
            for s in trace.released_before[k]:
                self.release(s)
            self.before(k)
            self.gather(op.inputs, k)
            self.pins.update(op.inputs)
            self.run_op(k, Do.COMPUTE)
            self.pins -= Counter(op.inputs)
            self.program += op.seconds
            for s in op.outputs:
                self.held[s] = True
                self.made_at[s] = self.program
            self.chains.ran(k)
            self.after(k)
            self.prefetch(k)
        for s in trace.released_before[len(trace.ops)]:
            self.release(s)
        self.gather(trace.held_at_end, len(trace.ops))
        self.clock.end()

    def release(self, s: int) -> None:
        """Records that the program releases s."""
        self.held[s] = False
        if self.recomputable[s]:
            self.clean[s] = False
            if self.resident[s]:
                self.drop(s)
        for root in self.chains.release(s):  # a root stays while a recipe needs it (rule 5)
            self.clean[root] = False
            if self.resident[root] and not self.recomputable[root]:
                self.drop(root)

    def run_op(self, k: int, do: Do) -> None:
        """Makes room for the outputs of op k that are not resident, and runs it."""
        op = self.trace.ops[k]
        fresh = [s for s in op.outputs if not self.resident[s]]
        stay = Counter(s for s in op.outputs if self.resident[s])  # if one left now, the op would make it, too
        self.pins.update(stay)
        try:
            handed = self.trace.handed_bytes[k] if do is Do.COMPUTE else 0
            self.room(int(self.size[fresh].sum()) - handed)
        finally:
            self.pins -= stay
        self.step(do, k)
        for s in fresh:
            self.arrived(s)
            if do is Do.RECOMPUTE:
                self.chains.leave(s)
        for s in op.inputs:
            self.accessed[s] = self.clock.now
        if not self.trace.copy_on_write and do is Do.COMPUTE:
            for old, _ in op.writes:
                self.resident[old] = False
        if self.clock.now > self.most * self.trace.seconds:
            raise DoesNotFit(f"it takes more than {self.most:g} times as long")

    def step(self, do: Do, target: int) -> None:
        """Does it, and notes it."""
        self.clock.step(do, target)
        self.steps.append(Step(do, target))

    def arrived(self, s: int) -> None:
        """s is resident from now on."""
        self.resident[s] = True
        self.accessed[s] = self.clock.now
        self.chains.changed(s)

    def drop(self, s: int) -> None:
        """Frees s; a copy that is being written is waited for."""
        self.step(Do.FREE, s)
        self.resident[s] = False
        if not self.clean[s] and self.recomputable[s]:
            self.chains.join(s)
        self.chains.changed(s)

    def write(self, s: int) -> None:
        """Starts to write s to the tier."""
        self.step(Do.OFFLOAD, s)
        self.clean[s] = True

    def read(self, s: int) -> None:
        """Starts to read s back; its room is taken at once."""
        self.room(int(self.size[s]))
        self.step(Do.RELOAD, s)
        self.arrived(s)

    # ---- bringing back

    def gather(self, targets: Iterable[int], k: int) -> None:
        """Makes all of `targets` resident: depth first, the inputs of every op that waits pinned (rule 10)."""
        targets = tuple(targets)
        if self.resident[list(targets)].all():
            return
        made: list[int] = []
        stack: list[tuple[int, tuple[int, ...]]] = [(-1, targets)]
        self.pins.update(targets)
        try:
            while stack:
                op, inputs = stack[-1]
                missing = next((s for s in inputs if not self.resident[s]), None)
                if missing is None:
                    stack.pop()
                    if op >= 0:
                        self.run_op(op, Do.RECOMPUTE)
                        made += self.trace.ops[op].outputs
                    self.pins -= Counter(inputs)
                elif self.clean[missing]:
                    self.read(missing)
                else:
                    maker = int(self.trace.storages[missing].maker)
                    if not self.recomputable[missing]:
                        raise DoesNotFit(f"{self.trace.storages[missing].name} is gone and cannot be made again")
                    stack.append((maker, self.trace.ops[maker].inputs))
                    self.pins.update(self.trace.ops[maker].inputs)
        finally:
            for _, inputs in stack:
                self.pins -= Counter(inputs)
        for s in made:
            if self.resident[s] and not self.held[s]:
                self.drop(s)

    # ---- making room

    def room(self, need_bytes: int) -> None:
        """Evicts the storages that the policy ranks first until `need_bytes` fit.

        Raises `DoesNotFit`: evicting every candidate is not enough.
        """
        short = self.clock.used + need_bytes - self.budget
        if short <= 0:
            return
        index = np.flatnonzero(self.able())
        ranking = rank(self.candidates(index), self.policy.filter, self.policy.director, self.link(), short)
        for at, action in zip(ranking.order.tolist(), ranking.action.tolist(), strict=True):
            self.leave(int(index[at]), Action(action))
        if self.clock.used + need_bytes > self.budget:
            raise DoesNotFit(f"op {self.clock.computed}: {need_bytes} bytes do not fit, and nothing more can leave")

    def able(self) -> Bools:
        """The storages that may be evicted now."""
        able = self.resident & self.movable & (self.size > 0) & (self.pinned_until <= self.clock.computed)
        able[list(self.pins)] = False
        return able

    def leave(self, s: int, action: Action) -> None:
        """Evicts s, and writes it first if the action needs a copy."""
        if action == Action.OFFLOAD and not self.clean[s]:
            self.write(s)
        self.drop(s)

    def candidates(self, index: Ints) -> Candidates:
        """These storages as the policies see them."""
        chosen = index.tolist()
        can_write = self.tier is not None and self.tier.write_bytes_per_second > 0
        return Candidates(
            size_bytes=self.size[index],
            staleness_seconds=np.maximum(self.clock.now - self.accessed[index], 0.0),
            cost_seconds=self.cost[index],
            chain_seconds=np.array([self.chains.chain_seconds(s) for s in chosen], dtype=np.float64),
            component_seconds=np.array([self.chains.component_seconds(s) for s in chosen], dtype=np.float64),
            recomputable=self.droppable[index],
            clean=self.clean[index],
            offloadable=np.full(len(index), can_write, dtype=np.bool_),
            next_use=self.distance(index),
            seconds_until_use=self.until_use(index),
        )

    def distance(self, index: Ints) -> Ints:
        """How many others backward asks for before each of these."""
        later = np.cumsum((self.held & self.movable)[::-1])[::-1]
        return (later[index] - 1).astype(np.int64)

    def until_use(self, index: Ints) -> Floats:
        """Backward asks in reverse: the rest of forward, then backward's way back to where the storage was made."""
        back = BACKWARD_RATIO * (self.forward_seconds - self.made_at[index])
        return np.asarray(self.until_turn() + np.maximum(
            back - max(self.program - self.forward_seconds, 0.0), 0.0), dtype=np.float64)  # fmt: skip

    def until_turn(self) -> float:
        """Seconds of the program until backward begins."""
        return max(self.forward_seconds - self.program, 0.0)

    def link(self) -> Link:
        """The way to the tier as it is now."""
        tier = self.tier
        if tier is None:
            return NO_LINK
        clock = self.clock
        queued = [max(0.0, clock.free_at[do] - clock.now) * rate for do, rate in clock.rates.items()]
        away = np.flatnonzero(self.clean & ~self.resident & self.held)
        return Link(
            tier.write_bytes_per_second, tier.read_bytes_per_second, int(queued[0]), int(queued[1]), tier.latency_seconds,
            cpu_seconds_per_byte=tier.cpu_seconds_per_byte, seconds_until_reads=self.until_turn(),
            due_bytes=self.size[away], due_seconds=self.until_use(away),
        )  # fmt: skip

    # ---- ahead of need

    def prefetch(self, k: int) -> None:
        """After op k of backward, begins the reads that the prefetcher chooses, last made first."""
        if self.tier is None or self.program < self.forward_seconds:
            return
        self.backward_ops += 1
        away = np.flatnonzero(self.clean & ~self.resident & self.held)[::-1]
        if not len(away):
            return
        near = self.distance(away)
        upcoming = Upcoming(self.size[away], (near - near.min() if len(near) else near).astype(np.int64))
        pace = (self.program - self.forward_seconds) / self.backward_ops
        link = self.link()
        headroom = self.budget - self.clock.used - self._next_op_bytes(k)
        for i in self.policy.prefetcher(upcoming, link, headroom, pace, link.queued_read_bytes).tolist():
            s = int(away[i])
            if self.clock.used + int(self.size[s]) > self.budget:
                break
            self.step(Do.RELOAD, s)
            self.arrived(s)

    def _next_op_bytes(self, k: int) -> int:
        """Room that the ops at hand take: as large as the last one's."""
        return int(self.size[list(self.trace.ops[k].outputs)].sum())


__all__ = ["DoesNotFit", "Run", "Simulation", "finished", "simulate"]
