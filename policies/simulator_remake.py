"""How the live manager makes again what backward asks for (memmgr/_replay.py), in the simulator: one storage at a time, all that
it needs planned before the first op runs, what two ops need made once, and what nobody after it reads let go of at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .schedule import Do
from .types import Action

if TYPE_CHECKING:
    from .simulator_live import LiveSimulation

_ROUNDS = 1000  # plans for one storage, as live


class DoesNotFit(Exception):
    """The budget cannot hold what must be resident at once."""


class Remake:
    """One storage is made again."""

    def __init__(self, run: LiveSimulation, target: int) -> None:
        self._run = run
        self._target = target
        self._pinned: set[int] = set()  # made on the way, until nobody reads it any more

    def make(self) -> None:
        """Until the target is resident.

        Raises:
            DoesNotFit: it is not to be had.
        """
        run = self._run
        try:
            for _ in range(_ROUNDS):
                order, uses = self._plan()
                uses[self._target] = uses.get(self._target, 0) + 1
                for s in [s for s in self._pinned if s not in uses]:
                    self._unpin(s)
                for k in order:
                    try:
                        if not self._step(k, uses):
                            break
                    except DoesNotFit:
                        if not self._spill(k):
                            raise
                        break
                if run.resident[self._target]:
                    return
                if run.clean[self._target]:
                    return run.read(self._target)
        finally:
            for s in list(self._pinned):
                self._unpin(s)
        raise DoesNotFit(f"making {run.trace.storages[self._target].name} again does not come to an end")

    def _pin(self, s: int) -> None:
        if s not in self._pinned:
            self._pinned.add(s)
            self._run.pins[s] += 1

    def _unpin(self, s: int) -> None:
        if s not in self._pinned:
            return
        run = self._run
        self._pinned.remove(s)
        run.unpin((s,))
        if run.resident[s] and not run.held[s]:
            run.drop(s)

    def _step(self, k: int, uses: dict[int, int]) -> bool:
        """Runs op k. False: an input has left since the plan was made."""
        run = self._run
        op = run.trace.ops[k]
        inputs = tuple(dict.fromkeys(op.inputs))
        for s in inputs:
            if not run.resident[s] and run.clean[s]:
                run.read(s)
                self._pin(s)
        if not run.resident[list(inputs)].all():
            return False
        fresh = [s for s in op.outputs if not run.resident[s]]
        run.pins.update(inputs)
        try:
            run.run_op(k, Do.RECOMPUTE)
        finally:
            run.unpin(inputs)
        for s in fresh:
            if uses.get(s, 0) > 0:
                self._pin(s)
            elif not run.held[s]:
                run.drop(s)
        for s in inputs:
            left = uses.get(s, 1) - 1
            if left > 0:
                uses[s] = left
            else:
                uses.pop(s, None)
                self._unpin(s)
        return True

    def _spill(self, k: int) -> bool:
        """What was made on the way and op k does not read waits in the tier. False: there was nothing, or no tier."""
        run = self._run
        spilled = [s for s in self._pinned if s not in run.trace.ops[k].inputs]
        if run.tier is None or run.tier.write_bytes_per_second <= 0 or not spilled:
            return False
        for s in spilled:
            self._pinned.remove(s)
            run.unpin((s,))
            run.leave(s, Action.OFFLOAD)
        return True

    def _plan(self) -> tuple[list[int], dict[int, int]]:
        """The ops to run, each after those that it needs, and how often each of their inputs is used. Of an op's inputs the one
        whose making needs most beyond itself comes first (Sethi & Ullman 1970, with sizes: Liu 1986)."""
        order, uses, branches = self._needed({})
        if branches and len(order) > 2:
            order, uses, _ = self._needed(self._extra_bytes(order))
        return order, uses

    def _there(self, s: int) -> bool:
        return bool(self._run.resident[s] or self._run.clean[s])

    def _needed(self, extra_bytes: dict[int, int]) -> tuple[list[int], dict[int, int], bool]:
        run = self._run
        ops, storages = run.trace.ops, run.trace.storages
        order: list[int] = []
        uses: dict[int, int] = {}
        done: set[int] = set()
        branches = False
        stack = [(self._target, False)]
        while stack:
            s, expanded = stack.pop()
            k = storages[s].maker
            if self._there(s) or k in done:
                continue
            if not run.recomputable[s]:
                raise DoesNotFit(f"{storages[s].name} is gone and cannot be made again")
            inputs = tuple(dict.fromkeys(ops[k].inputs))
            if expanded:
                done.add(k)
                order.append(k)
                for i in inputs:
                    uses[i] = uses.get(i, 0) + 1
                continue
            stack.append((s, True))
            gone = [i for i in inputs if not self._there(i)]
            branches |= len(gone) > 1
            gone.sort(key=lambda i: extra_bytes.get(i, 0))  # the last is popped first
            stack += [(i, False) for i in gone]
        return order, uses, branches

    def _extra_bytes(self, order: list[int]) -> dict[int, int]:
        """Of each storage that `order` makes: how many bytes its making needs at once, beyond itself."""
        run = self._run
        extra: dict[int, int] = {}
        for k in order:
            op = run.trace.ops[k]
            sizes = {i: int(run.size[i]) for i in op.inputs if not run.resident[i]}
            peak = held = 0
            for i in sorted(sizes, key=lambda i: extra.get(i, 0), reverse=True):
                peak = max(peak, held + sizes[i] + extra.get(i, 0))
                held += sizes[i]
            peak = max(peak, held + int(run.size[list(op.outputs)].sum()))
            for i in op.outputs:
                extra[i] = peak - int(run.size[i])
        return extra
