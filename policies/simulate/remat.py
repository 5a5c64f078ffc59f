"""How the live manager makes again what backward asks for (memmgr/_replay.py), in the simulator: one storage at a time, all that
it needs planned before the first op runs, what two ops need made once, and what nobody after it reads let go of at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from memmgr.policies.rules.remat_order import Making, remake_order, shared
from memmgr.policies.rules.types import Action
from memmgr.policies.trace.schedule import Do

if TYPE_CHECKING:
    from .runtime import RuntimeSimulation

_ROUNDS = 1000  # plans for one storage, as live


class DoesNotFit(Exception):
    """The budget cannot hold what must be resident at once."""


class Rematerialization:
    """One storage is made again, and on the way others that are wanted.

    Attributes:
        kept: by the number of a later burst of a plan: what was made on the way and stays, pinned, for that burst.
    """

    def __init__(
        self,
        run: RuntimeSimulation,
        target: int,
        wanted: Sequence[int] = (),
        later: Sequence[tuple[int, Sequence[int], int]] = (),
        may_spill: bool = True,
    ) -> None:
        """What is to be made.

        Args:
            run: the simulation.
            target: without it there is no end.
            wanted: it and the others, in the order of making; if empty, it alone.
            later: (number of a burst, what it makes, bytes) for each for which a plan keeps something of this one.
            may_spill: where there is no room otherwise, what was made on the way waits in the tier.
        """
        self._run = run
        self._target, self._wanted = target, wanted or (target,)
        self._later, self._may_spill = later, may_spill
        self.kept: dict[int, list[int]] = {}
        self._pinned: set[int] = set()  # made on the way, until nobody reads it any more
        ops, storages = run.trace.ops, run.trace.storages
        self._making: Making[int, int] = Making(
            gone=lambda s: not (run.resident[s] or run.clean[s]),
            maker=self._maker,
            inputs=lambda k: tuple(dict.fromkeys(ops[k].inputs)),
            outputs=lambda k: ops[k].outputs,
            size_bytes=lambda s: storages[s].size_bytes,
            present=lambda s: bool(run.resident[s]),
        )

    def _maker(self, s: int) -> int:
        if not self._run.recomputable[s]:
            raise DoesNotFit(f"{self._run.trace.storages[s].name} is gone and cannot be made again")
        return int(self._run.trace.storages[s].maker)

    def make(self) -> None:
        """Until the target is resident.

        Raises:
            DoesNotFit: it is not to be had.
        """
        run, making = self._run, self._making
        kept: dict[int, list[int]] | None = None
        try:
            for _ in range(_ROUNDS):
                order, uses = remake_order(making, self._wanted)
                if kept is None:
                    kept = {
                        number: shared(making, order, to_make, most, self._nobody_saved)
                        for number, to_make, most in self._later
                    }
                for s in (self._target, *chain.from_iterable(kept.values())):
                    uses[s] = uses.get(s, 0) + 1
                for s in [s for s in self._pinned if s not in uses]:
                    self._unpin(s)
                for k in order:
                    try:
                        if not self._step(k, uses):
                            break
                    except DoesNotFit:
                        if not self._may_spill or not self._spill(k):
                            raise
                        break
                if run.resident[self._target]:
                    self._keep(kept)
                    return
                if run.clean[self._target]:
                    return run.read(self._target)
        finally:
            for s in list(self._pinned):
                self._unpin(s)
        raise DoesNotFit(f"making {run.trace.storages[self._target].name} again does not come to an end")

    def _keep(self, kept: dict[int, list[int]]) -> None:
        for number, storages in kept.items():
            self.kept[number] = [s for s in storages if s in self._pinned]
            self._run.pins.update(self.kept[number])

    def _nobody_saved(self, s: int) -> bool:
        return not self._run.held[s]

    def _pin(self, s: int) -> None:
        if s not in self._pinned:
            self._pinned.add(s)
            self._run.pins[s] += 1

    def _unpin(self, s: int) -> None:
        if s not in self._pinned:
            return
        self._pinned.remove(s)
        self._run.let_go((s,))

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
            run.replays()
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
