"""What happens to ops that are not plain: the slow half of the recorder. The fast half is `allocator/shim/recorder.cpp`.

The mode sees ops below autograd and autocast. With grad mode on they are recorded; with grad mode off only their
writes matter (design §3, rules 2, 3 and 6).
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import _rng
from ._ops import OPAQUE, PURE, Op, describe, tensors_in
from ._replay import flat_outputs, run_recipe

if TYPE_CHECKING:
    from ._manager import Manager

TRUST_NEW, TRUST_YES, TRUST_NO = range(3)
MAX_PROOFS = 8  # a kind that found no room for its proof so often is left unproven: offload only
MAX_ROOM = 2  # so often room is made for it; in a second pass more kinds are proven, so that more can leave


def make_mode(native: Any) -> type[TorchDispatchMode]:
    """The dispatch mode class for this shim: its `__torch_dispatch__` is a C++ function."""

    class RecorderMode(TorchDispatchMode):
        # torch.cond and the like run under the mode as one opaque op, compiled calls stay compiled.
        supports_higher_order_operators = True
        __torch_dispatch__ = native.dispatch

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # the wrapper that it would put around a C++ function costs 0.8 us an op

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

    return RecorderMode


class Plain:
    """A saved tensor that is not managed (sparse, subclass, inference): kept as it is, with autograd's version check."""

    __slots__ = ("leaf", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.leaf = tensor if tensor.is_leaf else None  # nobody's output: it keeps no node alive
        # Detached: a saved output with its grad_fn would keep its own node alive.
        try:
            self.tensor = tensor.detach()
        except TypeError:  # no handler for it here: a fake tensor inside somebody's shape propagation
            self.tensor = tensor
        self.version = None if tensor.is_inference() else tensor._version

    def get(self) -> torch.Tensor:
        if self.version is not None and self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.shape)}] is at version {self.tensor._version}; "
                f"expected version {self.version} instead."
            )
        return self.tensor


class Recorder:
    """The callbacks that the shim calls for unusual ops."""

    def __init__(self, native: Any, manager: Manager) -> None:
        self._native = native
        self._manager = manager
        self._ops: dict[Any, Op] = {}
        self._proof_attempts: dict[int, int] = {}
        self.refused: set[str] = set()  # kinds that did not reproduce, by op name, for the report
        self.no_room: set[Any] = set()  # kinds that found no room for their last trial

    # -- classification --

    def classify(self, func: Any) -> tuple[Any, int, bool, bool, tuple[int, ...], tuple[str, ...]]:
        op = describe(func)
        self._ops[func] = op
        mutates = op.writes or op.cls == OPAQUE
        return op.call, op.cls, mutates, op.seeded, op.written_args, op.written_kwargs

    # -- dispatch --

    def slow(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, cls: int) -> Any:
        op = self._ops[func]
        kwargs = kwargs or {}
        if cls & 16:
            draws_only = op.seeded and op.replayable and not op.writes
            return self._draw_only(op, args, kwargs) if draws_only else self._write_only(op, args, kwargs)
        if op.cls == OPAQUE or not op.replayable:
            return self._write_only(op, args, kwargs)
        if op.batch_norm is not None:
            return self._batch_norm(op, args, kwargs)
        if op.storage_op:
            return self._write_only(op, args, kwargs)
        if op.writes:
            return self._in_place(op, args, kwargs)
        return self._functional(op, args, kwargs)

    def _written(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        if op.cls == OPAQUE and not op.writes:
            return tensors_in([args, kwargs])  # not known: all count as written (rule 6)
        found: list[torch.Tensor] = []
        for i in op.written_args:
            if i < len(args):
                found.extend(tensors_in(args[i]))
        for name in op.written_kwargs:
            found.extend(tensors_in(kwargs.get(name)))
        return found

    def before_write(self, tensors: list[torch.Tensor]) -> None:
        """What still needs the old values is brought back first (rule 3)."""
        for tensor in tensors:
            for cell in self._native.would_strand(tensor):
                self._manager.replayer.materialize(cell)

    def before_expose(self, tensor: torch.Tensor) -> None:
        """Raw writes may come: what is gone and needs these bytes is made again first."""
        for cell in self._native.would_strand_exposed(tensor):
            self._manager.replayer.materialize(cell)

    def _write_only(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = self._written(op, args, kwargs)
        self.before_write(written)
        out = op.call(*args, **kwargs)
        for tensor in written:
            self._native.overwritten(tensor, None)
        return out

    def _draw_only(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Not recorded; but where it finds no room it runs again, and must draw what it drew (rule 4)."""
        with _rng.lock:
            return self._native.call_drawn(_rng.Drawn(self._generator(op, args, kwargs)), op.call, args, kwargs)

    def _functional(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        native = self._native
        guard = _rng.lock if op.seeded else nullcontext()
        with guard:
            drawn = _rng.Drawn(self._generator(op, args, kwargs)) if op.seeded else None
            recipe = native.record(op.func, args, kwargs)
            if recipe is None:
                return op.call(*args, **kwargs)
            recipe.rng = drawn
            if op.blank:
                out = native.call(recipe, op.call, args, kwargs)
                recipe.trust = TRUST_NO  # undefined contents are never made again for their own sake
                native.adopt(recipe, out)
                cell = native.find(out)
                if cell is not None and cell.recipe is recipe:
                    cell.blank = True
                return out
            if recipe.trust == TRUST_NEW:
                out = self.first_use(recipe, op.call, args, kwargs)
            else:
                out = native.call(recipe, op.call, args, kwargs, True)
            self._doubt(recipe)
            native.adopt(recipe, out)
        native.after_op()
        return out

    def _generator(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
        device = next((t.device for t in tensors_in([args, kwargs])), None)
        if device is None:
            device = torch.device(kwargs.get("device") or "cpu")
        return _rng.generator_for(op.takes_generator, kwargs, args, device)

    def _in_place(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        native = self._native
        written = self._written(op, args, kwargs)
        self.before_write(written)
        target = args[0] if args and op.written_args == (0,) and isinstance(args[0], torch.Tensor) else None
        simple = target is not None and len(written) == 1 and type(target) in (torch.Tensor, torch.nn.Parameter)
        info = native.storage_info(target) if simple else None
        if info is None:
            return self._write_only(op, args, kwargs)
        assert target is not None
        _, nbytes, whole, _ = info
        guard = _rng.lock if op.seeded else nullcontext()
        with guard:
            drawn = _rng.Drawn(self._generator(op, args, kwargs)) if op.seeded else None
            recipe: Any = None
            if op.overwriter and whole and target.storage_offset() == 0:
                recipe = native.record(op.func, (None, *args[1:]), kwargs)
                if recipe is not None:
                    recipe.special = (
                        "fill",
                        nbytes,
                        tuple(target.size()),
                        tuple(target.stride()),
                        target.dtype,
                        target.device,
                    )
            else:
                old = native.lookup(target)
                # Without a recipe for what was there, what will be there has none either.
                if old is not None and old.recipe is not None and not old.blank:
                    recipe = native.record(op.func, args, kwargs)
                    if recipe is not None:
                        recipe.args[0].mutated = True
                        if any(a is not recipe.args[0] and _shares(native, a, old) for a in recipe.args[1:]):
                            recipe = None  # reads and writes one storage through two views: not worth a special case
            if recipe is None:
                out = op.call(*args, **kwargs)
                native.overwritten(target, None)
                return out
            recipe.rng = drawn
            kept = recipe if recipe.ok else None
            # The old bytes are there only now: prove the recipe before the op overwrites them.
            # No room is made for it: what before_write() has brought back would be the first to leave.
            trial = self._trial(recipe, room=False) if kept is not None and recipe.trust == TRUST_NEW else None
            out = native.call(recipe, op.call, args, kwargs)
            cell = native.overwritten(target, kept)
            if trial is not None:
                self._judge(recipe, [target], trial)
            if cell is not None and not self._doubt(recipe):
                native.drop_recipe(cell)
        # No ranking here: the tensor's counter moves when this handler has returned, and who looks at cells before that
        # takes the old count for settled, so the next look would see a write that nobody announced.
        return out

    def _batch_norm(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Recorded without its running statistics, so that a replay moves nothing (rule 2)."""
        native = self._native
        assert op.batch_norm is not None
        mean, var, training = op.batch_norm
        if kwargs or not args[training] or args[mean] is None:
            if kwargs:
                return self._write_only(op, args, kwargs)
            return self._functional(op, args, kwargs)
        written = [args[mean], args[var]]
        self.before_write(written)
        func, replay_args = op.func, tuple(None if i in (mean, var) else a for i, a in enumerate(args))
        if op.name == "aten::_native_batch_norm_legit":
            func = torch.ops.aten._native_batch_norm_legit.no_stats
            replay_args = (*args[:3], *args[5:])
        recipe = native.record(func, replay_args, {})
        if recipe is None:
            return self._write_only(op, args, kwargs)
        out = native.call(recipe, op.call, args, kwargs)
        for tensor in written:
            # Where the schema hides the write no version counter moves, and autograd, which saved the statistics before
            # the op, sees nothing: their handles stay good. An alias with a counter of its own says so.
            native.overwritten(tensor if op.func._schema.is_mutable else tensor.data, None)
        if recipe.trust == TRUST_NEW:
            again = self._trial(recipe)
            if again is not None:
                self._judge(recipe, flat_outputs(out), again)
        self._doubt(recipe)
        native.adopt(recipe, out)
        native.after_op()
        return out

    # -- trust (rule 7) --

    def first_use(self, recipe: Any, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Runs an op of a new kind with its inputs checksummed before and after, then a second time to compare."""
        native = self._native
        if not self._manager.proving or self._proof_attempts.get(recipe.kind, 0) >= MAX_PROOFS:
            return native.call(recipe, call, args, kwargs, True)
        inputs = tensors_in([args, kwargs or {}])
        before = [native.checksum(t) for t in inputs]
        out = native.call(recipe, call, args, kwargs, True)  # writes nothing, so it may be tried twice
        changed = [t for t, sum_before in zip(inputs, before, strict=True) if native.checksum(t) != sum_before]
        if changed:
            # A write that the schema hides.
            self._refuse(recipe)
            recipe.ok = False
            for tensor in changed:
                native.overwritten(tensor, None)
            return out
        again = self._trial(recipe)
        if again is not None:
            self._judge(recipe, flat_outputs(out), again)
        return out

    def _proof_wanted(self, recipe: Any) -> bool:
        attempts = self._proof_attempts.get(recipe.kind, 0)
        # In a measured pass a second result would pass for what the op itself needs.
        if attempts >= MAX_PROOFS or not self._manager.proving or self._manager.measuring.here:
            return False
        self._proof_attempts[recipe.kind] = attempts + 1
        return True

    def _doubt(self, recipe: Any) -> bool:
        """What is not known to reproduce is never made again, not for what was made of it either. Returns whether it is known."""
        if recipe.trust != TRUST_YES and self._manager.proving:
            recipe.ok = False
        return bool(recipe.ok)

    def _refuse(self, recipe: Any) -> None:
        recipe.trust = TRUST_NO
        self.refused.add(str(recipe.func))

    def _trial(self, recipe: Any, room: bool = True) -> list[Any] | None:
        """What the recipe makes, or None when there is no room for a second result: the kind stays unproven then.

        The first times room is made for it where there is none: what leaves for it costs some time once, and a kind that
        stays unproven can never be dropped. A plan has no room for trials, so in a planned pass none is made.
        """
        if not self._proof_wanted(recipe):
            return None
        native = self._native
        try:
            with native.Finally(self._trial_over):
                native.set_trial(True)
                native.set_no_reclaim(True)
                try:
                    return self._run_again(recipe)
                except torch.OutOfMemoryError:
                    self.no_room.add(recipe.kind)
                    if not room or self._proof_attempts[recipe.kind] > MAX_ROOM or self._manager.plans.leads():
                        return None
                native.set_no_reclaim(False)
                return self._run_again(recipe)
        except torch.OutOfMemoryError:
            return None

    def _trial_over(self) -> None:
        self._native.set_no_reclaim(False)
        self._native.set_trial(False)

    def _run_again(self, recipe: Any) -> list[Any]:
        native = self._native
        with native.Below():
            leases = [native.lease(cell) for cell in recipe.inputs]  # making room must not take them
            native.synchronize()  # kinds are few: the only place where an op's time on a device is waited for
            begun = time.perf_counter()
            outputs = run_recipe(native, recipe)
            native.synchronize()
            # The first call of a shape compiles and allocates: this one is nearer to what a recomputation takes.
            recipe.cost = time.perf_counter() - begun
            del leases
            self.no_room.discard(recipe.kind)
            return outputs

    def _judge(self, recipe: Any, first: list[Any], again: list[Any]) -> None:
        same = len(first) == len(again) and all(self._same(a, b) for a, b in zip(first, again, strict=True))
        if same:
            recipe.trust = TRUST_YES
        else:
            self._refuse(recipe)

    def _same(self, a: Any, b: Any) -> bool:
        if a is None or b is None:
            return a is b
        x, y = self._native.checksum(a), self._native.checksum(b)
        if x is not None and y is not None:
            return bool(x == y)
        if a.layout != torch.strided or a.device.type == "cpu":
            return x is y  # sparse: nobody makes a cell of it
        return bool(torch.equal(_bytes_of(a), _bytes_of(b)))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _shares(native: Any, value: Any, cell: Any) -> bool:
    if type(value) is native.Ref:
        return value.cell is cell
    if isinstance(value, list | tuple):
        return any(_shares(native, v, cell) for v in value)
    return False


__all__ = ["PURE", "Plain", "Recorder", "make_mode"]
