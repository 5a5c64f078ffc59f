"""What an op is going to need, asked before it runs: learned from earlier calls, else from its shape function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._ops import tensors_in
from ._py_versions import C, quiet

_dispatch_keys = C._dispatch_keys
_SCALARS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_OUTLANDISH = [
    getattr(C.DispatchKey, name)
    for name in ("Python", "FuncTorchBatched", "FuncTorchGradWrapper", "Functionalize", "ZeroTensor", "NestedTensor")
    if hasattr(C.DispatchKey, name)
]
# Their shape functions leave out a workspace that is kept for backward.
_WORKSPACES = frozenset({"aten::mkldnn_rnn_layer", "aten::_cudnn_rnn", "aten::miopen_rnn"})
_plain: dict[int, bool] = {}


def is_plain(tensor: Any) -> bool:
    """Dense strided memory on a device, and nothing that carries more than sizes and strides."""
    keys = _dispatch_keys(tensor)
    raw = keys.raw_repr()
    known = _plain.get(raw)
    if known is None:
        known = _plain[raw] = (
            keys.has(C.DispatchKey.Dense)
            and not any(keys.has(key) for key in _OUTLANDISH)
            and tensor.layout is torch.strided
            and (tensor.device.type == "cpu" or tensor.device.type == _accelerator())
            and not tensor.is_quantized
        )
    return known


def _accelerator() -> str:
    """The type of this process's accelerator; empty: it has none."""
    return str(C._get_accelerator().type) if torch.accelerator.is_available() else ""


def makes_on(device: torch.device, args: Any, kwargs: Any) -> bool:
    """Will an op with these arguments make its results there?"""
    asked = (kwargs or {}).get("device")
    if asked is not None:
        where = torch.device(asked)
        return where.type == device.type and (":" not in str(where) or where == device)
    return any(tensor.device == device for tensor in tensors_in([args, kwargs or {}]))


def is_dense(tensor: torch.Tensor) -> bool:
    """The elements fill their range without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class Recent(dict[Any, Any]):
    """A cache that keeps what was asked for last: scripts whose shapes never repeat must not fill the memory."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def take(self, key: Any) -> Any:
        """The entry, which is the youngest now, or None."""
        found = self.pop(key, None)
        if found is not None:
            self[key] = found
        return found

    def put(self, key: Any, value: Any) -> None:
        """Enters it as the youngest; the oldest goes when there are too many."""
        self.pop(key, None)
        self[key] = value
        if len(self) > self._limit:
            del self[next(iter(self))]


class Predictions:
    """Bytes that ops make, by kind: op, shapes, dtypes, and the other arguments."""

    LIMIT = 1024

    def __init__(self) -> None:
        self._sizes = Recent(self.LIMIT)  # kind -> (bytes, always the same so far)
        self.device = torch.device("cpu")
        self.taken: Callable[[int], int] = int

    def is_about(self, device: torch.device, taken: Callable[[int], int]) -> None:
        """Whose bytes are asked for, and what its allocator takes for so many; what was learned of another is forgotten."""
        if device != self.device:
            self._sizes.clear()
        self.device, self.taken = device, taken

    def key(self, func: Any, args: Any, kwargs: Any) -> Any:
        # An optimizer's numbers change at every step and say nothing of sizes; those of a factory may.
        rough = any(isinstance(value, torch.Tensor | list | tuple) for value in args)
        named = tuple((name, _part(value, rough)) for name, value in kwargs.items()) if kwargs else ()
        return func, _part(args, rough), named

    def ask(self, key: Any, func: Any, args: Any, kwargs: Any) -> tuple[int, bool]:
        """(bytes, whether that is sure)."""
        known: tuple[int, bool] | None = self._sizes.take(key)
        if known is not None:
            return known
        if self.device.type != "cpu" and not makes_on(self.device, args, kwargs):
            return 0, True
        shadow = _meta_bytes(func, args, kwargs, self.taken)
        if shadow is not None:
            return shadow, True
        # Nothing is known: as much as it was given.
        given = [args, kwargs or {}]
        return sum(t.numel() * t.element_size() for t in tensors_in(given) if is_plain(t)), False

    def learn(self, key: Any, made: int) -> None:
        known = self._sizes.get(key)
        if known is None:
            self._sizes.put(key, (made, True))
        elif known[0] != made:
            self._sizes[key] = (max(made, known[0]), False)  # depends on the data


def _part(value: Any, rough: bool) -> Any:
    kind = type(value)
    if kind is float and rough:
        return kind
    if kind in _SCALARS:
        return (kind, value)
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.size(), value.device) if is_plain(value) else kind
    if kind is tuple or kind is list:
        return tuple(_part(item, rough) for item in value)
    return kind


def _meta_bytes(func: Any, args: Any, kwargs: Any, taken: Callable[[int], int]) -> int | None:
    """The bytes that an op will make, from its shape function; None when it has none."""
    if getattr(func, "namespace", "") not in ("aten", "prims") or func._schema.name in _WORKSPACES:
        return None
    given: set[int] = set()

    def shadow(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            twin = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
            given.add(twin.untyped_storage()._cdata)
            return twin
        if isinstance(value, torch.device):
            return torch.device("meta")
        if isinstance(value, list | tuple):
            return type(value)([shadow(item) for item in value])
        return value

    silence = quiet()
    try:
        with C._AutoDispatchBelowAutograd():
            twins, named = shadow(args), {key: shadow(value) for key, value in (kwargs or {}).items()}
            if not given:
                named["device"] = torch.device("meta")  # a factory
            out = func(*twins, **named)
            made = {
                s._cdata: taken(s.nbytes()) for t in tensors_in(out) if (s := t.untyped_storage())._cdata not in given
            }
    except Exception:
        return None
    finally:
        del silence
    return sum(made.values())
