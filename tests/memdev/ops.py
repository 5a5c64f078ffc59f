"""PyTorch's operator database on memdev and on the CPU: the same bits, forward, in place and backward.

By hand: ``python -m memdev.child memdev.ops sweep '{"index": 0, "count": 1}'`` in ``tests``.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from memdev import start

SAMPLES = {torch.float32: 4, torch.bfloat16: 2, torch.complex64: 2, torch.int64: 2}

EXCUSED = {
    "empty": "leaves memory as it is, as do the others of its kind",
    "empty_like": "",
    "empty_permuted": "",
    "empty_strided": "",
    "new_empty": "",
    "new_empty_strided": "",
    "linalg.lstsq": "reads memory that nobody wrote",
    "linalg.pinv": "LAPACK's complex results depend on where its buffers lie",
    "sparse.sampled_addmm": "sparse layouts are not supported",
    "sparse.mm": "sparse layouts are not supported",
    "to_sparse": "sparse layouts are not supported",
    "tensor_split": "wants its indices on the CPU",
    "chalf": "the CPU computes little in it",
    "sgn": "one of its gradients has no bytes to compare",
    "nn.functional.linear_cross_entropy": "puts its chunks together in another way on other devices than the CPU",
}


def sweep(index: int, count: int) -> dict[str, Any]:
    """Runs the ``index``-th of ``count`` shares of the ops. Returns the differences, and the number of samples compared."""
    warnings.simplefilter("ignore")
    start("random", seed=index)
    wrong: list[str] = []
    compared = 0
    for op in op_db:
        if op.name in EXCUSED or zlib.crc32(op.name.encode()) % count != index:
            continue
        for dtype in SAMPLES:
            if dtype not in op.dtypes:
                continue
            grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
            for kind, function in (("plain", op.op), ("in place", op.inplace_variant)):
                if function is None or (kind == "in place" and grad and not op.supports_inplace_autograd):
                    continue
                torch.manual_seed(0)
                samples = op.sample_inputs("cpu", dtype, requires_grad=grad)
                for number, sample in enumerate(islice(samples, SAMPLES[dtype])):
                    try:
                        want = _run(function, sample, "cpu")
                    except Exception:
                        continue  # samples that the CPU refuses, such as views of one element written in place
                    name = f"{op.name} {op.variant_test_name} {dtype} {kind} {number}"
                    try:
                        got = _run(function, sample, "memdev")
                    except Exception as error:
                        wrong.append(f"{name}: {type(error).__name__}: {error}")
                        continue
                    compared += 1
                    if want != got:
                        wrong.append(f"{name}: other bits")
    return {"compared": compared, "wrong": wrong}


def _run(function: Callable[..., Any], sample: Any, device: str) -> list[tuple[object, ...]]:
    """Results and gradients as bytes."""

    leaves: list[Tensor] = []

    def fresh(value: Any) -> Any:
        if isinstance(value, Tensor):
            value = value.detach().clone().to(device).requires_grad_(value.requires_grad)
            if value.requires_grad:
                leaves.append(value)
                value = value * 1  # an argument can be written in place
            return value
        return device if isinstance(value, torch.device) or value == "cpu" else value

    torch.manual_seed(0)
    given, args, kwargs = tree_map(fresh, (sample.input, sample.args, sample.kwargs))
    results = [t for t in tree_leaves(function(given, *args, **kwargs)) if isinstance(t, Tensor)]
    ends = [t for t in results if t.requires_grad]
    gradients: list[Tensor | None] = []
    if ends and leaves:
        gradients = list(torch.autograd.grad(ends, leaves, [torch.ones_like(t) for t in ends], allow_unused=True))
    return [_bits(t) for t in (*results, *gradients) if t is not None]


def _bits(tensor: Tensor) -> tuple[object, ...]:
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return (
        str(host.dtype),
        tuple(host.shape),
        host.flatten().view(torch.uint8).numpy().tobytes() if host.numel() else b"",
    )
