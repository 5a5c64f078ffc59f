"""What kind of op is this: may it be recorded, does it write, does it draw random numbers (rules 2, 4, 6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

VIEW, PURE, SLOW, OPAQUE = range(4)

# Only these namespaces are ever run a second time (rule 6): their ops do what their schema says, or are listed below.
REPLAYABLE_NAMESPACES = frozenset({"aten", "prims"})

# Memory whose contents are undefined: not a recipe for anything, only a place for a write to fill.
BLANK = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::empty_permuted",
        "aten::_empty_affine_quantized",
        "aten::empty_quantized",
    }
)

# In-place ops that never read what was there: on a tensor that covers its storage, the old contents do not matter.
OVERWRITERS = frozenset(
    {
        "aten::fill_",
        "aten::zero_",
        "aten::copy_",
        "aten::normal_",
        "aten::uniform_",
        "aten::bernoulli_",
        "aten::random_",
        "aten::exponential_",
        "aten::geometric_",
        "aten::log_normal_",
        "aten::cauchy_",
    }
)

# Batch norm's running statistics move once a step, although (in the older ops) the schema hides the write (rule 2).
# name -> (position of running_mean, of running_var, of `training`). `_batch_norm_with_update` is not here: what would
# replace it without statistics crashes, so its outputs are offload only.
BATCH_NORM: dict[str, tuple[int, int, int]] = {
    "aten::native_batch_norm": (3, 4, 5),
    "aten::_native_batch_norm_legit": (3, 4, 5),
    "aten::cudnn_batch_norm": (3, 4, 5),
    "aten::miopen_batch_norm": (3, 4, 5),
}

# Change the storage itself or who owns it: never replayed, always a write (rule 3).
STORAGE_OPS = frozenset(
    {
        "aten::set_",
        "aten::resize_",
        "aten::resize_as_",
        "aten::_resize_output_",
        "aten::swap_",
        "aten::share_memory_",
        "aten::storage_",
    }
)

# Written to by their schema only: the bytes stay what they are, and running them again means nothing.
REMARKS = frozenset({"aten::record_stream"})

# Atomic additions on CUDA: other bits each time unless deterministic algorithms are on. Offload only (rule 7).
CUDA_NONDETERMINISTIC = frozenset(
    {
        "aten::scatter_add",
        "aten::index_add",
        "aten::scatter_reduce",
        "aten::index_put",
        "aten::put",
        "aten::histc",
        "aten::bincount",
        "aten::embedding_bag",
        "aten::_embedding_bag",
        "aten::grid_sampler_2d_backward",
        "aten::upsample_bilinear2d_backward",
        "aten::cumsum",
        "aten::_ctc_loss",
    }
)

# They read memory that nobody has written (lstsq: LAPACK's pivots): other bits each time, on every device.
NONDETERMINISTIC = frozenset({"aten::linalg_lstsq"})

# Functional ops whose result is not a function of arguments and generator alone, or which keep state of their own.
NEVER_REPLAY = frozenset(
    {
        "aten::_cudnn_init_dropout_state",
        "aten::_cudnn_rnn",
        "aten::miopen_rnn",
        "aten::rrelu_with_noise",  # writes its noise argument
        "aten::_fused_moving_avg_obs_fq_helper",
        "aten::_to_cpu",
        "aten::_pin_memory",
    }
)

# Higher-order ops that are functional by construction: they cannot write to what they are given.
FUNCTIONAL_HOPS = frozenset(
    {"cond", "while_loop", "scan", "associative_scan", "map_impl", "flex_attention", "flex_attention_backward"}
)


@dataclass(slots=True)
class Op:
    """What is known about one op overload."""

    func: Any
    call: Callable[..., Any]
    name: str
    cls: int
    seeded: bool = False
    takes_generator: bool = False
    blank: bool = False
    overwriter: bool = False
    batch_norm: tuple[int, int, int] | None = None
    storage_op: bool = False
    replayable: bool = True
    written_args: tuple[int, ...] = ()
    written_kwargs: tuple[str, ...] = ()

    @property
    def writes(self) -> bool:
        return bool(self.written_args or self.written_kwargs)


def describe(func: Any) -> Op:
    """Classifies an op overload or a higher-order op."""
    if not isinstance(func, torch._ops.OpOverload):
        name = getattr(func, "_name", None) or getattr(func, "__name__", str(func))
        op = Op(func, func, str(name), OPAQUE, replayable=False)
        if name in FUNCTIONAL_HOPS:
            op.written_kwargs = ("\0nothing",)  # a written argument that no call has: opaque, but writes to nothing
        return op
    schema = func._schema
    name = schema.name
    written_args = tuple(
        i for i, a in enumerate(schema.arguments) if not a.kwarg_only and a.alias_info and a.alias_info.is_write
    )
    # A written argument may also be passed by its name.
    written_kwargs = tuple(a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write)
    op = Op(
        func,
        func._op,
        name,
        PURE,
        seeded=torch.Tag.nondeterministic_seeded in func.tags,
        takes_generator=any(a.name == "generator" for a in schema.arguments),
        blank=name in BLANK,
        overwriter=name in OVERWRITERS,
        batch_norm=BATCH_NORM.get(name),
        storage_op=name in STORAGE_OPS,
        written_args=written_args,
        written_kwargs=written_kwargs,
    )
    if name == "aten::_native_batch_norm_legit" and func._overloadname != "default":
        op.batch_norm = None
    if func.namespace not in REPLAYABLE_NAMESPACES:
        op.cls, op.replayable = OPAQUE, False
        op.written_args = op.written_kwargs = ()  # whatever it was given counts as written (rule 6)
        return op
    if name in REMARKS:
        op.cls = VIEW
        op.written_args = op.written_kwargs = ()
        return op
    if name in NEVER_REPLAY:
        op.cls, op.replayable = OPAQUE, False
        return op
    if op.batch_norm is not None:
        op.cls = SLOW
        mean, var, _ = op.batch_norm
        op.written_args = (mean, var)
        names = [a.name for a in schema.arguments]
        op.written_kwargs = (names[mean], names[var])
        return op
    if op.storage_op or written_args or written_kwargs:
        op.cls = SLOW
        if op.storage_op and not written_args:
            op.written_args = (0,)
        return op
    if name in NONDETERMINISTIC or (name in CUDA_NONDETERMINISTIC and torch.cuda.is_available()):
        op.cls, op.replayable = OPAQUE, False
        op.written_kwargs = ("\0nothing",)
        return op
    if op.seeded or op.blank:
        op.cls = SLOW
        return op
    if func.is_view:
        op.cls = VIEW
    return op


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in nested arguments. No generator: an interrupt that meets the end of one is swallowed by Python."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []
