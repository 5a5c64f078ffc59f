// torch.autocast("memdev"): matrix ops in the lower type, ops that need the range in float32, as on CUDA. CUDA's third
// list (arguments of different types are cast to the widest) is left out.
#pragma once

#include <torch/library.h>

#include "values.h"

namespace at::autocast {
// From ATen/autocast_mode.h, which includes every op there is.
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
TORCH_API Tensor cached_cast(at::ScalarType to, const Tensor& arg, DeviceType device_type);
}  // namespace at::autocast

namespace memdev {

inline const char* const kLower[] = {"conv1d",       "conv2d",
                                     "conv3d",       "convolution",
                                     "_convolution", "matmul",
                                     "mm",           "bmm",
                                     "mv",           "addmm",
                                     "addbmm",       "addmv",
                                     "addr",         "baddbmm",
                                     "linear",       "prelu",
                                     "einsum",       "conv_transpose2d.input",
                                     "gru_cell",     "rnn_tanh_cell",
                                     "lstm_cell",    "scaled_dot_product_attention"};
inline const char* const kFull[] = {"exp",
                                    "expm1",
                                    "log",
                                    "log1p",
                                    "pow.Tensor_Scalar",
                                    "rsqrt",
                                    "reciprocal",
                                    "softplus",
                                    "layer_norm",
                                    "native_layer_norm",
                                    "group_norm",
                                    "rms_norm",
                                    "nll_loss",
                                    "mse_loss",
                                    "l1_loss",
                                    "softmax.int",
                                    "log_softmax.int",
                                    "cumsum",
                                    "smooth_l1_loss",
                                    "cosine_similarity",
                                    "prod",
                                    "sum",
                                    "sum.dim_IntList",
                                    "binary_cross_entropy_with_logits"};

template <bool lower>
void Autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard without(c10::DispatchKey::AutocastPrivateUse1);
  at::ScalarType to = lower ? at::autocast::get_autocast_dtype(c10::kPrivateUse1) : at::kFloat;
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i) {
    c10::IValue& v = (*stack)[i];
    if (!HoldsTensors(v)) continue;
    std::vector<at::Tensor> all = TensorsOf(v);
    for (at::Tensor& t : all) {
      if (t.defined()) t = at::autocast::cached_cast(to, t, c10::kPrivateUse1);
    }
    v = WithTensors(v, all);
  }
  op.callBoxed(*stack);
}

inline void RegisterAutocast() {
  constexpr auto key = c10::DispatchKey::AutocastPrivateUse1;
  auto* others = new torch::Library(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  others->fallback(torch::CppFunction::makeFallthrough());
  auto* aten = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  for (const char* name : kLower) aten->impl(name, torch::CppFunction::makeFromBoxedFunction<&Autocast<true>>());
  for (const char* name : kFull) aten->impl(name, torch::CppFunction::makeFromBoxedFunction<&Autocast<false>>());
}

}  // namespace memdev
