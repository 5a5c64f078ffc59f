"""Which tensors a backward pass will read, derived from the names of the ops.

Live, autograd's pack hook names the saved tensors. An operator log only has the *held* ones, held by autograd or by a
local that no op reads again. The difference is free memory: a tensor that is held and not saved can be dropped, and
will hardly be made again. Which tensors are saved follows from the derivatives of the ops, which are the same in every
model: the gradient of a sum needs neither term, that of a product both, that of tanh its result.

An op that is not listed counts as saving all its inputs and outputs: a wrong "needed" costs some room, a wrong "not
needed" costs recomputation. Where versions of PyTorch differ (softmax and relu once saved their input, too) both are
named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SCALAR_BYTES = 8  # a Python number as an argument; it wants no gradient, so its factor is not saved


@dataclass(frozen=True, slots=True)
class Saved:
    """The tensors that the derivative of an op reads."""

    inputs: bool
    # its first output. Further outputs (masks, indices, statistics) exist for backward and are always saved.
    output: bool


_ALL = Saved(True, True)
_INPUTS = Saved(True, False)
_OUTPUT = Saved(False, True)
_NOTHING = Saved(False, False)

_LINEAR_IN_ALL = """
    add sub rsub neg sum mean cumsum cat stack hstack vstack split split_with_sizes chunk unbind unsafe_split slice select
    narrow view _unsafe_view reshape _reshape_alias flatten expand permute transpose t unsqueeze squeeze as_strided alias
    detach clone contiguous copy to _to_copy repeat flip roll tril triu diagonal constant_pad_nd pad reflection_pad2d
    replication_pad2d pixel_shuffle upsample_nearest1d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d
    upsample_trilinear3d zeros_like ones_like empty_like index_select gather embedding masked_fill dropout native_dropout
    _fused_dropout _fused_droupout feature_dropout
"""
_PRODUCTS = """
    mul div mm bmm addmm baddbmm addbmm matmul linear einsum conv1d conv2d conv3d convolution _convolution
    cudnn_convolution cudnn_convolution_transpose mkldnn_convolution thnn_conv2d _thnn_conv_depthwise2d native_batch_norm
    cudnn_batch_norm batch_norm native_layer_norm layer_norm native_group_norm group_norm avg_pool2d avg_pool3d
    _adaptive_avg_pool2d adaptive_avg_pool2d max_pool2d_with_indices max_pool2d pow log abs gelu silu sin cos
    binary_cross_entropy_with_logits
"""
_OF_RESULT = "sigmoid tanh exp sqrt rsqrt reciprocal"
_TABLE: dict[str, Saved] = {
    **dict.fromkeys(_LINEAR_IN_ALL.split(), _NOTHING),
    **dict.fromkeys(_PRODUCTS.split(), _INPUTS),
    **dict.fromkeys(_OF_RESULT.split(), _OUTPUT),
    "relu_": _OUTPUT,  # in place, there is no input left to save
}


def saved_by(name: str, input_bytes: Sequence[int]) -> Saved:
    """The tensors that autograd probably saves for an op of forward.

    `name`: the aten op's, with or without the underscore of its in-place form. `input_bytes`: sizes of the storages
    that it reads.
    """
    found = _TABLE.get(name) or _TABLE.get(name.removesuffix("_")) or _ALL
    if found.inputs and name.removesuffix("_") in ("mul", "div") and min(input_bytes, default=0) <= _SCALAR_BYTES:
        return _NOTHING
    return found
