"""The online policy for recompute-only runs: it sees the program op by op, never the ops to come.

Four things set it apart from DTR (its interface is the same: ops run, tensors are released):

1. **Exact prices** (ledger.py): the time that one more eviction adds to the work that will be done again *at all*.
2. **A held tensor is not always needed** (saved.py): a tensor that no derivative reads is dropped first.
3. **The time of the next use counts**, not staleness: score = price / (bytes x d / (d + w)), where d is the bytes that
   the program made later and still holds. Backward reads in reverse, so it will have consumed d bytes before it reads
   this storage. Evicting a storage that is read at once frees nothing (d = 0, done only if there is no other victim).
   Beyond w, later is not better: memory is scarcest at the turn, and all earlier victims are absent by then. DTR's 1 /
   staleness prefers an old storage to a cheap one, however old.

4. **Storages evicted together must fit together.** A segment that does not fit is made again in parts, each time from
   its beginning; the price of making a segment larger has that (ledger.py: `repeat_seconds`).

Evictions are revised before they take effect: victims that the last, large one made superfluous stay resident.

A recomputation runs the missing ops in the order of the program and pins the inputs of all ops to come. If that does
not fit, it runs depth first. If neither fits, it pins the inputs of one op at a time and makes others again if it must
(`_Frugal`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from memmgr.policies.rules.types import Floats
from memmgr.policies.trace import Op, OpKind, Trace
from memmgr.policies.trace.schedule import Do, Step

from .ledger import Ledger
from .saved import saved_by

_NEAR = 0.1
"""w as a share of the budget. A storage that is read before that much was consumed comes back into the same shortage.
The result hardly depends on it: between 0.03 and 0.3 of the budget the overhead moves by 2 %.
"""

_ROOM = 0.25
"""Size limit of a segment of evicted tensors when it is made again, as a share of the budget. Parts of a larger one
push each other out. Between half and twice as much the overhead moves by a few percent.
"""

_CRUMB = 1 / 256  # storages smaller than this share of the shortage are evicted only if there is no larger victim
_TICK_SECONDS = 1e-12  # storages that cost nothing are still evicted in order of size and time
_SURPRISES = 8  # so many tensors thought unneeded are asked for: backward has begun unannounced
_MOST_AGAIN = 100.0  # recomputing more than so many times the program itself is not running


class OverBudget(Exception):
    """The storages that must be resident together do not fit, or not without recomputing for ever."""


@dataclass
class Online:
    """The policy as a machine: it is given the events of the program, and appends its actions to `steps`."""

    budget_bytes: int  # most bytes resident
    steps: list[Step] = field(default_factory=list)  # the schedule so far; never revised
    peak_bytes: int = 0  # most bytes resident so far
    seconds: float = 0.0  # time of all ops that ran
    at_end: int = 0  # how many steps there were when the program ended; later steps restore the storages that it holds
    why: str = ""  # the storages that did not fit, as a sentence; empty as long as all did
    most_again: float = _MOST_AGAIN  # gives up when so many times the program's time has been recomputed
    ledger: Ledger = field(default_factory=Ledger)
    _program_seconds: float = 0.0
    _backward: bool = False
    _surprises: int = 0
    _saved: list[bool] = field(default_factory=list)
    _unread: list[bool] = field(default_factory=list)
    _pins: Counter[int] = field(default_factory=Counter)
    _repeat: Floats = field(default_factory=lambda: np.zeros(64))  # per storage: `repeat_seconds` when last looked at

    # ---- events of the program

    def begin_backward(self) -> None:
        """Backward begins: until its end each held storage counts as needed, since gradients are read by several ops
        each.
        """
        self._backward = True

    def release(self, s: int) -> None:
        """Records that the program releases storage s."""
        for gone in self.ledger.release(s):
            if self.ledger.resident[gone]:
                self._evict(gone)
                self.steps.append(Step(Do.FREE, gone))

    def run(self, op: Op, sizes: Sequence[int]) -> None:
        """The program runs `op`, whose outputs have `sizes`; storages are numbered in the order of making.

        Raises `OverBudget`: its inputs, its outputs and the storages that cannot be evicted exceed the budget.
        """
        ledger = self.ledger
        once = op.kind in (OpKind.CONSTANT, OpKind.ONCE)
        self._note_surprises(op)
        k = ledger.new_op(op.seconds, op.inputs, sizes, fixed=once, passing=self._certain)
        if ledger.outputs[k] != op.outputs:
            raise ValueError(f"op {k} makes storages {op.outputs}, the next are {ledger.outputs[k]}")
        self._saved += [False] * len(sizes)
        self._unread += [True] * len(sizes)
        self._program_seconds += op.seconds
        self._gather(op.inputs)
        for s in op.inputs:
            self._pins[s] += 1
        try:
            self._make(k, Do.COMPUTE)
        finally:
            self._unpin(op.inputs)
        if op.kind != OpKind.CONSTANT:
            self._learn(k, op)

    def finish(self, held: Sequence[int]) -> None:
        """The program ends: `held` must be resident.

        Raises `OverBudget`: they do not fit together, or not with the storages that are needed to make them.
        """
        self.at_end = len(self.steps)
        self._gather(held)

    # ---- which storages the program will read again

    def _learn(self, k: int, op: Op) -> None:
        ledger = self.ledger
        certain = self._certain
        saved = saved_by(op.name, [ledger.size[s] for s in op.inputs])
        for j, s in enumerate(op.outputs):
            self._saved[s] = certain or saved.output or j > 0
        if op.kind == OpKind.VIEW:
            return
        for s in op.inputs:
            ledger.read_by(s, k)
            self._unread[s] = False
            self._saved[s] = self._saved[s] or certain or saved.inputs
            ledger.want(s, ledger.held[s] and self._saved[s])

    @property
    def _certain(self) -> bool:
        return self._backward or self._surprises >= _SURPRISES

    def _note_surprises(self, op: Op) -> None:
        self._surprises += sum(not self.ledger.wanted[s] and not self.ledger.resident[s] for s in op.inputs)

    # ---- making room

    def _evict(self, s: int) -> None:
        self.ledger.evict(s)

    def _unpin(self, storages: Iterable[int]) -> None:
        for s in storages:
            self._pins[s] -= 1
            if not self._pins[s]:
                del self._pins[s]

    def _nearness(self) -> Floats:
        """d / (d + w) for every storage."""
        later = self.ledger.later_bytes[: len(self.ledger.size)]
        after = later[::-1].cumsum()[::-1] - later
        return np.asarray((after + 1.0) / (after + 1.0 + _NEAR * self.budget_bytes), dtype=np.float64)

    def _room(self, need_bytes: int, spare: Iterable[int] = ()) -> None:
        """Evicts until `need_bytes` fit; pinned storages stay, except `spare`, if nothing else is left."""
        ledger = self.ledger
        short = ledger.used_bytes + need_bytes - self.budget_bytes
        if short <= 0:
            return
        near = self._nearness()
        victims: list[tuple[float, int]] = []
        for pinned in (set(self._pins), set(self._pins).difference(spare)):
            short = self._pick(victims, short, near, pinned)
            if short <= 0:
                break
        if short > 0:
            self.steps += [Step(Do.FREE, s) for _, s in victims]
            raise OverBudget(f"{need_bytes} bytes do not fit into {self.budget_bytes} beside the pinned ones")
        # The most expensive victims that later ones made superfluous stay resident.
        for _, s in sorted(victims, reverse=True):
            if ledger.size[s] <= -short:
                short += ledger.size[s]
                ledger.restore(s)
                ledger.settle(ledger.maker[s])
            else:
                self.steps.append(Step(Do.FREE, s))

    def _pick(self, victims: list[tuple[float, int]], short: int, near: Floats, pinned: set[int]) -> int:
        """Evicts the cheapest until `short` bytes are free, or no victim is left. Returns the bytes still short.

        Small storages would be picked first by the hundred, and all stay in the end once a large one is evicted. They
        wait until the shortage is as small as they are.
        """
        ledger = self.ledger
        able = ledger.victims()
        if pinned:
            able = able[~np.isin(able, np.fromiter(pinned, dtype=np.int64, count=len(pinned)))]
        size = ledger.sizes(able)
        room = size * near[able]
        if len(self._repeat) < len(ledger.size):
            self._repeat = np.concatenate([self._repeat, np.zeros(len(ledger.size) + 64)])
        repeat = self._repeat
        while short > 0 and len(able):
            scores = (ledger.prices(able) + repeat[able] + _TICK_SECONDS) / room
            if size.max() >= _CRUMB * short:
                scores[size < _CRUMB * short] = np.inf
            while True:  # segments grow until an op runs again: a price computed earlier is too low, or right
                at = int(scores.argmin())
                s = int(able[at])
                again = ledger.repeat_seconds(s, _ROOM * self.budget_bytes)
                if again <= repeat[s]:
                    break
                scores[at] += (again - repeat[s]) / room[at]
                repeat[s] = again
            victims.append((float(scores[at] * room[at]), s))
            self._evict(s)
            short -= ledger.size[s]
            able, size, room = np.delete(able, at), np.delete(size, at), np.delete(room, at)
        return short

    # ---- making

    def _make(self, k: int, do: Do, spare: Iterable[int] = ()) -> None:
        ledger = self.ledger
        fresh = [s for s in ledger.outputs[k] if not ledger.resident[s]]
        stay = [s for s in ledger.outputs[k] if ledger.resident[s]]  # if one left now, the op would make it, too
        self._pins.update(stay)
        try:
            self._room(sum(ledger.size[s] for s in fresh), set(spare).difference(stay))
        finally:
            self._unpin(stay)
        for s in fresh:
            ledger.restore(s)
        self.peak_bytes = max(self.peak_bytes, ledger.used_bytes)
        self.seconds += ledger.seconds[k]
        self.steps.append(Step(do, k))
        if do is Do.RECOMPUTE:
            ledger.settle(k)
            if self.seconds > (1.0 + self.most_again) * self._program_seconds:
                raise OverBudget("recomputing does not end")

    def _gather(self, targets: Sequence[int]) -> None:
        """Makes all of `targets` resident."""
        if all(self.ledger.resident[s] for s in targets):
            return
        self._repeat[:] = 0.0
        try:
            self._in_order(targets)
        except OverBudget:
            _Frugal(self).gather(targets)

    def _in_order(self, targets: Sequence[int]) -> None:
        """Makes all missing storages, with the inputs of the remaining ops pinned: in the order of the program if that
        fits, else depth first.
        """
        ledger = self.ledger
        missing = self._missing(targets)
        for order in (sorted(missing), missing):
            pins = Counter(targets)
            for k in order:
                pins.update(ledger.inputs[k])
            if self._most_bytes(order, pins) <= self.budget_bytes:
                break
        else:
            raise OverBudget(f"{len(missing)} ops cannot run again side by side")
        self._pins.update(pins)
        try:
            for k in order:
                self._make(k, Do.RECOMPUTE)
                self._unpin(ledger.inputs[k])
                pins.subtract(ledger.inputs[k])
        finally:
            self._unpin(pins.elements())

    def _missing(self, targets: Sequence[int]) -> list[int]:
        """The ops that have to run again, each after those that it needs, as late as possible."""
        ledger = self.ledger
        order: list[int] = []
        seen: set[int] = set()
        todo = [(ledger.maker[s], False) for s in targets if not ledger.resident[s]]
        while todo:
            k, ready = todo.pop()
            if ready:
                order.append(k)
            elif k not in seen:
                seen.add(k)
                todo.append((k, True))
                todo += [(ledger.maker[i], False) for i in ledger.inputs[k] if not ledger.resident[i]]
        return order

    def _most_bytes(self, order: Sequence[int], pins: Counter[int]) -> int:
        """The most that has to be resident at once when `order` runs and `pins` (how often each is read) stay meanwhile."""
        ledger = self.ledger
        here = {s for s in (*pins, *self._pins, *ledger.fixtures) if ledger.resident[s]}
        left, used = pins.copy(), sum(ledger.size[s] for s in here)
        most = used
        for k in order:
            fresh = [s for s in ledger.outputs[k] if s not in here]
            most = max(most, used + sum(ledger.size[s] for s in fresh))
            kept = [s for s in fresh if left[s] > 0]
            here.update(kept)
            used += sum(ledger.size[s] for s in kept)
            for s in ledger.inputs[k]:
                left[s] -= 1
                if not left[s] and s in here and s not in self._pins and not ledger.fixed[s]:
                    here.remove(s)
                    used -= ledger.size[s]
        return most


class _Frugal:
    """Depth first. Pinned are the inputs of the op at hand; those of the ops that wait for it leave last. If they have to
    leave all the same, they are made again, each a few times at most."""

    _TIMES = 3

    def __init__(self, online: Online) -> None:
        self.online = online
        self.ledger = online.ledger

    def gather(self, targets: Sequence[int]) -> None:
        ledger, online = self.ledger, self.online
        # (op or -1 for the targets, the storages that it needs, how often each was made for it)
        stack: list[tuple[int, tuple[int, ...], Counter[int]]] = [(-1, tuple(targets), Counter())]
        online._pins.update(targets)
        waiting: Counter[int] = Counter()
        try:
            while stack:
                k, inputs, made = stack[-1]
                missing = [s for s in inputs if not ledger.resident[s]]
                if missing:
                    # a storage that was pushed out once comes last the next time
                    s = min(missing, key=lambda s: made[s])
                    made[s] += 1
                    if made[s] > self._TIMES:
                        raise OverBudget(f"the {len(inputs)} inputs of an op do not come together")
                    maker = ledger.maker[s]
                    waiting.update(inputs)
                    stack.append((maker, ledger.inputs[maker], Counter()))
                    online._pins.update(ledger.inputs[maker])
                    continue
                if k >= 0:
                    online._make(k, Do.RECOMPUTE, [s for s in waiting if s not in inputs])
                stack.pop()
                online._unpin(inputs)
                if stack:
                    waiting.subtract(stack[-1][1])
                    waiting = +waiting
        finally:
            for _, inputs, _ in stack:
                online._unpin(inputs)


def feed(online: Online, trace: Trace) -> None:
    """Gives the policy the ops of a trace and the releases between them, one by one. Storages held at the end stay.

    Raises `OverBudget`: an op finds no room.
    """
    for k, op in enumerate(trace.ops):
        if k == trace.backward_at:
            online.begin_backward()
        for s in trace.released_before[k]:
            online.release(s)
        online.run(op, [trace.storages[s].size_bytes for s in op.outputs])


def run_online(trace: Trace, budget_bytes: int, *, most_again: float = _MOST_AGAIN) -> tuple[bool, Online]:
    """Feeds a trace to the policy, event by event. Returns whether it fits, and the machine as it is then."""
    online = Online(budget_bytes, most_again=most_again)
    try:
        feed(online, trace)
        for s in trace.released_before[len(trace.ops)]:
            online.release(s)
        online.finish(trace.held_at_end)
    except OverBudget as error:
        online.why = f"op {len(online.ledger.seconds) - 1}: {error}"
        return False, online
    return True, online
