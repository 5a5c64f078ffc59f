"""ZeRO-Offload, ZeRO-Infinity and L2L, as published: streamed tensors are read for their use and evicted after it,
whether memory is short or not.

- `zero_offload` (Ren et al., USENIX ATC 2021, section 3, *unique optimal offload strategy*; section 5, *CPU
  optimizer*): the optimizer's states live in the tier; parameters, gradients and activations are never evicted. The
  step runs tile by tile, and the next tile is read while one is computed (double buffering): here a tile is the set of
  states that one op of the step touches.
- `zero_infinity` (Rajbhandari et al., SC 2021, sections 5.1 and 6.2): parameters, gradients and optimizer states live
  in the tier. A prefetcher knows the operators' sequence from the iteration before, and reads the tensors of the next
  three of them (*overlap centric design*: i + 3, i + 2 and i + 1, a hop each). Activations are evicted where room is
  short.
- `l2l` (Pudipeddi et al., arXiv 2002.05645): one layer is resident at a time, and its gradients are evicted when it
  ends. The next layer is read during it if there is room (the parallel variant, L2L-p). Activations are evicted where
  room is short.

A tensor that was changed since its copy was made is written when it is evicted; all others still have a valid copy.
Gradients are written after their step, too, as long as the script holds them (these systems own theirs, and know that
no op reads them); the plan does the same.

*Known limitations*: all three update parameters on the CPU, and ZeRO-Offload's gradients go there for it. Here the step
runs on the device on tensors that are read for it, and the bits are those of the script. Half precision beside fp32
masters, several devices and one more hop from the disk are left out. L2L changes the order of a program (all
micro-batches through a layer, its update at once) and runs a layer's forward again in backward; here the order and the
recomputation are the program's own. A trace has no layers: they are read off the order of the parameters (`layers`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memmgr.policies.simulate.cycle import ABSENT, RESIDENT, Cycle, Full, run_cycle
from memmgr.policies.simulate.simulator import Run
from memmgr.policies.trace import TierLink, Trace
from memmgr.policies.trace.blocks import Program, Role, roles, step_end

OPERATORS_AHEAD = 3
"""ZeRO-Infinity's prefetcher."""


@dataclass(frozen=True)
class Visit:
    """Events during which streamed tensors stay together.

    `wanted`: blocks that stay resident all the time, in addition to those that each event touches.
    """

    first: int
    last: int
    wanted: frozenset[int] = frozenset()


def zero_offload(trace: Trace, budget_bytes: int, tier: TierLink | None = None) -> Run:
    """Optimizer states below, parameters and gradients stay."""

    def make(p: Program, link: TierLink) -> Streamed:
        states = _of(p, Role.STATE)
        return Streamed(p, budget_bytes, link, operators(p, states), states, set(), 1)

    return run_cycle("zero_offload", trace, budget_bytes, tier, make)


def zero_infinity(trace: Trace, budget_bytes: int, tier: TierLink | None = None) -> Run:
    """All model states below, read ahead in the traced order."""

    def make(p: Program, link: TierLink) -> Streamed:
        states = _of(p, Role.STATE, Role.PARAMETER, Role.GRADIENT)
        visits = operators(p, states)
        return Streamed(p, budget_bytes, link, visits, states, _of(p, Role.ACTIVATION), OPERATORS_AHEAD)

    return run_cycle("zero_infinity", trace, budget_bytes, tier, make)


def l2l(trace: Trace, budget_bytes: int, tier: TierLink | None = None) -> Run:
    """One layer resident, and the next one on its way."""

    def make(p: Program, link: TierLink) -> Streamed:
        states = _of(p, Role.STATE, Role.PARAMETER, Role.GRADIENT)
        visits = relay(p, layers(trace, p), states)
        return Streamed(p, budget_bytes, link, visits, states, _of(p, Role.ACTIVATION), 1)

    return run_cycle("l2l", trace, budget_bytes, tier, make)


def _of(p: Program, *which: Role) -> set[int]:
    return {k for k, kind in enumerate(roles(p)) if kind in which and not p.blocks[k].stays}


def operators(p: Program, streams: set[int]) -> list[Visit]:
    """Each op that touches a streamed block, by itself."""
    return [Visit(event, event) for event, touched in enumerate(p.touched) if not streams.isdisjoint(touched)]


def relay(p: Program, layer: dict[int, int], streams: set[int]) -> list[Visit]:
    """The layers in turn, and the step's ops each by itself; where only gradients are made the layer before goes on."""
    end = step_end(p)
    found: list[Visit] = []
    now: int | None = None
    for event, touched in enumerate(p.touched):
        if streams.isdisjoint(touched):
            continue
        met = next((layer[k] for k in touched if k in layer), None) if event > end else None
        if found and found[-1].last > end and met in (None, now):
            found[-1] = replace(found[-1], last=event)
            continue
        now = met
        found.append(Visit(event, event, frozenset(k for k, number in layer.items() if number == now)))
    return found


def layers(trace: Trace, p: Program) -> dict[int, int]:
    """The layer of each parameter.

    Models repeat their layers, so the longest repetition in the order of first use (size, and the op that uses it) is
    taken as the layers. Parameters before and after it are layers by themselves.
    """
    end, which = step_end(p), roles(p)
    order: dict[int, tuple[int, str]] = {}
    for event in range(end + 1, len(p.steps)):
        for k in p.touched[event]:
            if which[k] is Role.PARAMETER and not p.blocks[k].stays:
                order.setdefault(k, (p.blocks[k].size, trace.ops[p.steps[event].target].name))
    looks = list(order.values())
    first, unit, most = 0, 1, 0
    for u in range(1, len(looks) // 2 + 1):
        run = 0
        for i in range(len(looks) - u):
            run = run + 1 if looks[i] == looks[i + u] else 0
            if run // u * u + u > most and run >= u:
                first, unit, most = i - run + 1, u, run // u * u + u
    inside = range(first, first + most)
    return {k: i if i not in inside else first + (i - first) // unit * unit for i, k in enumerate(order)}


class Streamed(Cycle):
    """Streamed blocks are read ahead for the next visits, in the order of use, and evicted once none of these touches
    them.
    """

    def __init__(
        self, p: Program, budget_bytes: int, link: TierLink, visits: Sequence[Visit], streams: set[int], spills: set[int],
        ahead: int,
    ) -> None:  # fmt: skip
        """Before the first pass.

        `visits`: in the order of the program. `streams`: blocks that come and go. `spills`: blocks that go where room
        is short, and only there. `ahead`: how many visits ahead is read.
        """
        super().__init__(p, budget_bytes, link)
        self.visits, self.streams = visits, streams
        self.loose = streams | spills
        self.wanted = [list(touched) for touched in p.touched]
        for visit in visits:
            for event in range(visit.first, visit.last + 1):
                self.wanted[event] += sorted(visit.wanted.difference(p.touched[event]))
        self.pinned = [set(here) for here in self.wanted]
        self.ends = {visit.last for visit in visits}
        self.horizon = [self._end_of(event, ahead) for event in range(self.n)]
        self.going: list[int] = []  # written, or being written; room that is not needed yet

    def _end_of(self, event: int, ahead: int) -> int:
        """The end of the visit that is so many after the one at hand."""
        if not self.visits:
            return event
        turns, at = divmod(bisect_right([v.first for v in self.visits], event) - 1 + ahead, len(self.visits))
        return turns * self.n + self.visits[at].last

    def make_room(self, size: int, event: int) -> None:
        while self.used + size > self.budget:
            pinned = self.pinned[event]
            k = next((k for k in self.going if k not in pinned), None)
            if k is None:
                rest = (k for k in self.loose if self.state[k] == RESIDENT and k not in pinned)
                k = max(rest, key=lambda k: (self.next[k], k), default=None)
            if k is None:
                raise Full
            if self.dirty[k]:
                self.write(k, event)
            self.now = max(self.now, self.done_at[k])
            self.leave(k, event)

    def leave(self, k: int, event: int) -> None:
        super().leave(k, event)
        if k in self.going:
            self.going.remove(k)

    def ahead(self, event: int, until: float) -> None:
        self._gone(event)
        for at in range(event + 1, self.horizon[event] + 1):
            for k in self.wanted[at % self.n]:
                if self.state[k] == ABSENT:
                    if self.used + self.p.blocks[k].size + self.growth(event, at) > self.budget:
                        return
                    self.read(k, self.now, event)

    def after(self, event: int) -> None:
        self.going = [k for k in self.going if self.state[k] == RESIDENT]
        if event in self.ends:
            for k in sorted(self.streams, key=self.next.__getitem__):
                if self.state[k] == RESIDENT and k not in self.going and not self._near(k, event):
                    if self.dirty[k]:
                        self.write(k, event + 1)
                    self.going.append(k)
        self.going = [k for k in self.going if not self._near(k, event)]
        self._gone(event + 1)

    def _near(self, k: int, event: int) -> bool:
        return self.next[k] <= self.base + self.horizon[event]

    def _gone(self, event: int) -> None:
        """Evicts the blocks whose writes have ended."""
        for k in [k for k in self.going if self.done_at[k] <= self.now]:
            self.leave(k, event)
