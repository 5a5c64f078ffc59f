"""How long a step takes at least under a budget, with a link to a tier: a linear program over time.

    python tools/bench/studies/link_bound.py pass.trace.gz --budget 5.67GB --budget 4.3GB --outside 0.00235

The trace is of a pass in which the link was measured (`memmgr trace`, or `"trace"` of a run of tools/gpu/train.py). The
printed bound holds for every schedule, of memmgr and of any other system, that runs these ops in their order.

The program. Between two touches of a storage lies a *gap*. Of the storage's bytes a fraction is made again at the gap's end,
which takes at least its op's time; another one is written in the gap and read back in it. A storage that is not touched any
more needs no memory. The pass is cut into stretches of equal time. In the fullest op of each stretch the op's own storages,
and the fractions of the gaps around it that are resident, have to fit. The fullest `MOMENTS` ops of all are stretches of their
own without a delay: bytes that make room for such an op are written before it, and come back after it. The bytes that are
written (read) in a stretch take at most the stretch's time on the link, and each stretch may last longer than its ops: the
sum of these delays is minimised. The time of ops that run again counts as delay, in or after the stretch of their storage's
last touch. Storages that live from pass to pass (`Trace.cycle`) have a gap over the end of the pass: the fraction that is
away when it ends is away when it begins.
In the fullest ops, `MOMENTS` of them, the inputs of ops that run again after them are in memory, below, or made again as well.

Source: the relaxation of `policies/plan/bound.py`, with the link's time; not from a paper.

*Known limitations*: a relaxation, so it may lie below every schedule: between those moments an op that runs again finds its
inputs in memory, bytes may be written as soon as the stretch begins in which they are made, copies have no latency, blocks
have no addresses. Storages below 64 KiB and tensors that change their size count nothing. Kernels of no op of the
trace take no time, but for those of --outside. A minute a budget for 830 ops.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from memmgr.config.sizes import parse_size, show_size
from memmgr.policies.plan.bound import Rows, Unsolved
from memmgr.policies.trace import HELD, OpKind, TierLink, Trace
from memmgr.telemetry.trace_file import read_trace

SMALL = 1 << 16
STRETCHES = 96
MOMENTS = 16


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
        self.gaps = [gap for gap in gaps_of(trace) if gap.before > gap.after + 1]
        self.ends = self._stretches()
        self.fullest = self._fullest()
        alone = {self.fullest[i] for i in self._full()} - {0}
        around = sorted({*alone, *(k + 1 for k in alone)})
        self.ends = sorted([*{*self.ends, *around}, *around])  # before and after each a stretch to wait in
        self.fullest = self._fullest()
        self.alone = [k in alone for k in self.fullest]
        self.delays = [self.rows.variable(1.0, 0.0, 0.0 if one else float("inf")) for one in self.alone]

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
        """The op of each stretch with the most bytes in gaps and in its own storages; -1: the stretch has no op."""
        size = [storage.size_bytes for storage in self.trace.storages]
        open_bytes = [0] * (len(self.trace.ops) + 2)
        for gap in self.gaps:
            open_bytes[gap.after + 1] += size[gap.storage]
            open_bytes[gap.before] -= size[gap.storage]
        for k in range(1, len(open_bytes)):
            open_bytes[k] += open_bytes[k - 1]
        begins = [0, *self.ends]
        return [
            max(range(begin, end), key=lambda k: open_bytes[k] + self._own(k), default=-1)
            for begin, end in zip(begins, self.ends, strict=False)
        ]

    def _own(self, k: int) -> int:
        """The bytes that an op touches. A constant is in a gap from the pass's beginning on."""
        op, storages = self.trace.ops[k], self.trace.storages
        if op.kind == OpKind.CONSTANT:
            return 0
        touched = sum(storages[s].size_bytes for s in {*op.inputs, *op.outputs} if storages[s].size_bytes >= SMALL)
        return touched - self.trace.handed_bytes[k]

    def solve(self) -> float | None:
        """The least delay in seconds; None: nothing fits.

        Raises:
            Unsolved: no solver, or it gave up.
        """
        for gap in self.gaps:
            self._moves(gap)
        self._copies()
        self._passes()
        self._fits()
        self._takes_time()
        for i in self._full():
            self._again_after(i)
        found = self.rows.solve()
        return None if found is None else found[0]

    def _moves(self, gap: Gap) -> None:
        """The variables of a gap; the fraction that is away is never negative, and at most 1."""
        rows, first, last = self.rows, self.stretch_of(max(gap.after, 0)), self.stretch_of(gap.before)
        gap.clean = rows.variable(0.0)
        if gap.seconds is not None:
            gap.again = rows.variable(0.0)
        for i in range(first, last + 1):
            gap.written[i] = rows.variable(0.0)
            gap.read[i] = rows.variable(0.0)
        away = [(gap.clean, 1.0)]
        for i in range(first, last + 1):
            away.append((gap.written[i], 1.0))
            rows.at_most(1.0, *away, *self._made(gap))  # no more than all of it
            away.append((gap.read[i], -1.0))
            rows.at_most(0.0, *((v, -c) for v, c in away))
        if gap.before < len(self.trace.ops):  # all of it is back
            rows.at_most(0.0, *away)

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
                left += [] if ended is None else [(v, 1.0) for v in ended.read.values()]
                self.rows.at_most(0.0, (begun.clean, 1.0), *left)
                self.rows.at_most(0.0, (begun.clean, -1.0), *((v, -c) for v, c in left))

    def _fits(self) -> None:
        """In the fullest op of each stretch the resident bytes are at most the budget."""
        for i, k in enumerate(self.fullest):
            if k < 0:
                continue
            terms: list[tuple[int, float]] = []
            there = self._own(k)
            for gap in self.gaps:
                if not gap.after < k < gap.before:
                    continue
                size = self.trace.storages[gap.storage].size_bytes
                there += size
                assert gap.clean is not None
                terms += [(gap.clean, -size), *((v, -size) for v, _ in self._made(gap))]
                terms += [(v, -size) for j, v in gap.written.items() if j <= i - self.alone[i]]
                terms += [(v, size) for j, v in gap.read.items() if j < i]
            self.rows.at_most(self.budget_bytes - there, *terms)

    def _full(self) -> list[int]:
        """The stretches whose fullest op is farthest beyond the budget if nothing leaves."""
        size = [storage.size_bytes for storage in self.trace.storages]
        excess = {
            i: sum(size[g.storage] for g in self.gaps if g.after < k < g.before) + self._own(k) - self.budget_bytes
            for i, k in enumerate(self.fullest)
            if k >= 0
        }
        return sorted((i for i, more in excess.items() if more > 0), key=lambda i: -excess[i])[:MOMENTS]

    def _again_after(self, i: int) -> None:
        """Ops that run again after the fullest op of stretch i: each input is in memory then, below, or made again as well.

        Of every storage that is used later a fraction is in memory at that op, one is below, and the rest is made again. Of
        an input that the program has released the fractions are as large as the largest that is made from it.
        """
        k = self.fullest[i]
        trace, rows = self.trace, self.rows
        over = {gap.storage: gap for gap in self.gaps if gap.after < k < gap.before}
        there = {*trace.ops[k].inputs, *trace.ops[k].outputs}
        again: dict[int, int] = {}  # by op
        resident: list[tuple[int, float]] = []
        released: dict[int, int] = {}
        todo = []

        def run_again(op: int) -> list[tuple[int, float]]:
            if trace.ops[op].kind != OpKind.COMPUTE or op >= k:
                return []
            if op not in again:
                again[op] = rows.variable(0.0)
                todo.append(op)
            return [(again[op], -1.0)]

        def fractions(s: int) -> list[tuple[int, float]]:
            size = trace.storages[s].size_bytes
            kept, below = rows.variable(0.0), rows.variable(0.0)
            resident.append((kept, size))
            if s in over:
                rows.at_most(0.0, (below, 1.0), *((v, -c) for v, c in self._below(over[s], i)))
            else:
                released[s] = below
            return [(kept, -1.0), (below, -1.0), *run_again(trace.storages[s].maker)]

        for s in over:
            rows.at_most(-1.0, *fractions(s))
        found: dict[int, list[tuple[int, float]]] = {}
        for op in todo:  # grows
            for s in trace.ops[op].inputs:
                small = trace.storages[s].size_bytes < SMALL
                if s in over or s in there or small or trace.ops[trace.storages[s].maker].kind == OpKind.CONSTANT:
                    continue
                if s not in found:
                    found[s] = fractions(s)
                rows.at_most(0.0, (again[op], 1.0), *found[s])
        rows.at_most(self.budget_bytes - self._own(k), *resident)
        rows.at_most(
            0.0, *((v, trace.ops[op].seconds) for op, v in again.items()), *((v, -1.0) for v in self.delays[i:])
        )
        self._copies_of_released(i, released)

    def _below(self, gap: Gap, i: int) -> list[tuple[int, float]]:
        """The fraction that is in the tier alone at the fullest op of stretch i."""
        assert gap.clean is not None
        away = [(gap.clean, 1.0), *((v, 1.0) for j, v in gap.written.items() if j <= i)]
        return away + [(v, -1.0) for j, v in gap.read.items() if j < i]

    def _copies_of_released(self, i: int, below: dict[int, int]) -> None:
        """Bytes of released storages are written between their making and stretch i, and read from it on, beside all others.

        Args:
            i: the stretch.
            below: by storage, the variable of the fraction that is in the tier.
        """
        link, size = self.link, [storage.size_bytes for storage in self.trace.storages]
        made = {s: self.stretch_of(self.trace.storages[s].maker) for s in below}
        windows = [
            (range(first, i + 1), [g.written for g in self.gaps], link.write_bytes_per_second)
            for first in {0, i, *(max(i - (1 << e), 0) for e in range(7))}
        ]
        for stretches, moved, rate in (
            *windows,
            (range(i, len(self.ends)), [g.read for g in self.gaps], link.read_bytes_per_second),
        ):
            others = [
                (v, size[gap.storage] / rate)
                for gap, by_stretch in zip(self.gaps, moved, strict=True)
                for j, v in by_stretch.items()
                if j in stretches
            ]
            copied = [
                (v, size[s] / rate) for s, v in below.items() if stretches.start >= i or made[s] >= stretches.start
            ]
            seconds = sum(self._seconds_of(j) for j in stretches)
            self.rows.at_most(seconds, *others, *copied, *((self.delays[j], -1.0) for j in stretches))

    def _seconds_of(self, i: int) -> float:
        """The time of the ops of stretch i."""
        begin = self.ends[i - 1] if i else 0
        return sum(op.seconds for op in self.trace.ops[begin : self.ends[i]])

    def _takes_time(self) -> None:
        """Copies take the link's time, and ops that run again are delays."""
        out: list[list[tuple[int, float]]] = [[] for _ in self.ends]
        back: list[list[tuple[int, float]]] = [[] for _ in self.ends]
        again: list[list[tuple[int, float]]] = [[] for _ in self.ends]  # by the stretch before which none of it runs
        for gap in self.gaps:
            size = self.trace.storages[gap.storage].size_bytes
            for i, v in gap.written.items():
                out[i].append((v, size / self.link.write_bytes_per_second))
            for i, v in gap.read.items():
                back[i].append((v, size / self.link.read_bytes_per_second))
            again[self.stretch_of(max(gap.after, 0))] += [(v, gap.seconds or 0.0) for v, _ in self._made(gap)]
        for i in range(len(self.ends)):
            later = [term for terms in again[i:] for term in terms]
            self.rows.at_most(0.0, *later, *((v, -1.0) for v in self.delays[i:]))
        for i in range(len(self.ends)):
            ways = [[*out[i], *back[i]]] if self.link.shared else [out[i], back[i]]
            for way in ways:
                self.rows.at_most(self._seconds_of(i), *way, (self.delays[i], -1.0))


def main() -> None:
    """Prints a row for each budget."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path, help="of a pass with a measured link")
    parser.add_argument("--budget", action="append", required=True, help="a size, or a share of the need: 50%%")
    parser.add_argument(
        "--outside",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="of kernels before the first op that the trace does not have: an optimizer's, for small tensors",
    )
    args = parser.parse_args()
    trace = read_trace(args.trace)
    first = next((i for i, op in enumerate(trace.ops) if op.kind is not OpKind.CONSTANT), 0)
    ops = list(trace.ops)
    ops[first] = replace(ops[first], seconds=ops[first].seconds + args.outside)
    trace = replace(trace, ops=tuple(ops))
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
            "nothing fits"
            if delay is None
            else f"at least {1e3 * (trace.seconds + delay):.2f} ms, {1 + delay / trace.seconds:.4f}x"
        )
        print(f"{show_size(limit)} ({limit / need:.1%}): {said}")


if __name__ == "__main__":
    main()
