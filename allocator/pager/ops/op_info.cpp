#include "ops/op_info.h"

#include <string>
#include <unordered_map>
#include <unordered_set>

#include "base/lock.h"

namespace memmgr::pager {

namespace {

using Names = std::unordered_set<std::string>;

// Namespaces whose ops write to the arguments that their schemas declare and to nothing else. c10d is none of them: its
// ops declare no write, and write.
const Names& own_namespaces() {
  static const auto* n = new Names{"aten",
                                   "prims",
                                   "quantized",
                                   "quantized_decomposed",
                                   "_quantized",
                                   "mkl",
                                   "mkldnn",
                                   "sparse",
                                   "mkldnn_prepacked",
                                   "xnnpack",
                                   "profiler",
                                   "_c10d_functional",
                                   "_dtensor",
                                   "_c10d_functional_autograd"};
  return *n;
}

// Ops that alias without a declaration, or whose declared write moves no bytes.
const Names& views() {
  static const auto* n =
      new Names{"aten::_unsafe_view", "aten::_reshape_alias", "aten::record_stream", "aten::requires_grad_",
                "aten::retain_grad",  "aten::_fw_primal",     "aten::_make_dual",    "aten::transpose_",
                "aten::t_",           "aten::squeeze_",       "aten::unsqueeze_",    "aten::swapdims_",
                "aten::swapaxes_",    "aten::as_strided_",    "aten::detach_",       "aten::rename_"};
  return *n;
}

const Names& metadata() {
  static const auto* n = new Names{"aten::empty_like",
                                   "aten::zeros_like",
                                   "aten::ones_like",
                                   "aten::full_like",
                                   "aten::rand_like",
                                   "aten::randn_like",
                                   "aten::randint_like",
                                   "aten::new_empty",
                                   "aten::new_zeros",
                                   "aten::new_ones",
                                   "aten::new_full",
                                   "aten::new_empty_strided",
                                   "aten::is_same_size",
                                   "aten::_has_same_storage_numel",
                                   "aten::_version",
                                   "aten::sym_size",
                                   "aten::sym_stride",
                                   "aten::sym_numel",
                                   "aten::sym_storage_offset",
                                   "aten::size",
                                   "aten::stride",
                                   "aten::dim",
                                   "aten::numel",
                                   "aten::is_contiguous",
                                   "aten::_has_compatible_shallow_copy_type",
                                   "aten::_is_zerotensor",
                                   "aten::is_complex",
                                   "aten::is_floating_point",
                                   "aten::result_type"};
  return *n;
}

const Names& uninitialized() {
  static const auto* n = new Names{"aten::empty",
                                   "aten::empty_like",
                                   "aten::empty_strided",
                                   "aten::new_empty",
                                   "aten::new_empty_strided",
                                   "aten::empty_permuted",
                                   "aten::_empty_affine_quantized",
                                   "aten::empty_quantized",
                                   "aten::_empty_per_channel_affine_quantized"};
  return *n;
}

// In-place ops that never read the old bytes.
const Names& overwriters() {
  static const auto* n = new Names{"aten::fill_",      "aten::zero_",       "aten::copy_",   "aten::normal_",
                                   "aten::uniform_",   "aten::bernoulli_",  "aten::random_", "aten::exponential_",
                                   "aten::geometric_", "aten::log_normal_", "aten::cauchy_"};
  return *n;
}

// Ops that need no input's bytes, so that their outputs can be made again with and without gradient: an optimizer's
// first states, caches.
const Names& fillers() {
  static const auto* n =
      new Names{"aten::zeros",     "aten::ones",      "aten::full",     "aten::zeros_like", "aten::ones_like",
                "aten::full_like", "aten::new_zeros", "aten::new_ones", "aten::new_full"};
  return *n;
}

// Ops that read their `out=`: they add to it.
const Names& adds_to_out() {
  static const auto* n = new Names{"aten::_compute_linear_combination"};
  return *n;
}

const Names& storage_ops() {
  static const auto* n = new Names{"aten::set_",
                                   "aten::resize_",
                                   "aten::resize_as_",
                                   "aten::_resize_output_",
                                   "aten::resize_as_sparse_",
                                   "aten::sparse_resize_",
                                   "aten::sparse_resize_and_clear_",
                                   "aten::_resize_output",
                                   "aten::set_data"};
  return *n;
}

// Ops whose results depend on more than arguments and generator, or that read uninitialized memory, or keep state.
const Names& never_again() {
  static const auto* n = new Names{"aten::_cudnn_init_dropout_state",
                                   "aten::_cudnn_rnn",
                                   "aten::miopen_rnn",
                                   "aten::rrelu_with_noise",
                                   "aten::rrelu_with_noise_functional",
                                   "aten::_fused_moving_avg_obs_fq_helper",
                                   "aten::_to_cpu",
                                   "aten::_pin_memory",
                                   "aten::linalg_lstsq",
                                   "aten::_batch_norm_with_update",
                                   "aten::_efficientzerotensor",
                                   "aten::_local_scalar_dense",
                                   "aten::from_file",
                                   "aten::_foobar"};
  return *n;
}

// Ops whose kernels for accelerators add up, or choose, in the order in which threads arrive: the forward ops for which
// torch.use_deterministic_algorithms has another kernel, or an error. Two runs often agree, so that they pass the
// determinism check, and differ later.
const Names& any_order() {
  static const auto* n = new Names{"aten::scatter_add",
                                   "aten::scatter_add_",
                                   "aten::scatter_reduce",
                                   "aten::scatter_reduce_",
                                   "aten::scatter",
                                   "aten::scatter_",
                                   "aten::index_add",
                                   "aten::index_add_",
                                   "aten::index_reduce",
                                   "aten::index_reduce_",
                                   "aten::index_put",
                                   "aten::index_put_",
                                   "aten::_index_put_impl_",
                                   "aten::_unsafe_index_put",
                                   "aten::put",
                                   "aten::put_",
                                   "aten::index_copy",
                                   "aten::index_copy_",
                                   "aten::cumsum",
                                   "aten::cumsum_",
                                   "aten::bincount",
                                   "aten::histc",
                                   "aten::kthvalue",
                                   "aten::median",
                                   "aten::nanmedian",
                                   "aten::max_unpool2d",
                                   "aten::max_unpool3d",
                                   "aten::nll_loss2d_forward",
                                   "aten::segment_reduce",
                                   "aten::convolution",
                                   "aten::convolution_overrideable",
                                   "aten::_convolution",
                                   "aten::cudnn_convolution_transpose"};
  return *n;
}

// Those of them whose CPU threads race, too. Where indices repeat, the last write wins, or sums come in any order. That
// depends on the indices' values, so no check can find it.
const Names& races_on_cpu() {
  static const auto* n = new Names{"aten::index_put",         "aten::index_put_", "aten::_index_put_impl_",
                                   "aten::_unsafe_index_put", "aten::put",        "aten::put_"};
  return *n;
}

// Ops whose schemas do not declare their writes to `running_mean` and `running_var`. They write in training; without an
// argument `training`, always.
const Names& writes_statistics() {
  static const auto* n = new Names{"aten::native_batch_norm",
                                   "aten::_native_batch_norm_legit",
                                   "aten::cudnn_batch_norm",
                                   "aten::miopen_batch_norm",
                                   "aten::batch_norm_update_stats",
                                   "aten::batch_norm_gather_stats",
                                   "aten::batch_norm_gather_stats_with_counts"};
  return *n;
}

// Arguments that an op writes without a declaration; tests/ops/state_arguments.py has the reason for each that looks
// like state. The backwards of RNNs compute in the memory that their forward kept for them, so a second backward
// (`retain_graph`) reads it again. cuDNN's batch norm gets its reserve as memory that it may write. cuDNN and MIOpen
// advance the state of their dropout generator in place; torch keeps it in one tensor for each device and passes it to
// each forward. oneDNN's quantized convolution adds to `qaccum` in place where that is channels_last, and returns it.
const std::unordered_map<std::string, std::string>& written_in_silence() {
  static const auto* n = new std::unordered_map<std::string, std::string>{
      {"aten::mkldnn_rnn_layer_backward", "workspace"}, {"aten::_cudnn_rnn", "dropout_state"},
      {"aten::_cudnn_rnn_backward", "reserve"},         {"aten::miopen_rnn", "dropout_state"},
      {"aten::miopen_rnn_backward", "reserve"},         {"aten::cudnn_batch_norm_backward", "reserveSpace"},
      {"aten::batch_norm_backward", "reserve"},         {"aten::_copy_from", "dst"},
      {"aten::_copy_from_and_resize", "dst"},           {"quantized::conv2d_add", "qaccum"},
      {"quantized::conv2d_add_relu", "qaccum"},         {"symm_mem::one_shot_all_reduce_copy_out", "symm_buffer"}};
  return *n;
}

bool holds_tensors(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::TensorType:
    case c10::TypeKind::AnyType:
    case c10::TypeKind::StorageType:
      return true;
    case c10::TypeKind::ListType:
    case c10::TypeKind::OptionalType:
    case c10::TypeKind::TupleType:
    case c10::TypeKind::DictType:
      for (const auto& inner : type.containedTypes())
        if (holds_tensors(*inner)) return true;
      return false;
    default:
      return false;
  }
}

}  // namespace

static bool is_native(const c10::OperatorHandle& op) {
  return op.dumpComputedTable().find(".py:") == std::string::npos;
}

const std::vector<RawReader>& raw_readers() {
  static const auto* readers =
      new std::vector<RawReader>{{"lstm.data", RawReads::kWeights},
                                 {"gru.data", RawReads::kWeights},
                                 {"rnn_tanh.data", RawReads::kWeights},
                                 {"rnn_relu.data", RawReads::kWeights},
                                 {"lstm.input", RawReads::kWeights, false},
                                 {"gru.input", RawReads::kWeights, false},
                                 {"rnn_tanh.input", RawReads::kWeights, false},
                                 {"rnn_relu.input", RawReads::kWeights, false},
                                 {"_pad_packed_sequence", RawReads::kIndices},
                                 {"_pack_padded_sequence_backward", RawReads::kIndices},
                                 {"tensor_split.tensor_indices_or_sections", RawReads::kIndices},
                                 {"ctc_loss.Tensor", RawReads::kIndices},
                                 {"_sobol_engine_draw", RawReads::kAll},
                                 {"_sobol_engine_ff_", RawReads::kAll},
                                 {"_sobol_engine_initialize_state_", RawReads::kAll},
                                 {"_sobol_engine_scramble_", RawReads::kAll},
                                 {"choose_qparams_optimized", RawReads::kAll},
                                 {"_saturate_weight_to_fp16", RawReads::kAll},
                                 {"fbgemm_pack_gemm_matrix_fp16", RawReads::kAll}};
  return *readers;
}

static bool is_torchs(const c10::OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  return name.rfind("aten::", 0) == 0 || name.rfind("prims::", 0) == 0;
}

static bool starts_with(const std::string& text, const char* beginning) { return text.rfind(beginning, 0) == 0; }

// Returns true if calls of this op can be cut (list_ops.h).
static bool is_list_op(const c10::FunctionSchema& schema) {
  const std::string& name = schema.name();
  const bool steps = starts_with(name, "aten::_fused_") && name.back() == '_';
  if (!steps && !starts_with(name, "aten::_foreach_") && name != "aten::_amp_foreach_non_finite_check_and_unscale_")
    return false;
  const auto& arguments = schema.arguments();
  if (arguments.empty() || arguments[0].type()->kind() != c10::TypeKind::ListType) return false;
  for (const auto& a : arguments)
    if (a.is_out() || (a.name() == "scalars" && a.type()->kind() == c10::TypeKind::TensorType)) return false;
  for (const auto& r : schema.returns())
    if (r.type()->kind() != c10::TypeKind::ListType) return false;
  return true;
}

// Returns true if each tensor that the op returns is an alias of an argument, and there is one.
static bool returns_aliases(const c10::FunctionSchema& schema) {
  bool any = false;
  for (const auto& r : schema.returns()) {
    const bool alias = r.alias_info() && !r.alias_info()->isWrite();
    if (holds_tensors(*r.type()) && !alias) return false;
    any |= r.alias_info() != nullptr;
  }
  return any;
}

OpInfo::OpInfo(const c10::OperatorHandle& handle) : op(handle) {
  if (!handle.hasSchema()) {
    kind = OpClass::kForeign;
    return;
  }
  const c10::FunctionSchema& schema = handle.schema();
  torchs = is_torchs(handle);
  arguments = schema.arguments().size();
  returns = schema.returns().size();
  seeded = handle.hasTag(at::Tag::nondeterministic_seeded);
  pointwise = handle.hasTag(at::Tag::pointwise);
  list_op = is_list_op(schema);
  read_arguments(schema);
  read_tables();
  classify(schema);
  const bool never = never_again().count(schema.name()) > 0 || written_in_silence().count(schema.name()) > 0 ||
                     storage_op || uninitialized || lazy_clone;
  const bool own = kind == OpClass::kOrdinary || kind == OpClass::kMetadata;
  recordable = own && !never && writes <= 1 && (running_mean < 0 || writes == 0);
}

void OpInfo::read_arguments(const c10::FunctionSchema& schema) {
  const std::string& name = schema.name();
  const auto silent = written_in_silence().find(name);
  bool writes_out = false;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& a = schema.arguments()[i];
    const bool write = (a.alias_info() && a.alias_info()->isWrite()) ||
                       (silent != written_in_silence().end() && silent->second == a.name());
    may_hold_tensors.push_back(holds_tensors(*a.type()));
    written.push_back(write);
    writes += write ? 1 : 0;
    writes_out |= write && a.is_out();
    if (a.type()->kind() == c10::TypeKind::GeneratorType ||
        (a.type()->kind() == c10::TypeKind::OptionalType && a.name() == "generator"))
      generator = static_cast<int>(i);
    if (a.name() == "transposed") in_order_unless = static_cast<int>(i);  // the op is a convolution's gradient
    if (writes_statistics().count(name)) {
      if (a.name() == "running_mean") running_mean = static_cast<int>(i);
      if (a.name() == "running_var") running_var = static_cast<int>(i);
      if (a.name() == "training") training = static_cast<int>(i);
    }
  }
  always_training = training < 0 && running_mean >= 0;
  // out= is written and not read. The returned tensor shows how much of it was written.
  overwriter = overwriters().count(name) > 0 || (torchs && writes_out && returns && !adds_to_out().count(name));
}

void OpInfo::read_tables() {
  const std::string& name = op.operator_name().name;
  adds_in_any_order = any_order().count(name) > 0;
  races = races_on_cpu().count(name) > 0;
  uninitialized = pager::uninitialized().count(name) > 0;
  fills = fillers().count(name) > 0;
  storage_op = storage_ops().count(name) > 0;
  reads_hardly = storage_op || name == "aten::_local_scalar_dense";
  lazy_clone = name == "aten::_lazy_clone";
  nested = name.rfind("aten::_nested", 0) == 0;
  tells_stream = name == "aten::record_stream";
  for (const RawReader& raw : raw_readers())
    if (this->name() == std::string("aten::") + raw.name) reads_raw = raw.reads;
  for (const char* part : {"convolution", "mm", "bmm", "addmv", "linear", "dot_product_attention", "lstm", "gru"})
    expensive |= name.find(part) != std::string::npos;
}

void OpInfo::classify(const c10::FunctionSchema& schema) {
  const std::string& name = schema.name();
  const std::string space = name.substr(0, name.find("::"));
  collective = space == "c10d";
  if (!own_namespaces().count(space)) {
    kind = OpClass::kForeign;
    native = is_native(op);
    keeps = native && !collective;
    if (!writes)  // an op that declares no write may write to all its arguments
      for (size_t i = 0; i < may_hold_tensors.size(); ++i)
        if ((written[i] = may_hold_tensors[i])) writes++;
  } else if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
             !op.hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
             !op.hasKernelForDispatchKey(c10::DispatchKey::CUDA)) {
    kind = OpClass::kComposite;
  } else if (!torchs) {
    // Torch's own, but not an op on tensors alone: the ops that it calls are paged, and its declared writes are
    // believed.
    kind = OpClass::kForeign;
    only_reads = !writes && space != "profiler" && space.find("c10d") == std::string::npos && space != "_dtensor";
  } else if (views().count(name)) {
    kind = OpClass::kView;
    writes = 0;
    std::fill(written.begin(), written.end(), uint8_t{0});
  } else if (pager::metadata().count(name) && writes == 0) {
    kind = OpClass::kMetadata;
  } else if (returns_aliases(schema) && !writes && !storage_op &&
             std::any_of(may_hold_tensors.begin(), may_hold_tensors.end(), [](uint8_t holds) { return holds; })) {
    kind = OpClass::kView;
  }
}

OpInfo::OpInfo(std::string name)
    : op(c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "")), kernel(std::move(name)) {}

std::string OpInfo::name() const {
  if (!kernel.empty()) return kernel;
  const auto& name = op.operator_name();
  return name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
}

bool runs_above_the_kernel(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  if (own_namespaces().count(name.substr(0, name.find("::")))) return false;
  for (const auto key : {c10::DispatchKey::CompositeImplicitAutograd, c10::DispatchKey::Autograd,
                         c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA})
    if (op.hasKernelForDispatchKey(key)) return is_native(op);
  return false;
}

namespace {

// The number of ops that have ended. A handle is an address, and a new op may have the address of one that has ended:
// one of a Python library, or of a notebook's function that is defined again.
std::atomic<uint32_t> ended_ops{0};

struct CountsEnds : c10::OpRegistrationListener {
  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle&) override { ended_ops++; }  // under the dispatcher's lock
};

}  // namespace

OpInfo* info_of(const c10::OperatorHandle& op) {
  // A few hundred ops are in use: there are two levels, the first without a lock.
  struct Entry {
    size_t hash = 0;
    OpInfo* info = nullptr;
    uint32_t ended = 0;
  };
  static thread_local Entry recent[1024];
  const size_t hash = std::hash<c10::OperatorHandle>()(op);
  Entry& e = recent[(hash >> 6) % 1024];
  const uint32_t ended = ended_ops.load(std::memory_order_relaxed);
  if (C10_LIKELY(e.info && e.hash == hash && e.info->op == op && e.ended == ended)) return e.info;
  Lock& lock = lock_of(LockId::kOpInfos);
  static auto* all = new std::unordered_map<c10::OperatorHandle, std::pair<OpInfo*, uint32_t>>;
  static auto* listening = new c10::RegistrationHandleRAII(
      c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<CountsEnds>()));
  (void)listening;
  const Hold held(lock);
  auto& [info, then] = (*all)[op];
  // Torch's own entries are kept: their signatures have earned trust.
  if (!info || (then != ended && !(info->torchs && is_torchs(op)))) info = new OpInfo(op);
  then = ended;
  e = {hash, info, ended};
  return info;
}

OpInfo* info_of_kernel(const std::string& key, const std::string& name) {
  static auto* all = new std::unordered_map<std::string, OpInfo*>;  // the GIL is held
  OpInfo*& info = (*all)[key];
  if (!info) info = new OpInfo(name);
  return info;
}

}  // namespace memmgr::pager
