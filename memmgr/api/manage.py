"""`ManagedTensor`: a tensor whose bytes may be on the device or below it; any op brings them back."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from . import budget as budgets
from .keywords import known_keywords


class ManagedTensor(torch.Tensor):
    """A tensor that memmgr may evict between uses. Made by `memmgr.manage`.

    For tensors that user code or an optimizer holds: AdamW's moments, a teacher's outputs, a replay buffer. Activations
    do not need it. Shapes, dtypes and results are those of the tensor that it was made from; in-place ops change it.

    Known limitations: it takes part in autograd as a leaf that needs no gradient; `data_ptr()` and extensions that take
    raw pointers do not see it (call `.to_tensor()` first); it costs 10 to 20 us an op.
    """

    _plain: torch.Tensor

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> ManagedTensor:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            tensor.size(),
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
            layout=tensor.layout,
            device=tensor.device,
            requires_grad=False,
        )
        return self

    def __init__(self, tensor: torch.Tensor) -> None:
        self._plain = tensor.detach()
        self._let_go()

    def _let_go(self) -> None:
        """The bytes go below, if a budget is open."""
        runtime = budgets.current()
        if runtime is not None:
            runtime.put_below(self._plain)

    def to_tensor(self) -> torch.Tensor:
        """An ordinary tensor with these bytes (shared, not copied)."""
        return self._plain

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        raise NotImplementedError("ManagedTensor is not traced")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ManagedTensor({self._plain!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        used: dict[int, ManagedTensor] = {}

        def plain(value: Any) -> Any:
            if isinstance(value, ManagedTensor):
                used[id(value._plain)] = value
                return value._plain
            return value

        args, kwargs = tree_map(plain, args), tree_map(plain, kwargs or {})
        out = func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable:
            out = tree_map(lambda v: used.get(id(v), v) if isinstance(v, torch.Tensor) else v, out)
        for owner in used.values():
            owner._let_go()
        return out


@known_keywords("memmgr.manage")
def manage(tensor: torch.Tensor) -> ManagedTensor:
    """Hands a tensor over: between uses its bytes live in the tier below, and any op restores them.

    A hint, rarely needed: every tensor on a budget's device may be evicted. This one is evicted after each op that used
    it. Without an open budget the result behaves like the tensor.

    Args:
        tensor: a dense tensor on the budget's device that needs no gradient.

    Returns:
        A `ManagedTensor` of the same shape and dtype.

    Raises:
        TypeError: not a dense tensor, or one that is to be conjugated or negated when an op reads it (`z.conj()`).
        ValueError: it needs a gradient.
    """
    if isinstance(tensor, ManagedTensor):
        return tensor
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        got = f"a tensor of layout {tensor.layout}" if isinstance(tensor, torch.Tensor) else repr(type(tensor).__name__)
        raise TypeError(f"memmgr.manage takes a dense tensor; got {got}")
    if tensor.is_conj() or tensor.is_neg():  # below a subclass torch does neither
        raise TypeError("memmgr.manage takes a tensor of its own bytes: call resolve_conj() or resolve_neg() first")
    if tensor.requires_grad:
        raise ValueError("memmgr.manage takes tensors that need no gradient: optimizer state, buffers, data")
    return ManagedTensor(tensor)
