"""Arguments of torch's ops that look like state and that no schema declares as written, each with a reason.

A name such as `running_mean`, `reserve` or `workspace` is that of memory which a kernel may write although its schema does not
declare it. The pager believes schemas, except for the arguments in its own table (`allocator/pager/ops/op_info.cpp`). The
reasons are of torch 2.11 to 2.13, by reading the kernels; of the ops that 2.14 and 2.15 add, by their schemas. An overload has
its op's reason.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

BELIEVED = (
    *(
        "aten",
        "prims",
        "quantized",
        "quantized_decomposed",
        "_quantized",
        "mkl",
        "mkldnn",
        "sparse",
        "mkldnn_prepacked",
    ),
    *("xnnpack", "profiler", "_c10d_functional", "_dtensor", "_c10d_functional_autograd"),
)
"""Namespaces whose schemas the pager believes. An op of another one may write all its arguments, unless it declares a write."""

LIKE_STATE = re.compile(
    "state|seed|philox|offset$|rng|reserve|workspace|cache|buffer|buf$|accum|scale|found_inf|running|noise|moment|exp_avg|step"
    "|track|count|dst|saved|^save_|tmp|temp$|scratch|amax|info$|counter|semaphore|variable"
)


class Reason(NamedTuple):
    """The reason for these arguments (words) of these ops (words, in aten unless they name another namespace)."""

    text: str
    arguments: str
    ops: str


WRITTEN = (
    Reason(
        "the batch moves the running statistics, always or in training",
        "running_mean running_var",
        "native_batch_norm cudnn_batch_norm miopen_batch_norm batch_norm_update_stats batch_norm_gather_stats "
        "batch_norm_gather_stats_with_counts",
    ),
    Reason("cuDNN and MIOpen advance their dropout generator in place", "dropout_state", "_cudnn_rnn miopen_rnn"),
    Reason(
        "the backward of an RNN computes in the memory that its forward kept",
        "reserve workspace",
        "_cudnn_rnn_backward miopen_rnn_backward mkldnn_rnn_layer_backward",
    ),
    Reason(
        "cudnnBatchNormalizationBackwardEx gets it as memory that is not const",
        "reserve reserveSpace",
        "batch_norm_backward cudnn_batch_norm_backward",
    ),
    Reason("a backend's half of copy_", "dst", "_copy_from _copy_from_and_resize"),
    Reason(
        "oneDNN adds in place where it is channels_last, and returns it",
        "qaccum",
        "quantized::conv2d_add quantized::conv2d_add_relu",
    ),
    Reason(
        "the kernel copies `local_input` into it, for the other ranks",
        "symm_buffer",
        "symm_mem::one_shot_all_reduce_copy_out",
    ),
)

READ = (
    Reason(
        "the backward reads what its forward saved",
        "save_mean save_var save_invstd running_mean running_var",
        "native_batch_norm_backward batch_norm_backward cudnn_batch_norm_backward miopen_batch_norm_backward",
    ),
    Reason(
        "evaluation reads the statistics",
        "running_mean running_var",
        "_batch_norm_no_update _native_batch_norm_legit_no_training",
    ),
    Reason(
        "the functional form writes copies and returns them",
        "running_mean running_var running_min running_max scale noise growth_tracker found_inf exp_avgs exp_avg_sqs "
        "max_exp_avg_sqs momentum_buffer_list state_sums",
        "_batch_norm_with_update_functional _native_batch_norm_legit_functional _fused_moving_avg_obs_fq_helper_functional "
        "rrelu_with_noise_functional _amp_update_scale _amp_foreach_non_finite_check_and_unscale _fused_adam _fused_adamw "
        "_fused_sgd _fused_adagrad",
    ),
    Reason(
        "one number that the kernel reads; torch.optim counts steps by an op of its own, before",
        "found_inf grad_scale state_steps inv_scale",
        "_fused_adam _fused_adam_ _fused_adamw _fused_adamw_ _fused_sgd _fused_sgd_ _fused_adagrad _fused_adagrad_ "
        "_amp_update_scale_ _amp_foreach_non_finite_check_and_unscale _amp_foreach_non_finite_check_and_unscale_",
    ),
    Reason(
        "cuDNN and MIOpen keep the masks in the reserve", "dropout_state", "_cudnn_rnn_backward miopen_rnn_backward"
    ),
    Reason(
        "all weights in one buffer, const for the library",
        "weight_buf",
        "_cudnn_rnn _cudnn_rnn_backward miopen_rnn_backward",
    ),
    Reason(
        "gradients go to new tensors", "workspace", "_thnn_fused_gru_cell_backward _thnn_fused_lstm_cell_backward_impl"
    ),
    Reason(
        "the forward's states, read", "cx_tmp cell_state_fwd z_state", "mkldnn_rnn_layer_backward lstm_mps_backward"
    ),
    Reason(
        "the state of the generator at the forward, which made it as a result",
        "philox_seed philox_offset rng_state",
        "_cudnn_attention_backward _efficient_attention_backward _flash_attention_backward "
        "_scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention_backward "
        "_scaled_dot_product_flash_attention_backward _scaled_dot_product_fused_attention_overrideable_backward",
    ),
    Reason(
        "factors of a quantized or a scaled product",
        "q_descale k_descale v_descale scale_a scale_b scale_result scale scales scales_zeros w_scale x_scale X_scale W_scale "
        "output_scale",
        "_flash_attention_forward _scaled_dot_product_flash_attention _scaled_grouped_mm _scaled_grouped_mm_v2 _scaled_mm "
        "_scaled_mm_v2 _mixed_dtypes_linear _weight_int8pack_mm _dyn_quant_pack_4bit_weight onednn::qconv2d_pointwise "
        "_quantized::_wrapped_linear_prepack _quantized::wrapped_quantized_linear "
        "_quantized::_wrapped_quantized_linear_prepacked",
    ),
    Reason(
        "scales of a quantizer; a backward returns its own gradients of them",
        "scale scales",
        "_fake_quantize_learnable_per_channel_affine _fake_quantize_learnable_per_channel_affine_backward "
        "_fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_tensor_affine_backward "
        "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams fake_quantize_per_channel_affine_cachemask "
        "_make_per_channel_quantized_tensor _empty_per_channel_affine_quantized quantize_per_tensor quantize_per_channel",
    ),
    Reason(
        "an input, by its elements",
        "count counts",
        "binomial batch_norm_backward_elemt batch_norm_gather_stats_with_counts",
    ),
    Reason("the forward's result, which the CPU reads and CUDA does not need", "buffer", "log_sigmoid_backward"),
    Reason("the forward's result, read", "noise", "rrelu_with_noise_backward"),
    Reason("the forward's arguments and norms, read", "saved_g saved_v saved_norms", "_weight_norm_interface_backward"),
    Reason("error codes that the host compares with 0", "info", "_linalg_check_errors"),
)

WRITTEN_LATER: tuple[Reason, ...] = ()
"""As `WRITTEN`, of ops that torch 2.13 does not have."""

READ_LATER = (
    Reason(
        "factors of a scaled product that is added to its result: _scaled_mm_v2 accumulated (2.15)",
        "scale_a scale_b",
        "_scaled_addmm _scaled_addmm_",
    ),
)


def _pairs(reasons: tuple[Reason, ...]) -> set[tuple[str, str]]:
    return {
        (op if "::" in op else f"aten::{op}", argument)
        for reason in reasons
        for op in reason.ops.split()
        for argument in reason.arguments.split()
    }


def known() -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """(written, read): pairs of an op and an argument."""
    return _pairs((*WRITTEN, *WRITTEN_LATER)), _pairs((*READ, *READ_LATER))


def is_write(argument: Any) -> bool:
    """If the schema declares that the op writes this argument."""
    return argument.alias_info is not None and argument.alias_info.is_write


def _believed(schema: Any) -> bool:
    space = schema.name.partition("::")[0]
    # Written in Python, and there once a module has been imported: the ops that they call are seen.
    if space == "quantized_decomposed" or schema.name.startswith("prims::inductor_"):
        return False
    return space in BELIEVED or (space not in ("prim", "c10d") and any(map(is_write, schema.arguments)))


def _calls_other_ops(name: str) -> bool:
    """Ops that have no kernel of their own are paged op by op."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(name, "CompositeImplicitAutograd") and not has(name, "CPU") and not has(name, "CUDA")


def schemas() -> Iterator[Any]:
    """The schemas of torch's ops with kernels of their own that the pager believes."""
    for schema in torch._C._jit_get_all_schemas():
        name = f"{schema.name}.{schema.overload_name}".removesuffix(".")
        if _believed(schema):
            try:
                composite = _calls_other_ops(name)
            except RuntimeError:  # TorchScript's own, which no dispatcher runs
                continue
            if not composite:
                yield schema


def undeclared() -> Iterator[tuple[str, str, str]]:
    """(op, overload, argument) of each argument that looks like state and is not declared as written."""
    for schema in schemas():
        for argument in schema.arguments:
            if "Tensor" in str(argument.type) and not is_write(argument) and LIKE_STATE.search(argument.name):
                yield schema.name, schema.overload_name, argument.name
