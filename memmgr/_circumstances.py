"""The numeric switches that belong to a recipe (rule 5): the shim reads them, this module puts them back.

The order of values is that of `circumstances()` in `allocator/shim/recorder.cpp`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

C: Any = torch._C


def _set_deterministic(mode: int, warn_only: int) -> None:
    C._set_deterministic_algorithms(bool(mode), warn_only=bool(warn_only))


def _set_flush_denormal(bits: int) -> None:
    torch.set_flush_denormal(bool(bits))


# at::ScalarType
_DEFAULT_DTYPES: dict[int, torch.dtype] = {
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    15: torch.bfloat16,
}

_SETTERS: list[Callable[[int], Any] | None] = [
    lambda v: C._set_cudnn_enabled(bool(v)),
    lambda v: C._set_cudnn_benchmark(bool(v)),
    lambda v: C._set_cudnn_deterministic(bool(v)),
    lambda v: C._set_mkldnn_enabled(bool(v)),
    lambda v: C._set_mkldnn_deterministic(bool(v)),
    None,  # deterministic algorithms: set together with warn-only
    None,
    lambda v: C._set_deterministic_fill_uninitialized_memory(bool(v)),
    lambda v: C._set_sdp_use_flash(bool(v)),
    lambda v: C._set_sdp_use_mem_efficient(bool(v)),
    lambda v: C._set_sdp_use_math(bool(v)),
    lambda v: C._set_sdp_use_cudnn(bool(v)),
    lambda v: C._set_cpu_allow_fp16_reduced_precision_reduction(bool(v)),
    lambda v: torch.set_num_threads(int(v)),
    _set_flush_denormal,
    lambda v: torch.set_default_dtype(_DEFAULT_DTYPES[v]),
]

# Float32 precision per backend and op, in the order of the shim; the enum's values are those of at::Float32Precision.
_PRECISION_SLOTS = [
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("cuda", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
    ("mkldnn", "matmul"),
]
_PRECISION_NAMES = ["none", "ieee", "tf32", "bf16"]


def _apply(now: Sequence[int], then: Sequence[int]) -> None:
    if now[5] != then[5] or now[6] != then[6]:
        _set_deterministic(then[5], then[6])
    for i, setter in enumerate(_SETTERS):
        if setter is not None and now[i] != then[i]:
            setter(then[i])
    rest_now, rest_then = now[len(_SETTERS) :], then[len(_SETTERS) :]
    if rest_now == rest_then:
        return
    if len(rest_then) == len(_PRECISION_SLOTS):
        for (backend, op), a, b in zip(_PRECISION_SLOTS, rest_now, rest_then, strict=True):
            if a != b:
                C._set_fp32_precision_setter(backend, op, _PRECISION_NAMES[b])
    else:
        C._set_float32_matmul_precision(["highest", "high", "medium"][rest_then[0]])
        C._set_cudnn_allow_tf32(bool(rest_then[1]))


def put(native: Any, wanted: int) -> None:
    """The switches are those of environment `wanted`."""
    now, then = native.environment_values(native.environment()), native.environment_values(wanted)
    _apply(now, then)
    if native.environment() != wanted:
        raise RuntimeError(
            "memmgr: cannot restore the numeric switches that a saved tensor was computed under: "
            f"wanted {then}, have {native.environment_values(native.environment())}"
        )


def put_back(native: Any, before: int) -> None:
    """The switches are those of environment `before`, also from half-way, where Ctrl-C came in between."""
    _apply(native.environment_values(native.environment()), native.environment_values(before))
