"""Recomputation: makes the bytes of an evicted cell again from its recipe (rules 4, 5, 9).

What is made on the way is shared, kept while the plan still needs it, and handed to those cells that are wanted too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from memmgr.policies import Action
from memmgr.policies.rules.remat_order import Making, remake_order, shared

from . import _rng
from ._circumstances import put, put_back
from ._errors import RecomputeError

if TYPE_CHECKING:
    from ._manager import Manager


class Replayer:
    """Recomputes cells for one manager.

    Two threads may want cells at once: one lock, so that neither does the other's work again.
    """

    def __init__(self, native: Any, manager: Manager) -> None:
        self._native = native
        self._manager = manager
        self._lock = threading.RLock()
        self._kept: dict[int, list[Any]] = {}  # by the burst of the plan that reads them: tensors of unsaved cells
        self.recomputes = 0
        self.seconds = 0.0

    def materialize(self, target: Any) -> None:
        """Brings `target`'s bytes back, by recomputation or reload, whatever its ancestors need.

        Raises:
            RecomputeError: something that it needs is gone for good, or came out different.
            torch.OutOfMemoryError: the budget cannot hold what must be in memory at once.
        """
        begun, stalled = time.perf_counter(), self._manager.stall_seconds()
        with self._lock, self._native.Below(recomputing=True):
            self._run(target)
        spent = max(0.0, time.perf_counter() - begun - (self._manager.stall_seconds() - stalled))
        self.seconds += spent
        if self._manager.measuring.here:
            self._native.trace_replayed(spent)

    def _run(self, target: Any) -> None:
        # What the plan makes again together shares ancestors that nobody saved.
        planned = self._native.plan_together(target)
        if planned is None:
            self.forget()
            return self._make(target, [target])
        number, others, later = planned
        try:
            if others or later:
                try:
                    return self._make(target, sorted([target, *others], key=_saved_at), later, may_spill=False)
                except Exception:
                    self.forget()  # the others were a matter of speed, and what is wrong with them is theirs to say
            self._make(target, [target])
        finally:
            self._kept.pop(number, None)

    def dropped(self) -> list[Any]:
        """The cells that autograd wants and that only their recipes can make again."""
        return [cell for cell in self._native.handled() if cell.gone and cell.slot < 0]

    def forget(self) -> int:
        """Lets go of what is kept for later bursts of the plan; returns its bytes. From any thread that has the GIL."""
        kept, self._kept = self._kept, {}
        return sum(tensor.nbytes for tensors in kept.values() for tensor in tensors)

    def _make(
        self,
        target: Any,
        wanted: list[Any],
        later: Sequence[tuple[int, list[Any], int]] = (),
        may_spill: bool = True,
    ) -> None:
        """Until `target` is in memory; on the way the others of `wanted` are made once.

        Args:
            target: a cell that is gone.
            wanted: it, and others that are.
            later: (number of a burst of the plan, its cells, bytes) for each for which the plan keeps something of this one.
            may_spill: where there is no room otherwise, what was made on the way waits in the tier below.
        """
        native = self._native
        pins: dict[Any, Any] = {}  # bytes made on the way, kept until their last planned use
        kept: dict[int, list[Any]] | None = None
        spilled: list[Any] = []  # handles on what is in the tier only for us
        for _ in range(1000):
            order, uses = remake_order(_CELLS, wanted)
            if kept is None:
                kept = {number: shared(_CELLS, order, cells, most, _nobody_saved) for number, cells, most in later}
            for cell in (target, *chain.from_iterable(kept.values())):
                uses[cell] = uses.get(cell, 0) + 1
            for cell in [c for c in pins if c not in uses]:
                del pins[cell]
            for recipe in order:
                try:
                    if not self._step(recipe, uses, pins):
                        break
                except torch.OutOfMemoryError:
                    if not may_spill:
                        raise
                    if not self._spill(recipe, pins, spilled):
                        native.refused()
                        raise
                    break
            if target.present:
                for number, cells in kept.items():  # others may have kept something for it, too
                    self._kept.setdefault(number, []).extend(pins[cell] for cell in cells if cell in pins)
                return
            if target.stored and not native.bring_back(target):
                return
        raise RecomputeError("memmgr: recomputation does not come to an end; this is a bug in memmgr")

    def _step(self, recipe: Any, uses: dict[Any, int], pins: dict[Any, Any]) -> bool:
        """Runs one op of the plan. False: an input has left since the plan was made, so a new one is due."""
        detail = self._manager.telemetry.detail
        begun, stalled = (time.perf_counter(), self._manager.stall_seconds()) if detail else (0.0, 0.0)
        outputs = self._outputs(recipe, uses, pins)
        if outputs is None:
            return False  # what is pinned is kept
        self.recomputes += 1
        if detail:
            spent = time.perf_counter() - begun - (self._manager.stall_seconds() - stalled)
            self._native.note_recompute(recipe, spent)
        self._made(recipe, outputs, uses, pins)
        return True

    def _outputs(self, recipe: Any, uses: dict[Any, int], pins: dict[Any, Any]) -> list[Any] | None:
        """What the op makes, flat; None: an input has left."""
        native = self._native
        outputs: list[Any] | None = native.run_plain(recipe)
        if outputs is not None:
            return outputs
        # It needs more than its arguments: an input has to be brought back, it writes, it draws.
        inputs = recipe.inputs
        for parent in inputs:
            if not parent.present and parent.stored and not native.bring_back(parent):
                pins[parent] = native.lease(parent)
        # Leases keep the inputs from leaving while the op makes room for its outputs.
        leases = {parent: native.lease(parent) for parent in inputs}
        if any(lease is None for lease in leases.values()):
            return None
        self._manager.plans.settle()
        for parent in leases:
            if not parent.fresh:
                raise RecomputeError(
                    f"memmgr: an input of {recipe.func} was overwritten unseen after it was used (rule 3); "
                    "the recomputation is refused instead of giving a wrong gradient"
                )

        def spare(cell: Any) -> Any:
            # Made on the way, for this op and nobody after it: what writes there needs no copy (rule 2).
            if cell.handles > 0 or cell not in pins or uses.get(cell) != 1:
                return None
            del leases[cell]
            own = native.take(cell, pins[cell])
            if own is None:
                leases[cell] = native.lease(cell)
            else:
                del pins[cell]
            return own

        return run_recipe(native, recipe, spare)

    def _spill(self, recipe: Any, pins: dict[Any, Any], spilled: list[Any]) -> bool:
        """Offloads what was made on the way and this op does not read. False: there was nothing."""
        native = self._native
        if not self._manager.has_tier:
            return False
        moved, read = False, set(recipe.inputs)
        for cell in [c for c in pins if c not in read]:
            if cell.handles == 0:  # its bytes are wanted from now on, until this recomputation is over
                spilled.append(native.handle(pins[cell]))
            del pins[cell]
            native.release(cell, Action.OFFLOAD)
            moved |= cell.slot >= 0
        return moved

    def _made(self, recipe: Any, outputs: list[Any], uses: dict[Any, int], pins: dict[Any, Any]) -> None:
        """The op has run: who wants what it made has it, and what nobody after it reads is let go of."""
        native = self._native
        for cell, tensor in zip(recipe.outputs, outputs, strict=False):
            if cell is None or tensor is None or cell.present:
                continue
            planned = uses.get(cell, 0) > 0
            if not planned and cell.handles == 0:
                continue
            expected = cell.checksum
            if expected is not None and native.checksum(tensor) != expected:
                raise RecomputeError(
                    f"memmgr: recomputing {recipe.func} gave other bytes than were dropped (rule 7); "
                    "please report this with the op and its arguments"
                )
            native.fill(cell, tensor)
            if planned:
                pins[cell] = tensor
        for parent in recipe.inputs:
            left = uses.get(parent, 1) - 1
            if left > 0:
                uses[parent] = left
            else:
                uses.pop(parent, None)
                pins.pop(parent, None)


def _nobody_saved(cell: Any) -> bool:
    return bool(cell.handles == 0)


def _saved_at(cell: Any) -> int:
    return int(cell.seq)


def _maker(cell: Any) -> Any:
    recipe = cell.recipe
    if recipe is None or not recipe.ok:
        raise RecomputeError(
            f"memmgr: a tensor of {cell.nbytes} bytes was dropped and its recipe can no longer run "
            f"({'no recipe' if recipe is None else recipe.func}); this is a bug in memmgr"
        )
    return recipe


_CELLS: Making[Any, Any] = Making(
    gone=lambda cell: not (cell.present or cell.stored),
    maker=_maker,
    inputs=attrgetter("inputs"),
    outputs=lambda recipe: [cell for cell in recipe.outputs if cell is not None],
    size_bytes=attrgetter("nbytes"),
    present=attrgetter("present"),
)


def _restore(native: Any, value: Any, writable: dict[int, Any], spare: Callable[[Any], Any]) -> Any:
    kind = type(value)
    if kind is native.Ref:
        if value.mutated:
            # The op writes: it gets the whole storage for itself, by a copy if need be (rule 2).
            own = spare(value.cell)
            if own is None:
                own = native.clone_storage(value.cell)
            writable[len(writable)] = own
            return native.tensor(value, own)
        return native.tensor(value)
    if kind is tuple:
        return tuple(_restore(native, v, writable, spare) for v in value)
    if kind is list:
        return [_restore(native, v, writable, spare) for v in value]
    return value


def _nothing_spare(cell: Any) -> None:
    return None


def flat_outputs(out: Any) -> list[Any]:
    """The outputs in the order in which the shim numbers them."""
    if isinstance(out, list | tuple):
        return [leaf for item in out for leaf in flat_outputs(item)]
    return [out if isinstance(out, torch.Tensor) else None]


def run_recipe(native: Any, recipe: Any, spare: Callable[[Any], Any] = _nothing_spare) -> list[Any]:
    """Runs a recipe whose inputs are present; returns its outputs, flat. For ops that write, the written storage.

    Args:
        spare: of a cell that the op writes to: a tensor over its whole storage if the op may write there, else None.
    """
    writable: dict[int, Any] = {}
    args = _restore(native, recipe.args, writable, spare)
    kwargs = {k: _restore(native, v, writable, spare) for k, v in (recipe.kwargs or {}).items()}
    special = recipe.special
    blank = None
    if special is not None and special[0] == "fill":
        # The op overwrites everything, so what was there before is not needed.
        _, nbytes, size, stride, dtype, device = special
        blank = torch.empty(nbytes, dtype=torch.uint8, device=device)
        # Without a Python object for the storage, which would count as somebody who has the bytes, too.
        whole = blank[: nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
        args = (whole.as_strided(size, stride), *args[1:])
        del whole
    present = native.environment()
    if present == recipe.env:
        out = _run_op(native, recipe, args, kwargs)
    else:
        with native.Finally(partial(put_back, native, present)):
            put(native, recipe.env)
            out = _run_op(native, recipe, args, kwargs)
    if blank is not None:
        return [blank]
    if writable:
        return list(writable.values())
    return flat_outputs(out)


def _run_op(native: Any, recipe: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op on restored arguments, with the random numbers that it drew; nothing global stays changed (rules 4 and 10)."""
    func, drawn = recipe.func, recipe.rng
    if drawn is None:
        return func(*args, **kwargs)
    if not any(a.name == "generator" for a in func._schema.arguments):
        generator = drawn.generator
        with _rng.lock, native.Finally(partial(generator.set_state, generator.get_state())):
            drawn.restore(generator)
            return func(*args, **kwargs)
    twin = drawn.private()
    args = tuple(None if isinstance(a, torch.Generator) else a for a in args)
    kwargs["generator"] = twin
    position = next((i for i, a in enumerate(func._schema.arguments) if a.name == "generator"), len(args))
    if position < len(args):
        args = (*args[:position], twin, *args[position + 1 :])
        kwargs.pop("generator")
    return func(*args, **kwargs)
