"""What an op was called with, as a recipe's arguments and as a kind (rules 5 and 7)."""

from __future__ import annotations

from typing import Any

import torch

from ._py_predict import is_plain
from ._py_table import Table
from ._py_types import Cell, Ref
from ._py_versions import C

_SWITCHES = [
    C._get_cudnn_enabled,
    C._get_cudnn_benchmark,
    C._get_cudnn_deterministic,
    C._get_mkldnn_enabled,
    C._get_mkldnn_deterministic,
    C._get_deterministic_algorithms,
    C._get_deterministic_algorithms_warn_only,
    C._get_deterministic_fill_uninitialized_memory,
    C._get_flash_sdp_enabled,
    C._get_mem_efficient_sdp_enabled,
    C._get_math_sdp_enabled,
    C._get_cudnn_sdp_enabled,
    C._get_cpu_allow_fp16_reduced_precision_reduction,
    torch.get_num_threads,
]
_PRECISIONS = {"none": 0, "ieee": 1, "tf32": 2, "bf16": 3}
_PER_OP_PRECISION = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 13)
_DENORMAL = 5e-324
_SCALAR_TYPES = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}


def numeric_switches() -> tuple[int, ...]:
    """The numeric switches in the order of `_circumstances.py` (rule 5)."""
    values = [int(switch()) for switch in _SWITCHES]
    # Nothing asks the processor's control word, but its effect can be seen.
    values.append(0x8040 if _DENORMAL * 1.0 == 0.0 else 0)
    values.append(_SCALAR_TYPES.get(torch.get_default_dtype(), -1))
    if _PER_OP_PRECISION:
        for backend in ("cuda", "mkldnn"):
            for op in ("conv", "rnn", "matmul"):
                values.append(_PRECISIONS[C._get_fp32_precision_getter(backend, op)])
    else:
        values.append(["highest", "high", "medium"].index(torch.get_float32_matmul_precision()))
        values.append(int(C._get_cudnn_allow_tf32()))
    return tuple(values)


SNAPSHOT_BYTES = 256 * 1024


class NotPlain(Exception):
    """A tensor that a ref cannot describe."""


class Encoder:
    """Arguments with tensors replaced by refs, and what kind of op that is (rule 7)."""

    __slots__ = ("cells", "copies", "native", "ok")

    def __init__(self, native: Table) -> None:
        self.native = native
        self.cells: list[Cell] = []
        self.copies: list[Cell] = []  # private ones among them
        self.ok = True  # every input can be had again

    def value(self, value: Any, key: list[Any]) -> Any:
        kind = type(value)
        if value is None or kind is int or kind is float or kind is bool:
            # Only the key's hash is kept, and to Python's hash -1 and -2 are the same: no two of these are.
            key.append((kind, value.hex() if kind is float else value if value is None else 2 * value + 1))
            return value
        if isinstance(value, torch.Tensor):
            native = self.native
            if not is_plain(value) or value.is_inference():
                raise NotPlain
            cell = native._lookup(value)
            if cell.blank or cell.lost or (cell.recipe is not None and not cell.recipe.ok and cell.strong is None):
                self.ok = False
            if cell.exposed:
                # Others can write there unseen: a small one is copied for the recipe, a large one has no recipe (rule 6).
                copy = native._private_copy(cell) if cell.nbytes <= SNAPSHOT_BYTES else None
                if copy is None:
                    self.ok = False
                else:
                    self.copies.append(copy)
                    cell = copy
            cell.last_access = native._clock
            self.cells.append(cell)
            key.append((value.dtype, value.device, value.size(), value.stride()))
            return Ref(value, cell, False)
        if kind is tuple or kind is list:
            key.append((kind, len(value)))
            items = [self.value(item, key) for item in value]
            return tuple(items) if kind is tuple else items
        try:
            key.append((kind, hash(value)))
        except TypeError:
            key.append(kind)
        return value
