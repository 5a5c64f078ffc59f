"""Compares the bytes of an op's undeclared arguments before and after it."""

import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from . import sweep
from .state_arguments import is_write


@functools.cache
def _positions(op: Any) -> tuple[list[str], set[str]]:
    """The names of the op's arguments, and the names of those that it declares to write."""
    arguments = op._schema.arguments
    return [a.name for a in arguments], {a.name for a in arguments if is_write(a)}


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of all strided tensors in an argument. A tensor that only stands for zeros has a storage without memory."""
    for t in tree_flatten(value)[0]:
        if (
            isinstance(t, torch.Tensor)
            and t.layout is torch.strided
            and not (t.is_nested or t.is_meta or t._is_zerotensor())
        ):
            with suppress(RuntimeError, NotImplementedError):  # a wrapper, or of a library: without bytes of its own
                yield t.untyped_storage()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Watch(TorchDispatchMode):
    """Below autograd: `found` counts (op, argument) that changed without a declaration, `seen` the calls of each op."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, str]] = Counter()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names, declared = _positions(op)
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        may_change = {s._cdata for name in declared for s in _storages(given.get(name))}
        before: dict[int, tuple[str, torch.UntypedStorage, torch.Tensor]] = {}
        for name, value in given.items():
            if name in declared:
                continue
            for storage in _storages(value):
                if storage.nbytes() and storage._cdata not in may_change and storage._cdata not in before:
                    before[storage._cdata] = name, storage, _bytes_of(storage).clone()
        result = op(*args, **(kwargs or {}))
        self.seen[op._schema.name] += 1
        for name, storage, old in before.values():
            if storage.nbytes() != old.numel() or not torch.equal(_bytes_of(storage), old):
                self.found[op._schema.name, name] += 1
        return result


def watch_op(watch: Watch, info: Any, device: str, samples: int) -> None:
    """Runs some samples of an entry of torch's operator database, forward and backward."""
    dtypes = info.supported_dtypes(device)
    if not dtypes:
        return
    dtype = next((d for d in (torch.float32, torch.complex64, torch.int64) if d in dtypes), None) or min(
        dtypes, key=str
    )
    backward = info.supports_autograd and dtype in info.supported_backward_dtypes(device)
    sweep._seed_all(0)
    with sweep.quiet_op():
        given = list(islice(info.sample_inputs(device, dtype, requires_grad=backward), samples))
    for sample in given:
        _watched(watch, lambda s=sample: info.op(s.input, *s.args, **s.kwargs), sample.output_process_fn_grad)


def _watched(watch: Watch, call: Callable[[], Any], finish: Callable[[Any], Any] = lambda out: out) -> None:
    """Runs the call and its backward. A sample may raise without memmgr, too: the ops until then have been compared."""
    with suppress(RuntimeError, NotImplementedError, TypeError), sweep.quiet_op(), watch:
        loss = sweep._loss(finish(call()))
        if loss is not None:
            loss.backward()


def _optimizers(device: str) -> Iterator[Callable[[], Any]]:
    """The fused steps, whose arguments are lists of states."""
    for make in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
        p = torch.nn.Parameter(torch.ones(8, device=device))
        p.grad = torch.ones_like(p)
        more = {"momentum": 0.9} if make is torch.optim.SGD else {}
        yield make([p], lr=0.1, fused=True, **more).step


def _batch_norms(device: str) -> Iterator[Callable[[], Any]]:
    """Training with statistics, directly: torch's own function is a composite that chooses among libraries."""
    x = torch.randn(4, 3, 8, 8, device=device, requires_grad=True)
    weight, bias, mean, variance = (torch.rand(3, device=device) for _ in range(4))
    yield lambda: torch.native_batch_norm(x, weight, bias, mean, variance, True, 0.1, 1e-5)
    yield lambda: torch.batch_norm_update_stats(x.detach(), mean, variance, 0.1)
    yield lambda: torch.nn.functional.batch_norm(x, mean, variance, weight, bias, True)
    if device == "cuda":
        yield lambda: torch.cudnn_batch_norm(x, weight, bias, mean, variance, True, 0.1, 1e-5)


def _recurrent(device: str) -> Iterator[Callable[[], Any]]:
    """Layers with dropout between them, forward and backward."""
    x = torch.randn(5, 2, 8, device=device)
    for make in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
        layer = make(8, 8, num_layers=2, dropout=0.5).to(device)
        yield lambda layer=layer: layer(x)[0]
    for cell in (torch.nn.LSTMCell, torch.nn.GRUCell):
        one = cell(8, 8).to(device)
        yield lambda one=one: one(x[0])


def _scaled_steps(device: str) -> Iterator[Callable[[], Any]]:
    """A step with torch.amp's scaled gradients."""
    scaler = torch.amp.GradScaler(device)
    p = torch.nn.Parameter(torch.ones(8, device=device))
    optimizer = torch.optim.SGD([p], lr=0.1)

    def step() -> None:
        scaler.scale(p.sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    yield step


def _quantized(device: str) -> Iterator[Callable[[], Any]]:
    """Convolutions that add to a quantized tensor (the CPU alone)."""
    if device != "cpu" or "onednn" not in torch.backends.quantized.supported_engines:
        return
    before, torch.backends.quantized.engine = torch.backends.quantized.engine, "onednn"
    try:
        x, other = (torch.quantize_per_tensor(torch.rand(1, 4, 8, 8), 0.1, 0, torch.quint8) for _ in range(2))
        weight = torch.quantize_per_tensor(torch.randn(4, 4, 3, 3), 0.05, 0, torch.qint8)
        packed = torch.ops.quantized.conv2d_prepack(weight, torch.zeros(4), [1, 1], [1, 1], [1, 1], 1)
        for op in (torch.ops.quantized.conv2d_add, torch.ops.quantized.conv2d_add_relu):
            accumulated = other.clone(memory_format=torch.channels_last)
            yield lambda op=op, accumulated=accumulated: op(x, accumulated, packed, 0.2, 3)
    finally:
        torch.backends.quantized.engine = before


def watch_programs(watch: Watch, device: str) -> None:
    """Runs programs that the operator database lacks: libraries' own layers, fused steps, gradients' scales, packed weights."""
    random.seed(0)
    torch.manual_seed(0)
    with sweep.quiet_op():
        for programs in (_batch_norms, _recurrent, _optimizers, _scaled_steps, _quantized):
            for program in programs(device):
                _watched(watch, program)
