// Every other op: launched as a kernel that runs torch's own CPU kernel when its stream gets there.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zero.h>

#include <map>
#include <set>

#include "native.h"

namespace memdev {

enum class Result { kFresh, kArgument, kView };

// An op's results by its schema.
struct Shape {
  std::vector<Result> results;
  std::vector<int> argument;  // of kArgument and kView: which one
  std::set<int> written;      // arguments
  bool tensors_only = true;   // results

  explicit Shape(const c10::FunctionSchema& schema) {
    const auto& arguments = schema.arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].alias_info() && arguments[i].alias_info()->isWrite()) written.insert(static_cast<int>(i));
    }
    for (const auto& result : schema.returns()) {
      Result kind = Result::kFresh;
      int from = -1;
      if (const auto* alias = result.alias_info()) {
        for (size_t i = 0; i < arguments.size(); ++i) {
          const auto* other = arguments[i].alias_info();
          if (other && other->beforeSets() == alias->beforeSets()) from = static_cast<int>(i);
        }
        if (from >= 0) kind = alias->isWrite() ? Result::kArgument : Result::kView;
      }
      results.push_back(kind);
      argument.push_back(from);
      auto type = result.type()->kind();
      bool list = type == c10::TypeKind::ListType;
      tensors_only = tensors_only && (type == c10::TypeKind::TensorType || list);
    }
  }
};

// Their meta kernels announce other sizes or types than their CPU kernels return.
inline const std::set<std::string> kMisannounced = {
    "aten::_embedding_bag",         "aten::_embedding_bag_forward_only", "aten::native_layer_norm",
    "aten::native_batch_norm",      "aten::_native_batch_norm_legit",    "aten::_native_batch_norm_legit_no_training",
    "aten::_batch_norm_with_update"};

// Draws that need no data: they run when they are called, and nothing has to be waited for.
inline const std::set<std::string> kDraws = {"aten::bernoulli_", "aten::cauchy_",     "aten::exponential_",
                                             "aten::geometric_", "aten::log_normal_", "aten::normal_",
                                             "aten::random_",    "aten::uniform_",    "aten::randperm"};

inline bool IsDraw(const c10::OperatorHandle& op) {
  return kDraws.count(op.operator_name().name) != 0 && op.operator_name().overload_name != "Tensor";
}

// Ops that had to wait for the device, by name: the sizes of their results depend on data, or how much they draw.
struct Prompt {
  std::mutex mutex;
  std::map<std::string, uint64_t> counts;
};
inline Prompt& prompt = *new Prompt;

// Multiplications and additions of matrix products, convolutions and attention; of other ops their bytes count.
inline double OperationsOf(const c10::OperatorHandle& op, const std::vector<Value>& arguments,
                           const std::vector<std::vector<Ref>>& results) {
  const std::string& name = op.operator_name().name;
  const auto sizes = [&](size_t i) -> std::vector<int64_t> {
    const bool known = i < arguments.size() && !arguments[i].refs.empty() && arguments[i].refs[0].alias;
    return known ? arguments[i].refs[0].alias->sizes : std::vector<int64_t>{};
  };
  const auto count = [](const std::vector<int64_t>& of) {
    double all = 1;
    for (const int64_t size : of) all *= static_cast<double>(size);
    return all;
  };
  const auto product = [&](size_t a, size_t b) {
    const std::vector<int64_t> left = sizes(a), right = sizes(b);
    return left.empty() || right.empty() ? 0 : 2 * count(left) * static_cast<double>(right.back());
  };
  if (name == "aten::mm" || name == "aten::bmm") return product(0, 1);
  if (name == "aten::addmm" || name == "aten::baddbmm") return product(1, 2);
  if (name == "aten::convolution" || name == "aten::_convolution" || name == "aten::convolution_overrideable") {
    const std::vector<int64_t> weight = sizes(1);
    if (weight.empty() || results.empty() || results[0].empty() || !results[0][0].alias) return 0;
    return 2 * count(results[0][0].alias->sizes) * count(weight) / static_cast<double>(weight[0]);
  }
  if (name == "aten::convolution_backward" || name == "aten::convolution_backward_overrideable") {
    const std::vector<int64_t> weight = sizes(2);
    if (weight.empty()) return 0;
    double wanted = 0;
    for (size_t i = 0; i < 2 && i < results.size(); ++i) wanted += !results[i].empty() && results[i][0].alias;
    return 2 * wanted * count(sizes(0)) * count(weight) / static_cast<double>(weight[0]);
  }
  const bool forward = name.rfind("aten::_scaled_dot_product", 0) == 0 && name.find("backward") == std::string::npos;
  const bool backward = name.rfind("aten::_scaled_dot_product", 0) == 0 && !forward;
  if (forward || backward) {
    const std::vector<int64_t> q = sizes(backward ? 1 : 0), k = sizes(backward ? 2 : 1);
    if (q.size() != 4 || k.size() != 4) return 0;
    return (backward ? 10 : 4) * count(q) * static_cast<double>(k[2]);
  }
  return 0;
}

struct Kernel : Work {
  explicit Kernel(const c10::OperatorHandle& op) : op(op) {}

  void Run() override {
    torch::jit::Stack stack;
    for (const Value& value : arguments) stack.push_back(value.Cpu());
    op.callBoxed(stack);
    TORCH_CHECK(stack.size() == results.size(), "it returned ", stack.size(), " values");
    for (size_t i = 0; i < results.size(); ++i) {
      std::vector<at::Tensor> made = TensorsOf(stack[i]);
      for (size_t j = 0; j < results[i].size(); ++j) {
        const Ref& to = results[i][j];
        if (!to.alias || !made.at(j).defined()) continue;
        at::Tensor out = to.Cpu();
        TORCH_CHECK(out.dtype() == made[j].dtype(), "result ", i, " is ", made[j].dtype(), ", not ", out.dtype(),
                    " as announced");
        TORCH_CHECK(out.sizes() == made[j].sizes(), "result ", i, " has sizes ", made[j].sizes(), ", not ", out.sizes(),
                    " as announced");
        out.copy_(made[j]);
      }
    }
  }
  std::string Name() const override { return c10::toString(op.operator_name()); }
  int Engine() const override { return kCompute; }
  uint64_t Bytes() const override {
    uint64_t bytes = 0;
    for (const Value& value : arguments) {
      for (const Ref& ref : value.refs) bytes += ref.alias ? ref.Bytes() : 0;
    }
    for (const auto& made : results) {
      for (const Ref& ref : made) bytes += ref.alias ? ref.Bytes() : 0;
    }
    return bytes + written_bytes;
  }
  double Operations() const override { return OperationsOf(op, arguments, results); }
  const char* Arithmetic() const override {
    for (const Value& value : arguments) {
      for (const Ref& ref : value.refs) {
        if (!ref.alias) continue;
        if (ref.alias->dtype == at::kBFloat16) return "flops.bfloat16";
        if (ref.alias->dtype == at::kHalf) return "flops.float16";
        if (c10::isFloatingType(ref.alias->dtype)) return "flops.float32";
      }
    }
    return "flops.float32";
  }
  bool IsOp() const override { return true; }
  bool IsHollow() const override { return hollow.load(); }

  c10::OperatorHandle op;
  uint64_t written_bytes = 0;  // of arguments, a second time: they are read and written
  std::vector<Value> arguments;
  std::vector<std::vector<Ref>> results;  // fresh ones; of others nothing
};

inline at::Tensor EmptyLike(const at::Tensor& t, c10::Device device) {
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(device));
}

inline c10::Device DeviceOf(const torch::jit::Stack& arguments) {
  for (const auto& v : arguments) {
    for (const at::Tensor& t : TensorsOf(v)) {
      if (OnDevice(t)) return t.device();
    }
  }
  for (const auto& v : arguments) {
    if (v.isDevice() && v.toDevice().is_privateuseone()) return OrCurrent(v.toDevice());
  }
  return OrCurrent(std::nullopt);
}

// As on a GPU: scalars may come from the CPU, and indices; nothing else.
inline void CheckDevices(const c10::OperatorHandle& op, const Shape& shape, const torch::jit::Stack& arguments,
                         c10::Device device) {
  bool indexing = op.operator_name().name.find("index") != std::string::npos;
  for (size_t i = 0; i < arguments.size(); ++i) {
    for (const at::Tensor& t : TensorsOf(arguments[i])) {
      if (!t.defined() || t.device() == device) continue;
      TORCH_CHECK(t.is_cpu() && (t.dim() == 0 || indexing) && shape.written.count(static_cast<int>(i)) == 0,
                  "Expected all tensors to be on the same device, but got one on ", t.device(), " and one on ", device,
                  " in ", c10::toString(op.operator_name()));
    }
  }
}

// The sizes that the op would give its results, or nothing: it cannot be known without the data. An error of the op
// itself is found again, with a better text, when it runs.
inline std::optional<torch::jit::Stack> RunOnMeta(const c10::OperatorHandle& op, const torch::jit::Stack& arguments,
                                                  torch::jit::Stack* meta_arguments) {
  if (op.operator_name().name.rfind("aten::", 0) != 0) return std::nullopt;
  for (const auto& v : arguments) meta_arguments->push_back(Meta(v));
  torch::jit::Stack stack = *meta_arguments;
  try {
    op.callBoxed(stack);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  for (const auto& v : stack) {
    for (const at::Tensor& t : TensorsOf(v)) {
      if (t.defined() && (!t.is_meta() || t.layout() != at::kStrided)) return std::nullopt;
    }
  }
  return stack;
}

// As RunOnMeta, by running it here on zeros.
inline torch::jit::Stack RunOnZeros(const c10::OperatorHandle& op, const torch::jit::Stack& arguments,
                                    torch::jit::Stack* zeros) {
  for (const auto& v : arguments) {
    std::vector<at::Tensor> all = TensorsOf(v);
    for (at::Tensor& t : all) {
      if (OnDevice(t)) t = EmptyLike(t, at::kCPU).zero_();
    }
    zeros->push_back(HoldsTensors(v) ? WithTensors(v, all) : v);
  }
  torch::jit::Stack stack = *zeros;
  op.callBoxed(stack);
  return stack;
}

inline at::Tensor ViewLike(const at::Tensor& self, const at::Tensor& meta) {
  int64_t bytes = self.storage_offset() * self.itemsize() + meta.storage_offset() * meta.itemsize();
  at::Tensor out = View(self, meta.sizes(), meta.strides(), bytes / meta.itemsize(), meta.dtype());
  if (meta.is_conj()) out._set_conj(true);
  if (meta.is_neg()) out._set_neg(true);
  return out;
}

inline void RunLate(const c10::OperatorHandle& op, const Shape& shape, torch::jit::Stack& arguments,
                    const torch::jit::Stack& meta_arguments, const torch::jit::Stack& meta, c10::Device device) {
  // out= arguments get the size of the result before their addresses are taken.
  for (int i : shape.written) {
    std::vector<at::Tensor> ours = TensorsOf(arguments[i]), theirs = TensorsOf(meta_arguments[i]);
    for (size_t j = 0; j < ours.size(); ++j) {
      if (OnDevice(ours[j]) && ours[j].sizes() != theirs[j].sizes()) ours[j].resize_(theirs[j].sizes());
    }
  }
  auto kernel = std::make_unique<Kernel>(op);
  torch::jit::Stack results;
  bool all_views = !meta.empty();
  for (size_t i = 0; i < meta.size(); ++i) {
    kernel->results.emplace_back();
    std::vector<at::Tensor> made = TensorsOf(meta[i]);
    all_views = all_views && shape.results[i] == Result::kView;
    if (!HoldsTensors(meta[i])) {
      results.push_back(meta[i]);
      continue;
    }
    if (shape.results[i] == Result::kArgument) {
      results.push_back(arguments[shape.argument[i]]);
      continue;
    }
    for (at::Tensor& t : made) {
      if (!t.defined()) {
        kernel->results.back().push_back({});
      } else if (shape.results[i] == Result::kView) {
        t = ViewLike(arguments[shape.argument[i]].toTensor(), t);
      } else {
        t = EmptyLike(t, device);
        kernel->results.back().push_back(MakeRef(t));
      }
    }
    results.push_back(WithTensors(meta[i], made));
  }
  if (!all_views) {
    for (const auto& v : arguments) kernel->arguments.push_back(Value::Of(v));
    for (int i : shape.written) {
      for (const Ref& ref : kernel->arguments[i].refs) kernel->written_bytes += ref.alias ? ref.Bytes() : 0;
    }
    Launch(device.index(), CurrentStream(device.index()), std::move(kernel));
  }
  arguments = std::move(results);
}

// The program waits for the device (unless no data is needed), the op runs in this thread, its results are published in
// stream order.
inline void RunPromptly(const c10::OperatorHandle& op, const Shape& shape, torch::jit::Stack& arguments,
                        c10::Device device) {
  CUstream stream = CurrentStream(device.index());
  if (!IsDraw(op)) {
    {
      std::lock_guard<std::mutex> lock(prompt.mutex);
      ++prompt.counts[c10::toString(op.operator_name())];
    }
    SynchronizeStream(device.index(), stream);
  }
  torch::jit::Stack stack;
  std::map<int, std::vector<at::Tensor>> written;
  {
    PlainDispatch plain;
    for (size_t i = 0; i < arguments.size(); ++i) {
      Value value = Value::Of(arguments[i]);
      if (shape.written.count(static_cast<int>(i)) != 0) {
        for (Ref& ref : value.refs) {
          if (ref.alias) ref = Ref{std::nullopt, IsDraw(op) ? at::empty_like(ref.Cpu()) : ref.Cpu().clone()};
          written[static_cast<int>(i)].push_back(ref.host);
        }
      }
      stack.push_back(value.Cpu());
    }
    op.callBoxed(stack);
  }
  auto publish = [&](const at::Tensor& from, const at::Tensor& to) {
    if (to.numel() > 0) Launch(device.index(), stream, std::make_unique<Copy>(Ref{std::nullopt, from}, MakeRef(to), true));
  };
  for (auto& [i, tensors] : written) {
    std::vector<at::Tensor> ours = TensorsOf(arguments[i]);
    for (size_t j = 0; j < ours.size(); ++j) {
      if (!OnDevice(ours[j])) continue;
      if (ours[j].sizes() != tensors[j].sizes()) ours[j].resize_(tensors[j].sizes());
      publish(tensors[j], ours[j]);
    }
  }
  for (size_t i = 0; i < stack.size(); ++i) {
    TORCH_CHECK(shape.results.size() == stack.size() && shape.results[i] != Result::kView, "memdev: no view by ",
                c10::toString(op.operator_name()));
    if (shape.results[i] == Result::kArgument) {
      stack[i] = arguments[shape.argument[i]];
    } else if (HoldsTensors(stack[i])) {
      std::vector<at::Tensor> made = TensorsOf(stack[i]);
      for (at::Tensor& t : made) {
        if (!t.defined()) continue;
        PlainDispatch plain;
        at::Tensor host = t.clone();  // it may share memory with an argument
        t = EmptyLike(host, device);
        publish(host, t);
      }
      stack[i] = WithTensors(stack[i], made);
    }
  }
  arguments = std::move(stack);
}

inline void Fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  graveyard.Empty();
  const c10::FunctionSchema& schema = op.schema();
  Shape shape(schema);
  TORCH_CHECK_NOT_IMPLEMENTED(hollow.load() || op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU),
                              "memdev: the CPU has no kernel for ", c10::toString(op.operator_name()));
  torch::jit::Stack arguments = torch::jit::pop(*stack, schema.arguments().size());
  c10::Device device = DeviceOf(arguments);
  c10::DeviceGuard guard(device);
  CheckDevices(op, shape, arguments, device);
  std::optional<torch::jit::Stack> meta;
  torch::jit::Stack meta_arguments;
  // In hollow mode no number is drawn, and no kernel runs that could differ from its announced shape.
  if (hollow.load() || (shape.tensors_only && !op.hasTag(at::Tag::nondeterministic_seeded))) {
    PlainDispatch plain;
    bool zeros = !hollow.load() && kMisannounced.count(op.operator_name().name) != 0;
    meta = zeros ? RunOnZeros(op, arguments, &meta_arguments) : RunOnMeta(op, arguments, &meta_arguments);
  }
  PlainDispatch plain;
  if (meta) {
    RunLate(op, shape, arguments, meta_arguments, *meta, device);
  } else {
    RunPromptly(op, shape, arguments, device);
  }
  for (auto& v : arguments) stack->push_back(std::move(v));
}

}  // namespace memdev
