"""A schedule as the lives of blocks of bytes: the events that touch each block, and those in which it is born and dies.
Storages are versions. A block goes from one to the next where an op writes in place, and over the end of a pass along
`Trace.cycle`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from .schedule import Do, Step
from .trace import OpKind, Trace


@dataclass
class Block:
    """The life of a block of bytes, over the end of the pass if it is a cycle's."""

    size: int  # bytes
    stays: bool  # it is never paged
    again: bool  # its op may run again, so it needs no copy after its last touch
    touches: list[int] = field(default_factory=list)  # events that touch it, ascending
    writes: set[int] = field(default_factory=set)  # those that change it
    # (event, storage) each: the storage that it is from that event on
    versions: list[tuple[int, int]] = field(default_factory=list)
    held: bool = False  # it lives from one pass to the next


@dataclass
class Program:
    """A schedule as events over blocks."""

    constants: list[Step] = field(default_factory=list)  # steps that make them, before the first event
    steps: list[Step] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    touched: list[list[int]] = field(default_factory=list)
    born: list[list[int]] = field(default_factory=list)
    died: list[list[int]] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    begins: dict[int, int] = field(default_factory=dict)  # the block of each constant that comes from the pass before
    unknown: set[int] = field(default_factory=set)  # blocks that are there at the end, and of which nothing is known
    # the block that takes the place of one that begins a pass: it is made before that one dies
    handed: dict[int, int] = field(default_factory=dict)
    turn: int | None = None  # the event with which backward begins; None: unknown


def plain(trace: Trace) -> Iterator[Step]:
    """The program as it is: no op runs again, and a storage is freed when the program releases it."""
    written = {old for op in trace.ops for old, _ in op.writes} if not trace.copy_on_write else set()
    for k in range(len(trace.ops)):
        yield Step(Do.COMPUTE, k)
        yield from (Step(Do.FREE, s) for s in trace.released_before[k + 1] if s not in written)


def program_of(trace: Trace, steps: Iterable[Step]) -> Program:
    p = Program()
    ends = dict(trace.cycle)
    starts = set(ends.values())
    now: dict[int, int] = {}  # the block of each storage that is there
    computed = 0  # ops of the program, up to there
    for step in steps:
        if step.do is Do.FREE:
            p.died[-1].append(now.pop(step.target))
            continue
        computed = max(computed, step.target + (step.do is Do.COMPUTE))
        if trace.ops[step.target].kind == OpKind.CONSTANT:
            _add_constants(p, trace, step, now, starts)
        else:
            _add_op(p, trace, step, now, computed)
    _join_passes(p, ends, now)
    return p


def _add_constants(p: Program, trace: Trace, step: Step, now: dict[int, int], starts: set[int]) -> None:
    """Blocks that are there before the first op. `starts`: storages that the next pass begins with, in their place."""
    p.constants.append(step)
    for s in trace.ops[step.target].outputs:
        now[s] = len(p.blocks)
        p.blocks.append(Block(trace.storages[s].size_bytes, s not in starts, False, versions=[(-1, s)]))
        if s in starts:
            p.begins[s] = now[s]
            p.blocks[-1].held = True


def _add_op(p: Program, trace: Trace, step: Step, now: dict[int, int], computed: int) -> None:
    """Adds one op with the blocks that it reads, writes and makes. `computed`: ops of the program so far, this one among them."""
    op, event = trace.ops[step.target], len(p.steps)
    if step == Step(Do.COMPUTE, -1 if trace.backward_at is None else trace.backward_at):
        p.turn = event
    p.steps.append(step)
    p.seconds.append(op.seconds)
    p.born.append([])
    p.died.append([])
    if not event:
        p.born[0] += [k for k, b in enumerate(p.blocks) if not b.held]
    here = dict.fromkeys([now[s] for s in op.inputs] + p.born[-1])
    if step.do is Do.COMPUTE and not trace.copy_on_write:
        for old, made in op.writes:
            block = now[made] = now.pop(old)
            p.blocks[block].versions.append((event, made))
            p.blocks[block].writes.add(event)
    for s in op.outputs:
        if s in now:
            continue
        storage = trace.storages[s]
        # A storage that the program has released has no cell. Made again, it is resident until its readers have
        # run.
        stays = storage.pinned_until > step.target or storage.released <= computed
        p.blocks.append(Block(storage.size_bytes, stays, op.kind == OpKind.COMPUTE))
        block = now[s] = len(p.blocks) - 1
        p.blocks[block].versions.append((event, s))
        p.born[-1].append(block)
        here[block] = None
    p.touched.append(list(here))
    for block in here:
        p.blocks[block].touches.append(event)


def _join_passes(p: Program, ends: dict[int, int], now: dict[int, int]) -> None:
    """Storages held at the end are those that the next pass begins with: a block for both, where one can be.

    `ends`: by storage at the end, the storage of the beginning whose place it takes. `now`: the block of each storage
    at the end.
    """
    there = set(now.values())
    death = {block: event for event, died in enumerate(p.died) for block in died}
    for s, block in now.items():
        first = p.begins.get(ends.get(s, -1))
        late = p.blocks[block]
        if first == block:
            continue
        if first is None or first in there or late.held:  # nothing is known of it, or two blocks that take turns
            late.stays = True
            if first is not None and first not in there:  # it dies, so it has to be there when the next pass begins
                p.begins.pop(ends[s])
                p.blocks[first].stays, p.blocks[first].held = True, False
                p.born[0].append(first)
                if first not in p.touched[0]:
                    p.touched[0].append(first)
                    p.blocks[first].touches.insert(0, 0)
            if not late.held:
                p.unknown.add(block)
                p.died[-1].append(block)
            continue
        # Made in this pass, released in the next.
        late.again = False
        if late.touches[0] <= death[first]:
            p.handed[first] = block
            continue
        into = p.blocks[first]
        into.touches += late.touches
        into.versions += late.versions
        into.writes |= late.writes
        into.again = False
        for event in late.touches:
            p.touched[event] = [first if b == block else b for b in p.touched[event]]
            p.born[event] = [first if b == block else b for b in p.born[event]]


def spent(p: Program) -> list[set[int]]:
    """Per event, the blocks that it is the last to touch before the program releases them: no op needs their bytes then."""
    last: list[set[int]] = [set() for _ in p.steps]
    for end, died in enumerate(p.died):
        for k in died:
            touches = p.blocks[k].touches
            before = bisect_right(touches, end)
            if before:
                last[touches[before - 1]].add(k)
    return last


class Role(Enum):
    """The role of a block in a training."""

    # Made and freed within a period. Also a block whose successor in the next period is not known.
    ACTIVATION = "activation"
    PARAMETER = "parameter"
    GRADIENT = "gradient"
    STATE = "optimizer state"


def step_end(p: Program) -> int:
    """The last event of the optimizer's step: nothing after it, up to backward, changes a parameter; -1: there is none.

    *Known limitations*: a forward that changes a large buffer in place (a queue of features) counts as part of the step up to
    there. Running averages of norms are too small to be in a trace.
    """
    turn = _turn(p)
    changed = (b.writes for k, b in enumerate(p.blocks) if b.held and not _gradient(p, k))
    return max((event for writes in changed for event in writes if event < turn), default=-1)


def roles(p: Program) -> list[Role]:
    """The kind of each block, from the times at which it is changed and touched: the trace has no names.

    A gradient is made or changed in backward and lives on; an optimizer's state is touched by its step alone. Every
    other block that lives on is a parameter (buffers among them).

    *Known limitations*: without a turn to backward no block is a gradient.
    """
    end = step_end(p)

    def kind(k: int) -> Role:
        if not p.blocks[k].held:
            return Role.ACTIVATION
        if _gradient(p, k):
            return Role.GRADIENT
        return Role.STATE if max(p.blocks[k].touches, default=-1) <= end else Role.PARAMETER

    return [kind(k) for k in range(len(p.blocks))]


def _turn(p: Program) -> int:
    return len(p.steps) if p.turn is None else p.turn


def _gradient(p: Program, k: int) -> bool:
    return p.blocks[k].held and any(event >= _turn(p) for event, _ in p.blocks[k].versions)


def steps_of(p: Program, done: list[tuple[int, Do, int]]) -> Iterator[Step]:
    yield from p.constants
    there: dict[int, bool] = {}
    x = 0
    for event, step in enumerate(p.steps):
        while x < len(done) and done[x][0] == event:
            _, do, k = done[x]
            yield Step(do, version(p.blocks[k], event))
            there[k] = do is not Do.FREE
            x += 1
        yield step
        for k in p.born[event]:
            there[k] = True
        for k in p.died[event]:
            if there.get(k, True) and k not in p.unknown:
                yield Step(Do.FREE, version(p.blocks[k], event + 1))
    yield from (Step(do, version(p.blocks[k], event)) for event, do, k in done[x:])


def version(b: Block, event: int) -> int:
    """The storage that the block is before an event."""
    return next(s for at, s in reversed(b.versions) if at < event)
