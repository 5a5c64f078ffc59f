"""What replaces the compiled shim where there is no compiler: the same interface in plain Python (design §4, `Errors`).

The budget is kept by accounting before each op instead of in the allocator. That is weaker: memory that an op takes for
itself is not seen, and a bare op costs tens of microseconds. Exactness is the same. From the ledger up, each file adds
to the class of the one before: `_py_ledger` bytes, `_py_beside` a device's, `_py_table` cells, `_py_vault` releases and
reloads, here the recorder.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ._py_encode import Encoder, NotPlain, numeric_switches
from ._py_ledger import ThreadState
from ._py_predict import Recent, is_plain
from ._py_sections import Below, Finally
from ._py_signals import Deferred
from ._py_types import (
    OP_OPAQUE,
    OP_PURE,
    OP_VIEW,
    PRESENT,
    TRUST_NEW,
    TRUST_YES,
    Cell,
    Kind,
    Recipe,
    Ref,
)
from ._py_vault import Vault
from ._py_versions import C, Version
from ._sizes import UNLIMITED

warned = False

_BYTES_PER_SECOND, _LAUNCH_SECONDS = 3e11, 5e-6
_ORDINARY, _STEP_ASIDE, _LET_RUN = range(3)
_LAZY_VIEWS = C.DispatchKeySet(C.DispatchKey.Conjugate)
for _key in (C.DispatchKey.Negative, C.DispatchKey.ZeroTensor):
    _LAZY_VIEWS = _LAZY_VIEWS.add(_key)


class _Info:
    __slots__ = ("call", "cls", "mutates", "written_args", "written_kwargs")

    def __init__(
        self, call: Any, cls: int, mutates: bool, seeded: bool, args: tuple[int, ...], kwargs: tuple[str, ...]
    ) -> None:
        del seeded  # the shim's affair: here what draws is never run a second time
        self.call, self.cls, self.mutates = call, cls, mutates
        self.written_args, self.written_kwargs = args, kwargs


class Native(Vault):
    """The recorder, over the vault."""

    Finally = Finally

    def __init__(self) -> None:
        super().__init__()
        self._ops: dict[Any, _Info] = {}
        self._kinds = Recent(2048)
        self._environments: list[tuple[int, ...]] = []
        self._subclasses: dict[type, int] = {torch.Tensor: _ORDINARY, torch.nn.Parameter: _ORDINARY}
        self._always_rank = False
        self._events = self._backoff = 0
        self._position = 0
        self._saved_in_pass = 0
        self._serial = 0
        self._parents: Any = None
        self._deferred = Deferred(self._is_critical)
        self.dispatch = self._make_dispatch()
        # The manager asks by identity whether the innermost hooks are ours; a bound method is a new object every time.
        for name in ("pack", "unpack"):
            setattr(self, name, getattr(self, name))
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._in_child)

    def _in_child(self) -> None:
        """Other threads are gone, with the locks that they held."""
        self._lock = threading.RLock()
        self._forked, self._active = True, False
        self._tls = ThreadState()
        self._promised = 0
        self._deferred.restore()
        # What is page-locked is the parent's: to free it, a driver would be asked that works in no forked child.
        self._parents, self._tier = self._tier, None
        self._budget = UNLIMITED

    def Below(self, recomputing: bool = False) -> Below:  # named as the shim's
        """A section below autograd and autocast, without a mode and without gradient."""
        return Below(self.set_recomputing if recomputing else None)

    # -- recipes --

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Recipe | None:
        """A recipe, or None when a tensor cannot be described."""
        if self._detail:
            self._place(func)
        self._settle()
        encoder = Encoder(self)
        key: list[Any] = [func]
        try:
            with self._lock:
                encoded = encoder.value(tuple(args), key)
                named = None
                if kwargs:
                    named = {}
                    for name, value in kwargs.items():
                        key.append(name)
                        named[name] = encoder.value(value, key)
                env = self.environment()
                key.append(env)
                number = hash(tuple(key)) & (2**64 - 1)
                kind = self._kinds.take(number)
                if kind is None:  # one that has not been asked for in a long while proves itself again
                    kind = Kind(func, number)
                    self._kinds.put(number, kind)
                recipe = Recipe(func, encoded, named, tuple(encoder.cells), kind, self._replayed)
                self._serial += 1
                recipe.serial, recipe.env, recipe.ok = self._serial, env, encoder.ok
                recipe.module = self._module()
                for cell in encoder.cells:
                    self._link(recipe, cell)
                return recipe
        except BaseException as error:
            with self._lock:
                for copy in encoder.copies:
                    self._discard(copy)
            if isinstance(error, NotPlain):
                return None
            raise

    def run_plain(self, recipe: Recipe) -> None:
        """The shim runs the usual recipes itself, because that is faster; here Python does them all."""

    def call(self, recipe: Recipe, call: Any, args: Any, kwargs: Any, again: bool = False) -> Any:
        """Runs the op and notes how long it took without our own stalls. `again`: it writes nothing."""
        if self._detail:
            self._runs(str(recipe._func), self._module())
        stalled, begun = self._stalled(), time.perf_counter_ns()
        again = again and recipe.rng is None  # what it has drawn would be drawn anew (rule 4)
        out, made = self._accounted(recipe._func, call, args, kwargs, again)
        recipe.kept.made_bytes = max(recipe.kept.made_bytes, made)
        if self._memory.asynchronous:
            recipe.took(_guess_seconds(recipe))
        else:
            spent = time.perf_counter_ns() - begun - (self._stalled() - stalled)
            recipe.took(max(0, spent) * 1e-9)
        self._clock += recipe.cost
        return out

    def _replayed(self, recipe: Recipe, func: Any, args: Any, kwargs: Any) -> Any:
        # A recipe that fills has its memory already, which nobody has counted yet.
        streams = self._streams
        if streams is not None:
            streams.note()
        want = recipe.kept.made_bytes if recipe.special is None else recipe.special[1]
        self._reserve(want, True)
        if streams is not None and recipe.rng is None and not func._schema.is_mutable:
            out = self._run(func, args, kwargs, want)
        else:
            out = func(*args, **kwargs)
        self._after(self._note(out, [args, kwargs]))
        return out

    def adopt(self, recipe: Recipe, out: Any) -> None:
        """The outputs of the op become the recipe's cells."""
        if isinstance(out, torch.Tensor):
            made = None
            if is_plain(out) and not out.is_inference():
                with self._lock:
                    storage = out.untyped_storage()
                    known = self._known(storage)
                    if (known is None or known.cell is None) and storage.nbytes() > 0:
                        made = self._make_cell(out)
                        made.exposed = False
                        made.cost = recipe.cost
                        made.maker = str(recipe._func)
                        if recipe.ok:  # a recipe that cannot run would only keep the cell from being a root
                            made.recipe = recipe
            if made is not None and made.recipe is not None:
                recipe.note_made(made)
            else:
                recipe.made.append(None)
        elif isinstance(out, list | tuple):
            for item in out:
                self.adopt(recipe, item)
        else:
            recipe.made.append(None)

    # -- pressure --

    def reserve_bytes(self) -> int:
        return max(self._largest * 3 // 2, self._budget // 32)

    def _maybe_rank(self) -> None:
        rank = self._call.get("on_rank")
        if rank is None:
            return
        if self._always_rank:
            rank(0)
            return
        self._events += 1
        if self._events <= self._backoff or self._budget == UNLIMITED:
            return
        reserve = self.reserve_bytes()
        if self._resident() + reserve <= self._budget or self._armed_bytes >= reserve:
            return
        self._events = 0
        armed = rank(reserve)
        # Ranking is not free: when it finds little, wait for a few more events before the next try.
        self._backoff = 0 if armed >= reserve else min(256, self._backoff * 2 + 8)

    def _check_kept(self) -> None:
        kept = self._call.get("on_kept")
        many = self._kept_new_bytes >= max(1 << 20, self._resident() // 256)
        if kept is None or not (many or (self._kept_large and self._large_root_alone())):
            return
        self._kept_new_bytes = 0
        kept()

    def after_op(self) -> None:
        self._maybe_rank()
        self._check_kept()

    # -- ops --

    def _subclass(self, kinds: Any) -> int:
        """A tensor subclass first says what it stands for; its local ops are what is recorded (rule 6)."""
        for kind in kinds:
            found = self._subclasses.get(kind)
            if found is None:
                found = _ORDINARY
                if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                    # What traces shapes has no local ops, and runs as if we were not there.
                    traces = "FakeTensor" in kind.__name__ or "FunctionalTensor" in kind.__name__
                    found = _LET_RUN if traces else _STEP_ASIDE
                self._subclasses[kind] = found
            if found != _ORDINARY:
                return found
        return _ORDINARY

    def _is_known(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            if not is_plain(value):
                return bool(C._dispatch_keys(value).has(C.DispatchKey.Python))
            known = self._known(value.untyped_storage())
            return known is not None and known.cell is not None
        return isinstance(value, list | tuple) and any(self._is_known(item) for item in value)

    def _writes_known(self, info: _Info, args: Any, kwargs: Any) -> bool:
        """Does the op write to memory that somebody may still ask for? Most writes of an optimizer step do not."""
        if info.cls == OP_OPAQUE and not info.written_args and not info.written_kwargs:
            return self._is_known([*args, *(kwargs or {}).values()])
        if any(i < len(args) and self._is_known(args[i]) for i in info.written_args):
            return True
        return bool(kwargs) and any(self._is_known(kwargs.get(name)) for name in info.written_kwargs)

    def _make_dispatch(self) -> Callable[..., Any]:
        def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # A thread that outlives the context still has the mode on its stack (rule 10).
            if not self._active:
                return func(*args, **(kwargs or {}))
            self._settle()
            subclass = self._subclass(types)
            if subclass != _ORDINARY:
                return NotImplemented if subclass == _STEP_ASIDE else func(*args, **(kwargs or {}))
            # On the way to a mode torch switches off the fallbacks for conjugated and negated views. A kernel that makes
            # such views and computes with them (linalg_pinv) is then wrong, so they are on again while the op runs.
            excluded = C._dispatch_tls_local_exclude_set() - _LAZY_VIEWS
            if self._streams is not None:
                self._streams.note()
            try:
                with C._ForceDispatchKeyGuard(C._dispatch_tls_local_include_set(), excluded):
                    return self._op(func, types, args, kwargs)
            except torch.OutOfMemoryError as error:
                self._explain(error)
                raise

        return dispatch

    def _explain(self, error: BaseException) -> None:
        explain = self._call.get("on_oom")
        if explain is not None:
            explain(error)  # raises

    def _op(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if self._kept_large:
            self._check_kept()
        info = self._ops.get(func)
        if info is None:
            info = self._ops[func] = _Info(*self._call["on_classify"](func))
        if not torch.is_grad_enabled():
            if (info.mutates or info.cls == OP_OPAQUE) and self._writes_known(info, args, kwargs):
                return self._slow(func, types, args, kwargs, info.cls | 16)
            if info.cls == OP_VIEW:
                return info.call(*args, **(kwargs or {}))
            return self._accounted(func, info.call, args, kwargs, info.cls == OP_PURE)[0]
        if info.cls == OP_VIEW:
            return info.call(*args, **(kwargs or {}))
        if info.cls != OP_PURE:
            return self._slow(func, types, args, kwargs, info.cls)
        self._n["recorded_ops"] += 1
        self._scan_floor(True)
        self._maybe_rank()
        recipe = self.record(func, args, kwargs)
        if recipe is None:
            return self._accounted(func, info.call, args, kwargs, True)[0]
        # First use of a kind: Python runs it, runs it again and compares (rule 7). It returns the first run's outputs.
        first = self._call.get("on_new_kind")
        if first is not None and recipe.kept.trust == TRUST_NEW:
            out = first(recipe, info.call, args, kwargs)
        else:
            out = self.call(recipe, info.call, args, kwargs, True)
        if first is not None and recipe.kept.trust != TRUST_YES:
            # Its outputs are roots: what is not known to reproduce is not run again for others either.
            recipe.ok = False
        self.adopt(recipe, out)
        self._check_kept()
        return out

    def _slow(self, func: Any, types: Any, args: Any, kwargs: Any, cls: int) -> Any:
        def slowly(*args: Any, **kwargs: Any) -> Any:
            return self._call["on_slow"](func, types, args, kwargs, cls)

        return self._accounted(func, slowly, args, kwargs)[0]

    # -- saved tensors --

    def pack(self, tensor: Any) -> Any:
        self._n["packs"] += 1
        if not self._active or not is_plain(tensor) or tensor.is_inference():
            return self._call["on_pack_other"](tensor)
        ref = self.handle(tensor)
        assert ref is not None  # a plain tensor has a cell
        cell = ref.cell
        if self._streams is not None:
            self._streams.note()
        if cell.saved_in != Cell.this_pass:
            cell.saved_in, cell.place, self._saved_in_pass = (
                Cell.this_pass,
                self._saved_in_pass,
                self._saved_in_pass + 1,
            )
        self._maybe_rank()
        return ref

    def unpack(self, ref: Any) -> Any:
        if type(ref) is not Ref:
            return self._call["on_unpack_other"](ref)
        self._settle()
        self._n["unpacks"] += 1
        cell = ref.cell
        self._position = cell.seq
        if self._detail:
            self._runs(cell.maker, cell.module)
        if self._streams is not None:
            self._streams.note()
        progress = self._call.get("on_progress")
        if (
            self._offloaded_cells > 0
            and progress is not None
            and self._resident() + self.reserve_bytes() < self._budget
        ):
            progress(cell.seq)
        try:
            for attempt in range(64):
                if cell.stale or (cell.gone == PRESENT and not cell.saved_fresh):
                    raise _modified(ref)
                with self._lock:
                    storage = cell.strong if cell.gone == PRESENT else None
                    if storage is not None:
                        self._disarm(cell)
                        if cell.slot >= 0:
                            self._drop_slot(cell)  # from here on somebody could write
                if storage is not None:
                    cell.last_access = self._clock
                    if storage.nbytes() < ref.extent_bytes():
                        raise RuntimeError("memmgr: the storage of a saved tensor was resized and is too short for it")
                    out = cell.unpacked(ref, storage)
                    self._maybe_rank()
                    return out
                try:
                    if self.bring_back(cell):
                        self._call["on_missing"](cell)
                except torch.OutOfMemoryError as error:
                    # A recomputation that did not come to its end can be begun again.
                    if attempt >= 8 or not self._made_native_room(error, cell.nbytes, attempt):
                        raise
        except torch.OutOfMemoryError as error:
            self._explain(error)
            raise
        raise RuntimeError("memmgr: a saved tensor leaves as fast as it is brought back; the budget is too small")

    # -- set-up --

    def configure(self, **callbacks: Any) -> None:
        for name, callback in callbacks.items():
            if callback is None:
                self._call.pop(name, None)
            else:
                self._call[name] = callback
        # The recorder must not sleep: without the mode on the stack nothing is accounted.
        sleeper = getattr(getattr(callbacks.get("on_rank"), "__self__", None), "sleeper", None)
        if sleeper is not None:
            sleeper._allowed = False

    def set_active(self, value: bool) -> None:
        self._active = bool(value)
        if value:
            self._deferred.wrap()
        else:
            self._deferred.restore()

    def _is_critical(self) -> bool:
        return bool(self._lock._is_owned() or self._tls.critical)

    def set_always_rank(self, value: bool) -> None:
        self._always_rank = bool(value)

    def environment(self) -> int:
        """Id of the current numeric switches."""
        now = numeric_switches()
        if now not in self._environments:
            self._environments.append(now)
        return self._environments.index(now)

    def environment_values(self, number: int) -> tuple[int, ...]:
        return self._environments[number]

    def forget_ops(self) -> None:
        self._ops.clear()

    def forget_kinds(self) -> None:
        for kind in self._kinds.values():
            kind.trust = TRUST_NEW  # recipes may still point at them

    def kinds(self) -> list[tuple[Any, int]]:
        return [(kind.func, kind.trust) for kind in self._kinds.values()]

    def clock(self) -> float:
        return self._clock

    def plan_together(self, cell: Cell) -> None:
        """What a plan makes again in one go with `cell`: there are no plans here."""

    def begin_pass(self) -> None:
        """Cells are numbered from 0 again as they are saved."""
        self._see_unseen()
        Cell.this_pass += 1
        self._saved_in_pass = 0

    def position(self) -> int:
        return self._position

    def table_size(self) -> tuple[int, int]:
        return len(self.table()), len(self._kinds)

    def find_payload(self, tensor: Any) -> None:
        """Nothing to find: no tensor is looked into."""


def _guess_seconds(recipe: Recipe) -> float:
    """What an op takes on a device, where the call only queues it: what the proof measured, before that what a slow device's
    memory allows. As `guess_seconds` in `allocator/shim/recorder.cpp`."""
    if recipe.kept.seconds >= 0:
        return recipe.kept.seconds
    return _LAUNCH_SECONDS + sum(cell.nbytes for cell in recipe.inputs) / _BYTES_PER_SECOND


def _modified(ref: Ref) -> RuntimeError:
    # Autograd's own words, so that what matches on them goes on matching (rule 8).
    moved: list[Version] = [v for v in ref.cell.versions if v.saved and v.twin._version != v.at]
    at, now = (moved[-1].at, moved[-1].twin._version) if moved else (0, 1)
    name = str(ref.dtype).removeprefix("torch.")
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[torch.{name} {list(ref.sizes)}] is at version {now}; expected version {at} instead. Hint: enable anomaly "
        "detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )


def warn(why: str, device: torch.device | None) -> None:
    """Says once what is weaker, and why."""
    global warned
    if warned:
        return
    warned = True
    weaker = "memory that an op takes for itself can pass it"
    if device is not None and device.type != "cpu":
        capped = hasattr(torch.get_device_module(device.type), "set_per_process_memory_fraction")
        weaker = (
            "an op for which the allocator has no room is run again, and one that writes cannot be"
            if capped
            else weaker
        )
    warnings.warn(
        f"memmgr: {why}. The budget is kept by accounting before each op instead of in the allocator, which is "
        f"weaker: {weaker}.",
        RuntimeWarning,
        stacklevel=4,
    )


_module: Native | None = None


def module() -> Native:
    """The one replacement of the shim in this process."""
    global _module
    if _module is None:
        _module = Native()
    return _module


# As in the compiled module, the types are attributes; set here, because inside the class they would hide the names.
for _type in (Cell, Recipe, Ref):
    setattr(Native, _type.__name__, _type)
