"""PyTorch's databases of operators: every operator in every dtype that the CPU has for it.

`tests/ops` runs the share that can be differentiated, in four dtypes. Here are all: integers, bool and half precision, ops
without a derivative, forward mode, higher-order ops (`hop_db`) and custom functions (`autograd_function_db`). One test is one
operator in one dtype: the samples forward, with the gradients that it has, written to `out=`, and in forward mode.
"""

import zlib
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from ops import sweep
from torch.autograd import forward_ad
from torch.testing._internal.autograd_function_db import autograd_function_db
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.hop_db import hop_db
from torch.utils._pytree import tree_flatten, tree_map

from foreign.recorder import RECORDER

SAMPLES = 4


def _cases(database: list[Any], name: str) -> list[Any]:
    found = {}
    for op in database:
        for dtype in op.supported_dtypes("cpu"):
            found[f"{name}-{sweep.full_name(op)}-{str(dtype).removeprefix('torch.')}"] = (op, dtype)
    return [pytest.param(op, dtype, id=key) for key, (op, dtype) in sorted(found.items())]


def _call(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value, args, kwargs: function(value, *args, **kwargs)


def _into_out(function: Callable[..., Any]) -> Callable[..., Any]:
    """Runs the op twice: its results are where the second run writes."""

    def call(value: Any, args: Any, kwargs: Any) -> Any:
        out = tree_map(
            lambda t: torch.empty_like(t) if isinstance(t, torch.Tensor) else t, function(value, *args, **kwargs)
        )
        function(value, *args, **kwargs, out=out)
        return out

    return call


def _forward_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(value: Any, args: Any, kwargs: Any) -> Any:
        with forward_ad.dual_level():

            def dual(t: Any) -> Any:
                if isinstance(t, torch.Tensor) and t.requires_grad and t.layout is torch.strided:
                    return forward_ad.make_dual(t.detach(), torch.full_like(t, 0.5))
                return t

            out = function(dual(value), *tree_map(dual, args), **tree_map(dual, kwargs))
            return [tuple(forward_ad.unpack_dual(t)) for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)]

    return call


def _check(op: Any, dtype: torch.dtype, note: Callable[[str, Any], None]) -> None:
    differentiable = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    ways = {"forward": (_call(op.op), differentiable)}
    if op.supports_out and not differentiable:
        ways["out"] = (_into_out(op.op), False)
    if op.inplace_variant is not None and not differentiable:
        ways["inplace"] = (_call(op.inplace_variant), False)
    if op.supports_forward_ad and differentiable and dtype is torch.float32:
        ways["forward mode"] = (_forward_mode(op.op), True)
    for way, (function, with_gradients) in ways.items():
        sweep._seed_all(zlib.crc32(f"{sweep.full_name(op)} {dtype}".encode()))
        with sweep.quiet_op():
            samples = list(islice(op.sample_inputs("cpu", dtype, requires_grad=with_gradients), SAMPLES))
        for index, sample in enumerate(samples):
            if way == "inplace" and sample.broadcasts_input:
                continue
            given = (sample.input, tuple(sample.args), dict(sample.kwargs))
            case = sweep.Case(sweep.full_name(op), dtype, way, index, function, given, sample.output_process_fn_grad)
            with RECORDER.inside():
                found = sweep.run(case).entries
            found.pop("text", None)  # the text of an error names sizes and addresses of the run
            for name, value in found.items():
                note(f"{way} {index} {name}", value)


@pytest.mark.parametrize(("op", "dtype"), _cases(op_db, "op_db"))
def test_operator(op: Any, dtype: torch.dtype, note: Any) -> None:
    _check(op, dtype, note)


@pytest.mark.parametrize(("op", "dtype"), _cases(hop_db, "hop_db"))
def test_higher_order(op: Any, dtype: torch.dtype, note: Any) -> None:
    torch._dynamo.reset()
    _check(op, dtype, note)


@pytest.mark.parametrize(("op", "dtype"), _cases(autograd_function_db, "autograd_function_db"))
def test_function(op: Any, dtype: torch.dtype, note: Any) -> None:
    _check(op, dtype, note)
