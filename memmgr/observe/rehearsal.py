"""Estimates the memory of the rest of a forward and its backward: the module runs again on tensors without bytes.

For the text of an error only, when memory ran out inside a forward: the ops to come have not been seen yet. It runs when
the text is asked for, and until then holds no tensor and no module. A copy of the module, without its hooks, runs on fake
tensors (`torch._subclasses`) in a thread of its own. A real tensor in one of its ops ends it: the program's tensors,
gradients and graphs are not touched.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_CALL = torch.nn.Module._call_impl.__code__
# C from torch 2.14.1 on
_APPLY: Any = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)
# Workspace of kernels relative to their tensors, on the CPU. A convolution brings its tensors into layouts of its own.
# A recurrent layer keeps a workspace of all gates for its backward. CUDA's (`_cudnn_rnn`) was not measured, and counts once.
_TAKES = {"convolution": 1.75, "rnn_layer": 5.0}
_PATIENCE_SECONDS = 20.0  # a forward may wait for a lock that the thread with the error has
_TRANSFORMS = ("torch._functorch.vmap", "torch._functorch.eager_transforms")
_THREAD = "memmgr-rehearsal"
_busy = threading.Lock()
_MAKES = (torch.ops.aten.lift_fresh.default,)  # ops that torch.tensor() makes of numbers
_too_long: weakref.WeakSet[type] = weakref.WeakSet()  # modules whose rehearsal has not ended in time


@dataclass(frozen=True)
class Rehearsed:
    """The op that needs most.

    Attributes:
        op_bytes: its inputs and outputs.
        activations_bytes: the most bytes that one op needs of tensors other than parameters and buffers; not always the
            same op.
        inputs_bytes: the module's inputs.
        made_bytes: all tensors that its forward makes, freed or not.
        outputs_bytes: the tensors that its forward returns.
    """

    op_bytes: int
    activations_bytes: int
    inputs_bytes: int
    made_bytes: int
    outputs_bytes: int


def is_rehearsal() -> bool:
    """Is this the thread of a rehearsal? Its backward is no pass of the program."""
    return threading.current_thread().name == _THREAD


def module_call() -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]] | None:
    """The outermost module that the calling thread is in, and its arguments."""
    found: FrameType | None = None
    for frame in _frames():
        if frame.f_code is _CALL:
            found = frame
    if found is None:
        return None
    here = found.f_locals
    module = here["self"]
    # AOTAutograd's graphs take a list and empty it, so their arguments are not known any more.
    if type(getattr(getattr(module, "_graph", None), "_codegen", None)).__name__ == "_BoxedCodeGen":
        return None
    return getattr(module, "_orig_mod", module), here["args"], here["kwargs"]  # of a compiled module, the original one


class Rehearsal:
    """The largest op of a forward, its loss and its backward, once somebody asks for it.

    The loss is taken to be a log softmax, which needs as much as any.

    Args:
        module, args, kwargs: the call. No tensor of it is kept, nor the module.

    Known limitations: side effects of the module (prints, counters outside of it) happen once more, and so do the hooks
    of all modules (`register_module_forward_hook`). Autocast and workspaces of kernels are not counted.
    """

    def __init__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._module = weakref.ref(module)
        self._grad = in_step()
        self._found: Rehearsed | None = None
        shapes: dict[int, _Like] = {}
        self._given = tree_map(functools.partial(_shape_of, shapes), (args, kwargs))
        leaves = [leaf for leaf in tree_leaves(self._given) if not isinstance(leaf, _Like)]
        self._over = not all(isinstance(leaf, _HOLDS_NOTHING) for leaf in leaves)
        if self._over:  # it may hold tensors, and is as it is now only now
            self._found = self._rehearse(module)
            self._given = None

    def found(self) -> Rehearsed | None:
        """The figures; None: not known. A module cannot be rehearsed if it cannot be copied, looks at values, reads tensors that
        are no part of it and its arguments, is compiled, has C++ of its own, takes long, or may talk to other ranks."""
        module = self._module()
        if not self._over and module is not None:
            self._over, self._found = True, self._rehearse(module)
        return self._found

    def _rehearse(self, module: torch.nn.Module) -> Rehearsed | None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return None  # a collective would wait for ranks that have no error
        if type(module) in _too_long or not _busy.acquire(blocking=False):
            return None  # of an error inside a rehearsal
        found: list[Rehearsed] = []
        late = threading.Event()

        def run() -> None:
            with contextlib.suppress(Exception):  # it is for the text of another error
                found.append(_run(module, self._given, self._grad, late))

        drawn = _numbers_of_others()
        try:
            thread = threading.Thread(target=run, name=_THREAD, daemon=True)
            thread.start()
            thread.join(_PATIENCE_SECONDS)
            if thread.is_alive():
                late.set()
                _too_long.add(type(module))
        finally:
            drawn()
            _busy.release()
        return found[0] if found else None


@dataclass(frozen=True)
class _Like:
    """All that a rehearsal wants of a tensor."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    parameter: bool
    requires_grad: bool

    def make(self, mode: Any) -> Any:
        with mode:
            made: Any = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        if self.parameter:
            made = torch.nn.Parameter(made, requires_grad=self.requires_grad)
        return made.requires_grad_(self.requires_grad)


_HOLDS_NOTHING = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    torch.layout,
)


def _like(tensor: torch.Tensor) -> _Like:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or tensor.layout != torch.strided:
        raise TypeError(type(tensor))
    parameter = isinstance(tensor, torch.nn.Parameter)
    return _Like(tensor.size(), tensor.stride(), tensor.dtype, tensor.device, parameter, tensor.requires_grad)


def _shape_of(shapes: dict[int, _Like], leaf: Any) -> Any:
    """One object for each tensor; a leaf without such a shape is returned as it is, and ends the rehearsal."""
    if isinstance(leaf, torch.Tensor):
        with contextlib.suppress(TypeError):
            leaf = shapes.setdefault(id(leaf), _like(leaf))
    return leaf


def _frames() -> Iterator[FrameType]:
    """The frames of the calling thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def transformed() -> bool:
    """Is the calling thread in a transform of torch.func? A module's arguments there are parts of larger tensors.

    The frames tell: a transform is off torch's stack of them while an op of it runs.
    """
    return any(frame.f_globals.get("__name__") in _TRANSFORMS for frame in _frames())


def in_step() -> bool:
    """Are there gradients, or do they update something? An optimizer steps without recording any."""
    return torch.is_grad_enabled() or _in_function() or any(map(_updates, _frames()))


def _updates(frame: FrameType) -> bool:
    """Is it a method of an optimizer?"""
    code = frame.f_code
    return code.co_varnames[:1] == ("self",) and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer)


def _in_function() -> bool:
    """A Function's forward (a reentrant checkpoint's, AOTAutograd's) runs without gradients in a step that has them."""
    return any(frame.f_code is _APPLY or _has_context(frame) for frame in _frames())


def _has_context(frame: FrameType) -> bool:
    """Is it such a forward? Known limitation: not where `setup_context` has the context, from torch 2.14.1 on."""
    code = frame.f_code
    first = code.co_varnames[0] if code.co_argcount and code.co_name == "forward" else None
    return first is not None and isinstance(frame.f_locals.get(first), torch.autograd.function.FunctionCtx)


def _numbers_of_others() -> Callable[[], None]:
    """Puts the random numbers of Python and NumPy back where they are now; fake tensors draw none of torch's."""
    numpy, state = sys.modules.get("numpy"), random.getstate()
    numbers = numpy.random.get_state() if numpy is not None else None

    def put_back() -> None:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numbers)

    return put_back


def _run(module: torch.nn.Module, given: Any, grad: bool, late: threading.Event) -> Rehearsed:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    class Fakes(FakeTensorMode):
        # Else it sets up a guard instead of a GPU's: torch 2.11's dies with the thread, and the next thread's look at it crashes.
        avoid_device_init = False

    mode = Fakes(allow_non_fake_inputs=True)
    memo: dict[
        int, Any
    ] = {}  # made anew: torch's own conversion keeps weak references to a tensor, and one that has some cannot be swapped
    for tensor in _tensors_of(module):
        if id(tensor) not in memo:
            memo[id(tensor)] = _like(tensor).make(mode)
    alike = copy.deepcopy(module, memo)
    if not set(alike.modules()).isdisjoint(module.modules()):
        raise TypeError("a part that does not let itself be copied")
    for child in alike.modules():
        for name in list(child.__dict__):
            if name.endswith("_hooks"):
                child.__dict__[name].clear()
    made_of: dict[int, Any] = {}
    for leaf in tree_leaves(given):
        if isinstance(leaf, _Like) and id(leaf) not in made_of:
            made_of[id(leaf)] = leaf.make(mode)
    inputs = tree_map(lambda leaf: made_of.get(id(leaf), leaf), given)
    watch = _Watch({_key(t) for t in (*alike.parameters(), *alike.buffers())}, FakeTensor, late)
    with torch.set_grad_enabled(grad), mode, watch:
        outputs = [t for t in tree_leaves(alike(*inputs[0], **inputs[1])) if isinstance(t, torch.Tensor)]
        made = watch.made_bytes
        wanted = [t for t in outputs if t.requires_grad]
        losses = [t.log_softmax(-1).mean() if t.dim() else t for t in wanted]
        if losses:
            torch.autograd.backward(losses)
    given_bytes, returned_bytes = (sum(_storages(leaves).values()) for leaves in (tree_leaves(inputs), outputs))
    return Rehearsed(watch.most, watch.most_activations, given_bytes, made, returned_bytes)


def _tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The tensors that a copy would copy: parameters, buffers, and tensors in attributes."""
    for child in module.modules():
        for value in list(child.__dict__.values()):
            if isinstance(value, torch.Tensor | dict | list | tuple):
                yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Watch(TorchDispatchMode):
    def __init__(self, states: set[int], fake: type[torch.Tensor], late: threading.Event) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._states = states
        self._fake = fake
        self._late = late
        self.most = self.most_activations = self.made_bytes = 0
        self._made: dict[int, Any] = {}  # kept: an address would come again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # asked for by autograd's constructors, where an exception ends the process
            return func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if self._late.is_set() or (func not in _MAKES and not all(isinstance(t, self._fake) for t in given)):
            raise RuntimeError("nobody waits any more, or it would read or write what is the program's")
        out = func(*args, **(kwargs or {}))
        sizes = _storages((*tree_leaves((args, kwargs)), *tree_leaves(out)))
        times = next((times for name, times in _TAKES.items() if name in func.__name__), 1.0)
        self.most = max(self.most, int(times * sum(sizes.values())))
        rest = sum(size for key, size in sizes.items() if key not in self._states)
        self.most_activations = max(self.most_activations, int(times * rest))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and _key(tensor) not in self._made:
                self._made[_key(tensor)] = tensor
                self.made_bytes += sizes.get(_key(tensor), 0)
        return out


def _storages(leaves: Iterable[Any]) -> dict[int, int]:
    return {_key(t): t.untyped_storage().nbytes() for t in leaves if isinstance(t, torch.Tensor)}
