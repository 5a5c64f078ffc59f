"""How long a step takes at least under a budget, with a link to a tier: a linear program over time.

    python tools/bench/studies/link_bound.py pass.trace.gz --budget 5.67GB --budget 4.3GB

The trace is of a pass in which the link was measured (`memmgr trace`, or `"trace"` of a run of tools/gpu/train.py). The
printed bound holds for every schedule, of memmgr and of any other system, that runs these ops in their order.

The program. Between two touches of a storage lies a *gap*. Of the storage's bytes a fraction is made again at the gap's end,
which takes at least its op's time; another one is written in the gap and read back in it. A storage that is not touched any
more needs no memory. The pass is cut into stretches of equal time. In the fullest op of each stretch the op's own storages,
and the fractions of the gaps around it that are resident, have to fit. The bytes that are written (read) in a stretch take
at most the stretch's time on the link, and each stretch may last longer than its ops: the sum of these delays is minimised.
The time of ops that run again counts as delay. Storages that live from pass to pass (`Trace.cycle`) have a gap over the end
of the pass.

Source: the relaxation of `policies/plan/bound.py`, with the link's time; not from a paper.

*Known limitations*: a relaxation, so it may lie below every schedule: an op that runs again finds its inputs in memory,
bytes may be written as soon as the stretch begins in which they are made, copies have no latency, blocks have no addresses.
Storages below 64 KiB and tensors that change their size count nothing.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from memmgr.config.sizes import parse_size, show_size
from memmgr.policies.plan.bound import Rows, Unsolved
from memmgr.policies.trace import HELD, OpKind, TierLink, Trace
from memmgr.telemetry.trace_file import read_trace

SMALL = 1 << 16
STRETCHES = 96


@dataclass
class Gap:
    """The ops between two touches of a storage.

    Attributes:
        storage: its number.
        after, before: the ops that touch it; -1 and the number of ops: the pass's own ends.
        seconds: its op's, to run again; None: it may not.
        written, read: variables by stretch, in fractions of the storage.
        again, clean: variables: the fraction that is made again, and the one that leaves without a write.
    """

    storage: int
    after: int
    before: int
    seconds: float | None = None
    written: dict[int, int] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)
    again: int | None = None
    clean: int | None = None


@dataclass
class Dead:
    """A storage that is not touched any more, and that an op which runs again needs.

    Attributes:
        kept, again: variables: the fraction that stays in memory until then, and the one that is made again.
        until: the first op before which it may be needed.
    """

    kept: int
    again: int | None
    until: int


def gaps_of(trace: Trace) -> Iterator[Gap]:
    """All gaps, in the order of the storages."""
    n = len(trace.ops)
    touches: dict[int, list[int]] = defaultdict(list)
    for k, op in enumerate(trace.ops):
        if op.kind != OpKind.CONSTANT:
            for s in {*op.inputs, *op.outputs}:
                touches[s].append(k)
    to_next = dict(trace.cycle)
    for s, storage in enumerate(trace.storages):
        if storage.size_bytes < SMALL or not touches[s]:
            continue
        maker = trace.ops[storage.maker]
        seconds = maker.seconds if maker.kind == OpKind.COMPUTE else None
        if maker.kind == OpKind.CONSTANT:
            yield Gap(s, -1, touches[s][0])
        for a, b in zip(touches[s], touches[s][1:], strict=False):
            yield Gap(s, a, b, seconds)
        if s in to_next and storage.released == HELD:
            yield Gap(s, touches[s][-1], n)


class Program:
    """The linear program of one trace and one budget.

    Args:
        trace: with times, and no copies of written arguments.
        link: the way to the tier.
        budget_bytes: most bytes resident.
    """

    def __init__(self, trace: Trace, link: TierLink, budget_bytes: int) -> None:
        self.trace, self.link, self.budget_bytes = trace, link, budget_bytes
        self.rows = Rows()
        self.ends = self._stretches()
        self.delays = [self.rows.variable(1.0, 0.0, float("inf")) for _ in self.ends]
        self.gaps = [gap for gap in gaps_of(trace) if gap.before > gap.after + 1]
        self.fullest = self._fullest()
        self.last_touch = [-1] * len(trace.storages)
        for k, op in enumerate(trace.ops):
            for s in (*op.inputs, *op.outputs):
                self.last_touch[s] = k
        self.dead: dict[int, Dead] = {}

    def _stretches(self) -> list[int]:
        """The op behind each stretch of the pass."""
        ends, at, each = [], 0.0, self.trace.seconds / STRETCHES
        for k, op in enumerate(self.trace.ops, start=1):
            at += op.seconds
            if at >= each * (len(ends) + 1) or k == len(self.trace.ops):
                ends.append(k)
        return ends

    def stretch_of(self, op: int) -> int:
        """The number of the stretch in which an op runs; the pass's ends are in the first and in the last."""
        return next((i for i, end in enumerate(self.ends) if op < end), len(self.ends) - 1)

    def _fullest(self) -> list[int]:
        """The op of each stretch with the most bytes in gaps and in its own storages."""
        size = [storage.size_bytes for storage in self.trace.storages]
        open_bytes = [0] * (len(self.trace.ops) + 2)
        for gap in self.gaps:
            open_bytes[gap.after + 1] += size[gap.storage]
            open_bytes[gap.before] -= size[gap.storage]
        for k in range(1, len(open_bytes)):
            open_bytes[k] += open_bytes[k - 1]
        begins = [0, *self.ends]
        return [
            max(range(begin, end), key=lambda k: open_bytes[k] + self._own(k))
            for begin, end in zip(begins, self.ends, strict=False)
        ]

    def _own(self, k: int) -> int:
        """The bytes that an op touches."""
        op, storages = self.trace.ops[k], self.trace.storages
        touched = sum(storages[s].size_bytes for s in {*op.inputs, *op.outputs} if storages[s].size_bytes >= SMALL)
        return touched - self.trace.handed_bytes[k]

    def solve(self) -> float | None:
        """The least delay in seconds; None: nothing fits.

        Raises:
            Unsolved: no solver, or it gave up.
        """
        for gap in self.gaps:
            self._moves(gap)
        for gap in self.gaps:
            if gap.again is not None:
                self._needs_inputs(gap.storage, gap.again, gap.before)
        self._copies()
        self._passes()
        self._fits()
        self._takes_time()
        found = self.rows.solve()
        return None if found is None else found[0]

    def _moves(self, gap: Gap) -> None:
        """The variables of a gap; the fraction that is away is never negative, and at most 1."""
        rows, first, last = self.rows, self.stretch_of(max(gap.after, 0)), self.stretch_of(gap.before)
        gap.clean = rows.variable(0.0)
        if gap.seconds is not None:
            gap.again = rows.variable(0.0)
        for i in range(first, last + 1):
            if gap.after >= 0:
                gap.written[i] = rows.variable(0.0)
            if gap.before < len(self.trace.ops):
                gap.read[i] = rows.variable(0.0)
        away = [(gap.clean, 1.0)]
        for i in range(first, last + 1):
            away += [(v, 1.0) for v in (gap.written.get(i),) if v is not None]
            rows.at_most(1.0, *away, *self._made(gap))  # no more than all of it
            away += [(v, -1.0) for v in (gap.read.get(i),) if v is not None]
            rows.at_most(0.0, *((v, -c) for v, c in away))
        if gap.before < len(self.trace.ops):  # all of it is back
            rows.at_most(0.0, *away)

    def _needs_inputs(self, storage: int, again: int, before: int) -> None:
        """An op that runs again for a fraction finds as much of each input that is dead by then: kept, or made again."""
        for s in self.trace.ops[self.trace.storages[storage].maker].inputs:
            stored = self.trace.storages[s]
            maker = self.trace.ops[stored.maker]
            alive = stored.released == HELD or self.last_touch[s] >= before or maker.kind == OpKind.CONSTANT
            if alive or stored.size_bytes < SMALL:
                continue
            found = self.dead.get(s)
            if found is None:
                own = self.rows.variable(0.0) if maker.kind == OpKind.COMPUTE else None
                found = self.dead[s] = Dead(self.rows.variable(0.0), own, before)
                if own is not None:
                    self._needs_inputs(s, own, before)
            found.until = min(found.until, before)
            has = [(found.kept, -1.0)] + ([] if found.again is None else [(found.again, -1.0)])
            self.rows.at_most(0.0, (again, 1.0), *has)

    def _made(self, gap: Gap) -> list[tuple[int, float]]:
        return [] if gap.again is None else [(gap.again, 1.0)]

    def _copies(self) -> None:
        """Bytes leave without a write only if the tier has them from an earlier gap of the storage, or from the pass before."""
        before: dict[int, list[tuple[int, float]]] = defaultdict(list)
        from_last = {start for _, start in self.trace.cycle}
        for gap in self.gaps:
            assert gap.clean is not None
            if gap.after >= 0:
                self.rows.at_most(0.0, (gap.clean, 1.0), *((v, -c) for v, c in before[gap.storage]))
            elif gap.storage in from_last:
                continue  # `_passes` says how much is away
            before[gap.storage] += [(v, 1.0) for v in gap.written.values()]
            if gap.after < 0:
                before[gap.storage].append((gap.clean, 1.0))

    def _passes(self) -> None:
        """Fractions that are away at the end of a pass are away when the next one begins."""
        at_end = {gap.storage: gap for gap in self.gaps if gap.before == len(self.trace.ops)}
        at_start = {gap.storage: gap for gap in self.gaps if gap.after < 0}
        for end, start in self.trace.cycle:
            if start in at_start:
                begun, ended = at_start[start], at_end.get(end)
                assert begun.clean is not None
                left = [] if ended is None or ended.clean is None else [(ended.clean, -1.0)]
                left += [] if ended is None else [(v, -1.0) for v in ended.written.values()]
                self.rows.at_most(0.0, (begun.clean, 1.0), *left)

    def _fits(self) -> None:
        """In the fullest op of each stretch the resident bytes are at most the budget."""
        for i, k in enumerate(self.fullest):
            terms: list[tuple[int, float]] = []
            there = self._own(k)
            for gap in self.gaps:
                if not gap.after < k < gap.before:
                    continue
                size = self.trace.storages[gap.storage].size_bytes
                there += size
                assert gap.clean is not None
                terms += [(gap.clean, -size), *((v, -size) for v, _ in self._made(gap))]
                terms += [(v, -size) for j, v in gap.written.items() if j <= i]
                terms += [(v, size) for j, v in gap.read.items() if j < i]
            for s, dead in self.dead.items():
                if self.last_touch[s] < k < dead.until:
                    terms.append((dead.kept, self.trace.storages[s].size_bytes))
            self.rows.at_most(self.budget_bytes - there, *terms)

    def _takes_time(self) -> None:
        """Copies take the link's time, and ops that run again are delays."""
        out: list[list[tuple[int, float]]] = [[] for _ in self.ends]
        back: list[list[tuple[int, float]]] = [[] for _ in self.ends]
        again = [(v, -1.0) for v in self.delays]
        for gap in self.gaps:
            size = self.trace.storages[gap.storage].size_bytes
            for i, v in gap.written.items():
                out[i].append((v, size / self.link.write_bytes_per_second))
            for i, v in gap.read.items():
                back[i].append((v, size / self.link.read_bytes_per_second))
            again += [(v, gap.seconds or 0.0) for v, _ in self._made(gap)]
        for s, dead in self.dead.items():
            if dead.again is not None:
                again.append((dead.again, self.trace.ops[self.trace.storages[s].maker].seconds))
        self.rows.at_most(0.0, *again)
        begins = [0, *self.ends]
        for i, (begin, end) in enumerate(zip(begins, self.ends, strict=False)):
            seconds = sum(op.seconds for op in self.trace.ops[begin:end])
            ways = [[*out[i], *back[i]]] if self.link.shared else [out[i], back[i]]
            for way in ways:
                self.rows.at_most(seconds, *way, (self.delays[i], -1.0))


def main() -> None:
    """Prints a row for each budget."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path, help="of a pass with a measured link")
    parser.add_argument("--budget", action="append", required=True, help="a size, or a share of the need: 50%%")
    args = parser.parse_args()
    trace = read_trace(args.trace)
    if not trace.links:
        parser.error(f"{args.trace}: no link was measured")
    need = trace.unmanaged_peak[0]
    print(f"{len(trace.ops):,} ops, {trace.seconds * 1e3:.2f} ms, need {show_size(need)}, {trace.links[0]}")
    for text in args.budget:
        limit = parse_size(text, whole=need)
        try:
            delay = Program(trace, trace.links[0], limit).solve()
        except Unsolved as error:
            parser.error(str(error))
        said = (
            "nothing fits" if delay is None else f"at least {1 + delay / trace.seconds:.4f}x, {1e3 * delay:.2f} ms more"
        )
        print(f"{show_size(limit)} ({limit / need:.1%}): {said}")


if __name__ == "__main__":
    main()
