"""A training step run on fake tensors (shapes, no bytes), as a trace: the input of memmgr plan before any training.

The step is called three times. The first call makes the optimizer's states. The record goes from the end of the second
call's last backward to the end of the third's, as a live period does (`memmgr/runtime/timeline.py`), so with the
optimizer's step before the forward. Tensors held at its beginning and at its end make it a cycle.

Torch runs each call below autograd under two modes: torch's `FakeTensorMode` returns shapes, and ours above it records
reads, results, writes and releases.

*Known limitations*: a floating point number that the step asks for (`loss.item()`) is 1, so a branch on it always goes
the same way; other values are an error. Fake tensors carry the device cpu for every target device, because backward on
fake CUDA tensors ends the process where torch is built for the CPU alone. `fake_kernels.py` corrects the differences of
that: attention and dropout run as an accelerator's kernels do, optimizers take their lists. Workspaces of kernels are
not seen, and neither are `torch.compile` (its regions run as they are written), tensors of other devices or storages
that are resized.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from memmgr.tools.common.fake_kernels import as_accelerator, modules_convert, without_tracing
from memmgr.tools.common.fake_trace import CALLS, VIEW, Block, Call, FakeStep, Ran, TensorSpec
from memmgr.tools.common.rates import Work

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).with_name("fake_"))
_aten = torch.ops.aten
_GATHERS = {"aten::embedding", "aten::index_select", "aten::gather", "aten::index"}
"""They read as much of their first argument as they make."""

Step = Callable[[], object]


class StepError(Exception):
    """The step cannot be run on fake tensors; the text names the line."""


def record(make: Callable[[], Step], *, accelerator: bool, done: Callable[[str], None] = lambda what: None) -> FakeStep:
    """Builds a step and runs it, all on fake tensors.

    Raises `StepError`: the step needs values, or is not the same each time. `make`: makes models, optimizer and batch,
    and returns the step. `accelerator`: kernels are chosen as on an accelerator rather than the CPU. `done`: called
    with each phase that has ended.
    """
    recorder = _Recorder(accelerator)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(_no_log_of_errors())
        # torch's own deepcopy of a tensor, which modules that repeat a layer call, asks a fake one for its address.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning, r"torch\._tensor$")
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # modes are this thread's
        stack.enter_context(as_accelerator() if accelerator else contextlib.nullcontext())
        stack.enter_context(modules_convert())
        stack.enter_context(recorder)
        step = make()
        if not callable(step):
            raise StepError(f"it returned {type(step).__name__}; a function that does one step was expected")
        done("built")
        stack.enter_context(without_tracing())
        for number in range(CALLS):
            recorder.begin(number)
            step()
            done(f"step {number + 1} of {CALLS}")
    return recorder.recorded()


@contextlib.contextmanager
def _no_log_of_errors() -> Iterator[None]:
    """Torch logs the traceback of an op that fails on fake tensors, and raises the exception too: the caller words that."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


# ---- records


class _Recorder(TorchDispatchMode):
    """Notes every call of torch below autograd."""

    def __init__(self, accelerator: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.accelerator = accelerator
        self.events: list[Ran] = []
        self.blocks: list[Block] = []
        self.samples: dict[str, Call] = {}
        self.number = self.op = -1
        self.asked = ""
        self._now: dict[int, int] = {}  # by address of the storage
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._workspaces: dict[str, int] = {}

    def begin(self, number: int) -> None:
        """A call of the step begins."""
        self.number, self.op = number, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default:
            if isinstance(args[0], FakeTensor) and args[0].constant is not None:
                return func(*args)  # torch knows it
            if (known := _value()) is not None:
                return known
            if args[0].is_floating_point():
                self.asked = self.asked or _line()  # a loss that is printed, a norm by which a step is scaled
                return 1.0
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise StepError(
                f"{_line()}: what {func._schema.name} gives depends on values, and fake tensors have none; "
                "leave it out of the step that is planned"
            ) from None
        if func.namespace in ("prim", "profiler"):
            return out
        name = func.name()
        if func is torch.ops.aten.mkldnn_rnn_layer.default and not self.accelerator:
            out = self._with_workspace(func, args, out)
        if name.startswith(("aten::_foreach_", "aten::_fused_")) and isinstance(args[0], list | tuple):
            # One index does not depend on another: the pager splits such calls, too.
            n = len(args[0])
            for i in range(n):
                made = [out[i]] if isinstance(out, list | tuple) and len(out) == n else None
                self._note(func, name, _at(args, i, n), _at(kwargs, i, n), made)
        else:
            self._note(func, name, args, kwargs, out)
        return out

    def _note(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        read = list(_tensors((args, kwargs)))
        made = list(_tensors(out))
        known = len(self.blocks)
        inputs = dict.fromkeys(b for t in read if (b := self._block(t, -1)) is not None)
        if len(self.blocks) > known:  # not made here: a tensor with bytes, from before
            known = len(self.blocks)
        for j, t in enumerate(made):
            self._block(t, j)
        outputs = tuple(range(known, len(self.blocks)))
        writes = dict.fromkeys(b for t in _written(func, args, kwargs) if (b := self._block(t, -1)) is not None)
        work = self._work(func, name, args, kwargs, read, made, out, bool(outputs or writes))
        self.op += 1
        self.events.append(
            Ran(name, work, tuple(inputs), outputs, tuple(writes), torch.is_grad_enabled() and len(writes) <= 1,
                 torch._C._current_autograd_node() is not None, self.number)
        )  # fmt: skip

    def _block(self, t: Tensor, output: int) -> int | None:
        try:
            storage = t.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse
            return None
        address = storage._cdata
        block = self._now.get(address)
        if block is None:
            block = self._now[address] = len(self.blocks)
            self.blocks.append(Block(storage.nbytes(), (self.number, self.op, output), len(self.events)))
            self._alive[address] = weakref.ref(storage, lambda _: self._died(address))
        return block

    def _died(self, address: int) -> None:
        del self._alive[address]
        self.blocks[self._now.pop(address)].died = len(self.events)

    def _work(
        self, func: Any, name: str, args: Any, kwargs: Any, read: list[Tensor], made: list[Tensor], out: Any, does: bool
    ) -> Work:
        if not does:
            return VIEW
        keys: list[str] = [str(func)]
        spec = _spec((args, kwargs), keys)
        signature = " ".join(keys)
        if signature not in self.samples:
            self.samples[signature] = Call(func, *spec)
        makes = sum(map(_extent, made))
        moved = sum(map(_extent, read)) + makes
        if func._schema.name in _GATHERS:
            moved += min(makes - _extent(read[0]), 0)
        flops = _flops(func, args, kwargs, out)
        dtype = next((str(t.dtype)[6:] for t in (*made, *read) if t.is_floating_point()), "int64")
        return Work(signature, flops, moved, "tf32" if dtype == "float32" and flops and _rounds(name) else dtype)

    def _with_workspace(self, func: Any, args: Any, out: Any) -> Any:
        """oneDNN alone knows how much a recurrent layer keeps for backward, and torch's fake one keeps nothing."""
        keys: list[str] = []
        specs = _spec(args, keys)
        signature = " ".join(keys)
        if signature not in self._workspaces:
            with unset_fake_temporarily():
                made = func(*(torch.zeros(a.shape, dtype=a.dtype) if isinstance(a, TensorSpec) else a for a in specs))
            self._workspaces[signature] = made[3].nbytes
        return (*out[:3], torch.empty(self._workspaces[signature], dtype=torch.uint8))

    # ---- the trace

    def recorded(self) -> FakeStep:
        """The record. Raises `StepError`: nothing, or the last two calls of the step differ."""
        begin, end = (self._ends_at(number) for number in (CALLS - 2, CALLS - 1))
        last = [(e.name, e.work.signature) for e in self.events if e.number == CALLS - 1]
        if not last:
            raise StepError("the step called no op of torch")
        if last != [(e.name, e.work.signature) for e in self.events if e.number == CALLS - 2]:
            raise StepError("the step does something else each time; plan one that repeats itself")
        # Copies: storages that are still held are released when the step is.
        return FakeStep(self.events, [replace(b) for b in self.blocks], begin, end, self.samples, self.asked)

    def _ends_at(self, number: int) -> int:
        """The event after the last one of a call's backward; without a backward, after the call."""
        mine = [k for k, e in enumerate(self.events) if e.number == number]
        return max((k for k in mine if self.events[k].backward), default=max(mine, default=-1)) + 1


# ---- description of a call


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)


def _at(value: Any, i: int, n: int) -> Any:
    """The arguments of a call on lists, for one index of them."""
    if isinstance(value, dict):
        return {key: _at([each], i, n)[0] for key, each in value.items()}
    return [[each[i]] if isinstance(each, list | tuple) and len(each) == n else each for each in value]


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[i] if i < len(args) else kwargs.get(argument.name))


def _spec(value: Any, keys: list[str]) -> Any:
    """The same with specs for tensors; the parts of its key are added to `keys`."""
    if isinstance(value, Tensor):
        spec = TensorSpec(tuple(value.shape), value.stride(), value.dtype)
        keys.append(f"{str(spec.dtype)[6:]}{list(spec.shape)}/{list(spec.stride)}")
        return spec
    if isinstance(value, list | tuple):
        return type(value)([_spec(each, keys) for each in value]) if type(value) in (list, tuple) else value
    if isinstance(value, dict):
        return {key: _spec(each, keys) for key, each in value.items()}
    keys.append("x" if isinstance(value, float) else str(value))
    return value


def _extent(t: Tensor) -> int:
    """Bytes that an op on it touches: an expanded tensor's are fewer than its elements'."""
    size = 1
    for length, stride in zip(t.shape, t.stride(), strict=True):
        size *= length if stride else 1
    return size * t.element_size()


def _rounds(name: str) -> bool:
    """Tells if a CUDA device may round float32 to TF32 with torch's settings here."""
    if "convolution" in name:
        return torch.backends.cudnn.allow_tf32
    return torch.get_float32_matmul_precision() != "highest"


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    packet = func._overloadpacket
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    name = func._schema.name
    if name == "aten::_scaled_dot_product_flash_attention_for_cpu":
        return int(sdpa_flop_count(*(t.shape for t in args[:3])))
    if name == "aten::_scaled_dot_product_flash_attention_for_cpu_backward":
        return 5 * int(sdpa_flop_count(*(t.shape for t in args[1:4]))) // 2  # five products, forward has two
    return 0


# ---- values, and device-dependent behaviour


def _value() -> float | None:
    """Result of `.item()` where torch itself asks for it; None: the step asks."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        if frame.f_code.co_filename.startswith((f"{_TORCH}/optim/", f"{_TORCH}/amp/")):
            # A count of steps in a list of them, a scaler's "was there an infinity": no size depends on these.
            return 0.0 if "/amp/" in frame.f_code.co_filename else 1.0
        frame = frame.f_back
    return None


def _line() -> str:
    """File and line of the innermost code outside of torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, _OURS)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
