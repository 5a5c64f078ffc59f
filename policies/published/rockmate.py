"""Rockmate (Zhao, Le Hellard, Eyraud-Dubois, Gusak, Beaumont, ICML 2023): Checkmate inside each block, rotor over the blocks.

The pass is cut into blocks. For each block, an integer program chooses the ops that run again in its backward if only a
given number of the bytes that backward reads may stay. That gives a few ways to save the block, from all of it to next
to nothing. Rotor's dynamic program chooses among these for each block, beside saving a later input. Blocks that look
alike are solved once.

*Known limitations*: three memories for each block, and no limit of the peak inside it. A block of more than 20 ops is
condensed, as in `checkmate`. A program that has found nothing in its time, a tenth of
a system's, is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memmgr.policies.simulate.simulator import Run
from memmgr.policies.trace import HELD, Op, OpKind, Storage, TierLink, Trace
from memmgr.policies.trace.schedule import Do, Replay, Step

from .checkmate import Stages
from .graph import graph_of
from .milp import LIMIT_SECONDS
from .rotor import Costs, Way, best_of, blocks
from .runs import UNLIMITED, completed, refused

MOST_BLOCKS = 30
OPS_OF_A_BLOCK = 3
"""At least: in a single op there is nothing to choose."""
MOST_NODES = 20
PART = 0.1
"""The share of `LIMIT_SECONDS` for each program."""
SHARES = (0.7, 0.4, 0.1)
"""Shares of the bytes that backward reads that may stay."""

_Answer = list[tuple[Do, int]]  # steps of a block's backward, by position among its ops


def rockmate(trace: Trace, budget_bytes: int, tier: TierLink | None = None) -> Run:
    """Recompute only; a tier is not used."""
    makers = sum(bool(op.outputs) and op.kind != OpKind.CONSTANT for op in trace.ops[: trace.backward_at])
    costs = Costs(blocks(trace, min(MOST_BLOCKS, max(makers // OPS_OF_A_BLOCK, 1))))
    known: dict[object, list[_Answer]] = {}
    ways = []
    for i in range(len(costs.chain)):
        block = Block.of(costs, i)
        look = block.look()
        if look not in known:
            answers = block.answers()
            if answers is None:
                return refused("rockmate", trace, budget_bytes, "its integer programs need scipy: pip install scipy")
            known[look] = answers
        ways.append([costs.all_of(i), *(block.way(costs, answer) for answer in known[look])])
    return best_of("rockmate", costs, ways, budget_bytes, tier)


@dataclass(frozen=True)
class Block:
    """A block of a chain as a pass by itself."""

    number: int  # in the chain
    ops: list[int]  # of the whole pass, its forward's and then its backward's
    trace: Trace  # of these ops alone; storages from other blocks are constants without bytes
    storages: list[int]  # in the whole pass, per storage of `trace`
    outside: int  # how many constants `trace` begins with

    @classmethod
    def of(cls, costs: Costs, number: int) -> Block:
        """Block `number`: the ops that make its output and the storages that its backward reads, and its backward."""
        chain, whole = costs.chain, costs.trace
        low, high = chain.cuts[number], chain.cuts[number + 1]
        targets = costs.read_by_work(number) | costs.crossing[number + 1]
        forward = chain.rematerialize(targets, low, high, costs.crossing[number])
        ops = [*forward, *(k for k in costs.work(number) if whole.ops[k].kind != OpKind.CONSTANT)]
        made = [s for k in ops for s in whole.ops[k].outputs]
        outside = sorted({s for k in ops for s in whole.ops[k].inputs} - set(made))
        number_of = {s: i for i, s in enumerate([*outside, *made])}
        inside = set(ops)
        readers = {s: [k for k in ops if s in whole.ops[k].inputs] for s in made}
        wanted = {s for k, op in enumerate(whole.ops) if k >= chain.turn and k not in inside for s in op.inputs}
        position = {k: len(outside) + i for i, k in enumerate(ops)}
        storages = [Storage(f"c.{i}", 0, i) for i in range(len(outside))]
        for s in made:
            late = s in wanted or whole.storages[s].released == HELD
            held = late and whole.storages[s].maker >= chain.turn
            last = max((position[k] for k in readers[s]), default=position[whole.storages[s].maker])
            at = position[whole.storages[s].maker]
            storages.append(Storage(f"s.{s}", whole.storages[s].size_bytes, at, HELD if held else last + 1))
        rows = [Op("constant", 0.0, (), (i,), OpKind.CONSTANT) for i in range(len(outside))]
        for k in ops:
            op = whole.ops[k]
            kind = op.kind if k < chain.turn or op.kind == OpKind.VIEW else OpKind.ONCE
            read, makes = (tuple(number_of[s] for s in ids) for ids in (op.inputs, op.outputs))
            rows.append(Op(op.name, op.seconds, read, makes, kind))
        trace = Trace(tuple(rows), tuple(storages), backward_at=len(outside) + len(forward))
        return cls(number, ops, trace, [*outside, *made], len(outside))

    def look(self) -> object:
        """A key that is equal for blocks with equal ops and sizes. Measured times do not count."""
        ops = tuple((op.name, op.inputs, op.outputs, op.kind) for op in self.trace.ops)
        return ops, tuple((s.size_bytes, s.released) for s in self.trace.storages), self.trace.backward_at

    def answers(self) -> list[_Answer] | None:
        """The ops that its backward runs when fewer of its bytes stay; None: there is no solver."""
        graph = graph_of(self.trace, MOST_NODES)
        turn = self.trace.backward_at or 0
        begin = next((i for i, ops in enumerate(graph.nodes) if ops.stop > turn), len(graph.nodes))
        saved = sum(v.size for v in graph.values if v.maker < begin and v.readers and v.readers[-1] >= begin)
        found: dict[tuple[tuple[Do, int], ...], None] = {}
        for share in SHARES if saved else ():
            program = Stages(graph, self.trace.unmanaged_peak[0] + 2 * saved, None, since=begin)
            program.keep_at_most(begin, int(share * saved))
            plans = program.solve(PART * LIMIT_SECONDS.get(), rounded=False)
            if plans is None:
                return None
            for plan in plans:
                events = graph.events(plan)
                first = next(i for i, s in enumerate(events) if s == Step(Do.COMPUTE, graph.nodes[begin].start))
                again = next((i for i, s in enumerate(events) if s.do is Do.RECOMPUTE), first)
                steps = [s for s in events[min(first, again) :] if s.target >= self.outside]
                found[tuple((s.do, s.target - self.outside) for s in steps)] = None
        return [list(answer) for answer in found]

    def way(self, costs: Costs, answer: _Answer) -> Way:
        """An answer as a way to save the block."""
        turn = self.trace.backward_at or 0
        backward = [Step(do, at + self.outside) for do, at in answer if do is Do.RECOMPUTE or at + self.outside >= turn]
        events = [*(Step(Do.COMPUTE, k) for k in range(turn)), *backward]
        run = Replay(self.trace, UNLIMITED, 0.0, 0.0, 0.0)
        saved: frozenset[int] = frozenset()
        before = True
        steps = completed(self.trace, events)
        for step in steps:
            if before and run.computed == turn and step.do is not Do.FREE:
                before = False
                saved = frozenset(self.storages[s] for s in run.resident if s >= self.outside)
                run.peak = run.used
            run.step(step.do, step.target)
        targets = saved | costs.crossing[self.number + 1]
        seconds, most = costs.forward(self.number, set(targets))
        again = sum(self.trace.ops[s.target].seconds for s in steps if s.do is Do.RECOMPUTE)
        behind = costs.behind[costs.chain.starts[self.number]]
        whole = [Step(s.do, self.ops[s.target - self.outside]) for s in backward]
        return Way(saved, seconds + again, most, run.peak + behind, _with_constants(costs, self.number, whole))


def _with_constants(costs: Costs, number: int, steps: Sequence[Step]) -> list[Step]:
    """Constants of backward keep their place."""
    found: list[Step] = []
    todo = [k for k in costs.work(number) if costs.trace.ops[k].kind == OpKind.CONSTANT]
    for step in steps:
        while step.do is Do.COMPUTE and todo and todo[0] < step.target:
            found.append(Step(Do.COMPUTE, todo.pop(0)))
        found.append(step)
    return [*found, *(Step(Do.COMPUTE, k) for k in todo)]
