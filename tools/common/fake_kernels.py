"""Makes a script on fake tensors of the CPU behave as on an accelerator, or as without tracing."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def without_tracing() -> Iterator[None]:
    """transformers takes fake tensors for torch.export's and then makes masks that a real step does without."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    if masks is None:
        yield
        return
    packed, masks.find_packed_sequence_indices = masks.find_packed_sequence_indices, lambda position_ids: None
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = packed


@contextlib.contextmanager
def modules_convert() -> Iterator[None]:
    """`module.bfloat16()` swaps fake parameters with others, which fails for each that torch itself refers to weakly."""
    swap: Any = torch.utils.swap_tensors

    def moved(one: Tensor, other: Tensor) -> None:
        if isinstance(one, FakeTensor) and isinstance(other, FakeTensor):
            one.data = other.data
        else:
            swap(one, other)

    torch.utils.swap_tensors = moved
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap


class _Functions(TorchFunctionMode):
    """Calls that the CPU would answer with other kernels than an accelerator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {key: _on_cpu(value) for key, value in (kwargs or {}).items()}
        if func is Tensor.cuda:
            return args[0].to("cpu")
        if func is torch.nn.functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs.pop("dropout_p", None)  # drawn inside the kernel: no mask in memory
        elif func is torch.nn.functional.dropout and not kwargs.get("inplace"):
            given = dict(zip(("input", "p", "training"), args[:3], strict=False)) | kwargs
            return torch.native_dropout(given["input"], given.get("p", 0.5), given.get("training", True))[0]
        return func(*map(_on_cpu, args), **kwargs)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


@contextlib.contextmanager
def as_accelerator() -> Iterator[None]:
    """Makes a script on fake tensors of the CPU behave as on an accelerator."""
    optimizer: Any = importlib.import_module("torch.optim.optimizer")
    autocast: Any = torch.amp.autocast_mode.autocast
    begin = autocast.__init__

    def on_cpu(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        cuda = device_type == "cuda"
        begin(self, "cpu" if cuda else device_type, dtype or (torch.float16 if cuda else None), *args, **kwargs)

    lists = optimizer._get_foreach_kernels_supported_devices
    optimizer._get_foreach_kernels_supported_devices = lambda: [*lists(), "cpu"]
    optimizer._foreach_supported_types.append(FakeTensor)
    autocast.__init__ = on_cpu
    try:
        with _Functions():
            yield
    finally:
        optimizer._get_foreach_kernels_supported_devices = lists
        optimizer._foreach_supported_types.remove(FakeTensor)
        autocast.__init__ = begin
