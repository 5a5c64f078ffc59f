#include "ops/op_info.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <unordered_map>

#include "base/lock.h"
#include "base/no_destructor.h"

namespace memmgr::pager {

namespace {

// Namespaces whose ops write to the arguments that their schemas declare and to nothing else. c10d is none of them: its
// ops declare no write, and write.
constexpr std::string_view kOwnNamespaces[] = {"aten",
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

bool is_own_namespace(std::string_view space) {
  return std::find(std::begin(kOwnNamespaces), std::end(kOwnNamespaces), space) != std::end(kOwnNamespaces);
}

}  // namespace

// Facts about ops that their schemas do not have. An OpInfo looks its op up once, when it is made.
namespace facts {

enum Fact : unsigned {
  kNone = 0,
  // Aliases without a declaration, or the declared write moves no bytes.
  kViews = 1 << 0,
  // Reads the geometry of its tensors only.
  kMetadata = 1 << 1,
  // Its outputs are uninitialized.
  kUninitialized = 1 << 2,
  // An in-place op that never reads the old bytes.
  kOverwrites = 1 << 3,
  // Needs no input's bytes, so that its outputs can be made again with and without gradient: an optimizer's first
  // states, caches.
  kFills = 1 << 4,
  // Reads its `out=`: it adds to it.
  kAddsToOut = 1 << 5,
  // Changes a tensor's storage, or its length.
  kStorage = 1 << 6,
  // Its results depend on more than arguments and generator, or it reads uninitialized memory, or it keeps state.
  kNeverAgain = 1 << 7,
  // Its kernels for accelerators add up, or choose, in the order in which threads arrive: a forward op for which
  // torch.use_deterministic_algorithms has another kernel, or an error. Two runs often agree, so that it passes the
  // determinism check, and differ later.
  kAnyOrder = 1 << 8,
  // With kAnyOrder: its CPU threads race, too. Where indices repeat, the last write wins, or sums come in any order.
  // That depends on the indices' values, so no check can find it.
  kRaces = 1 << 9,
  // Its schema does not declare its writes to `running_mean` and `running_var`. It writes in training; without an
  // argument `training`, always.
  kStatistics = 1 << 10,
};

struct NamedOp {
  std::string_view name;
  unsigned facts;
  // An argument that the op writes without a declaration; tests/ops/state_arguments.py has the reason for each that
  // looks like state. The backwards of RNNs compute in the memory that their forward kept for them, so a second
  // backward (`retain_graph`) reads it again. cuDNN's batch norm gets its reserve as memory that it may write. cuDNN
  // and MIOpen advance the state of their dropout generator in place; torch keeps it in one tensor for each device and
  // passes it to each forward. oneDNN's quantized convolution adds to `qaccum` in place where that is channels_last,
  // and returns it. Such an argument takes the op's recipe away; a fact is not needed for that. Empty: none.
  std::string_view undeclared_write = {};
};

// Sorted by name. It names no overload: a fact is one of all overloads.
// clang-format off
static constexpr NamedOp kNamedOps[] = {
    {"aten::_batch_norm_with_update", kNeverAgain},
    {"aten::_compute_linear_combination", kAddsToOut},
    {"aten::_convolution", kAnyOrder},
    {"aten::_copy_from", kNone, "dst"},
    {"aten::_copy_from_and_resize", kNone, "dst"},
    {"aten::_cudnn_init_dropout_state", kNeverAgain},
    {"aten::_cudnn_rnn", kNeverAgain, "dropout_state"},
    {"aten::_cudnn_rnn_backward", kNone, "reserve"},
    {"aten::_efficientzerotensor", kNeverAgain},
    {"aten::_empty_affine_quantized", kUninitialized},
    {"aten::_empty_per_channel_affine_quantized", kUninitialized},
    {"aten::_foobar", kNeverAgain},
    {"aten::_fused_moving_avg_obs_fq_helper", kNeverAgain},
    {"aten::_fw_primal", kViews},
    {"aten::_has_compatible_shallow_copy_type", kMetadata},
    {"aten::_has_same_storage_numel", kMetadata},
    {"aten::_index_put_impl_", kAnyOrder | kRaces},
    {"aten::_is_zerotensor", kMetadata},
    {"aten::_local_scalar_dense", kNeverAgain},
    {"aten::_make_dual", kViews},
    {"aten::_native_batch_norm_legit", kStatistics},
    {"aten::_pin_memory", kNeverAgain},
    {"aten::_reshape_alias", kViews},
    {"aten::_resize_output", kStorage},
    {"aten::_resize_output_", kStorage},
    {"aten::_to_cpu", kNeverAgain},
    {"aten::_unsafe_index_put", kAnyOrder | kRaces},
    {"aten::_unsafe_view", kViews},
    {"aten::_version", kMetadata},
    {"aten::as_strided_", kViews},
    {"aten::batch_norm_backward", kNone, "reserve"},
    {"aten::batch_norm_gather_stats", kStatistics},
    {"aten::batch_norm_gather_stats_with_counts", kStatistics},
    {"aten::batch_norm_update_stats", kStatistics},
    {"aten::bernoulli_", kOverwrites},
    {"aten::bincount", kAnyOrder},
    {"aten::cauchy_", kOverwrites},
    {"aten::convolution", kAnyOrder},
    {"aten::convolution_overrideable", kAnyOrder},
    {"aten::copy_", kOverwrites},
    {"aten::cudnn_batch_norm", kStatistics},
    {"aten::cudnn_batch_norm_backward", kNone, "reserveSpace"},
    {"aten::cudnn_convolution_transpose", kAnyOrder},
    {"aten::cumsum", kAnyOrder},
    {"aten::cumsum_", kAnyOrder},
    {"aten::detach_", kViews},
    {"aten::dim", kMetadata},
    {"aten::empty", kUninitialized},
    {"aten::empty_like", kMetadata | kUninitialized},
    {"aten::empty_permuted", kUninitialized},
    {"aten::empty_quantized", kUninitialized},
    {"aten::empty_strided", kUninitialized},
    {"aten::exponential_", kOverwrites},
    {"aten::fill_", kOverwrites},
    {"aten::from_file", kNeverAgain},
    {"aten::full", kFills},
    {"aten::full_like", kMetadata | kFills},
    {"aten::geometric_", kOverwrites},
    {"aten::histc", kAnyOrder},
    {"aten::index_add", kAnyOrder},
    {"aten::index_add_", kAnyOrder},
    {"aten::index_copy", kAnyOrder},
    {"aten::index_copy_", kAnyOrder},
    {"aten::index_put", kAnyOrder | kRaces},
    {"aten::index_put_", kAnyOrder | kRaces},
    {"aten::index_reduce", kAnyOrder},
    {"aten::index_reduce_", kAnyOrder},
    {"aten::is_complex", kMetadata},
    {"aten::is_contiguous", kMetadata},
    {"aten::is_floating_point", kMetadata},
    {"aten::is_same_size", kMetadata},
    {"aten::kthvalue", kAnyOrder},
    {"aten::linalg_lstsq", kNeverAgain},
    {"aten::log_normal_", kOverwrites},
    {"aten::max_unpool2d", kAnyOrder},
    {"aten::max_unpool3d", kAnyOrder},
    {"aten::median", kAnyOrder},
    {"aten::miopen_batch_norm", kStatistics},
    {"aten::miopen_rnn", kNeverAgain, "dropout_state"},
    {"aten::miopen_rnn_backward", kNone, "reserve"},
    {"aten::mkldnn_rnn_layer_backward", kNone, "workspace"},
    {"aten::nanmedian", kAnyOrder},
    {"aten::native_batch_norm", kStatistics},
    {"aten::new_empty", kMetadata | kUninitialized},
    {"aten::new_empty_strided", kMetadata | kUninitialized},
    {"aten::new_full", kMetadata | kFills},
    {"aten::new_ones", kMetadata | kFills},
    {"aten::new_zeros", kMetadata | kFills},
    {"aten::nll_loss2d_forward", kAnyOrder},
    {"aten::normal_", kOverwrites},
    {"aten::numel", kMetadata},
    {"aten::ones", kFills},
    {"aten::ones_like", kMetadata | kFills},
    {"aten::put", kAnyOrder | kRaces},
    {"aten::put_", kAnyOrder | kRaces},
    {"aten::rand_like", kMetadata},
    {"aten::randint_like", kMetadata},
    {"aten::randn_like", kMetadata},
    {"aten::random_", kOverwrites},
    {"aten::record_stream", kViews},
    {"aten::rename_", kViews},
    {"aten::requires_grad_", kViews},
    {"aten::resize_", kStorage},
    {"aten::resize_as_", kStorage},
    {"aten::resize_as_sparse_", kStorage},
    {"aten::result_type", kMetadata},
    {"aten::retain_grad", kViews},
    {"aten::rrelu_with_noise", kNeverAgain},
    {"aten::rrelu_with_noise_functional", kNeverAgain},
    {"aten::scatter", kAnyOrder},
    {"aten::scatter_", kAnyOrder},
    {"aten::scatter_add", kAnyOrder},
    {"aten::scatter_add_", kAnyOrder},
    {"aten::scatter_reduce", kAnyOrder},
    {"aten::scatter_reduce_", kAnyOrder},
    {"aten::segment_reduce", kAnyOrder},
    {"aten::set_", kStorage},
    {"aten::set_data", kStorage},
    {"aten::size", kMetadata},
    {"aten::sparse_resize_", kStorage},
    {"aten::sparse_resize_and_clear_", kStorage},
    {"aten::squeeze_", kViews},
    {"aten::stride", kMetadata},
    {"aten::swapaxes_", kViews},
    {"aten::swapdims_", kViews},
    {"aten::sym_numel", kMetadata},
    {"aten::sym_size", kMetadata},
    {"aten::sym_storage_offset", kMetadata},
    {"aten::sym_stride", kMetadata},
    {"aten::t_", kViews},
    {"aten::transpose_", kViews},
    {"aten::uniform_", kOverwrites},
    {"aten::unsqueeze_", kViews},
    {"aten::zero_", kOverwrites},
    {"aten::zeros", kFills},
    {"aten::zeros_like", kMetadata | kFills},
    {"quantized::conv2d_add", kNone, "qaccum"},
    {"quantized::conv2d_add_relu", kNone, "qaccum"},
    {"symm_mem::one_shot_all_reduce_copy_out", kNone, "symm_buffer"},
};
// clang-format on

static constexpr bool sorted_by_name() {
  for (size_t i = 1; i < std::size(kNamedOps); ++i)
    if (!(kNamedOps[i - 1].name < kNamedOps[i].name)) return false;
  return true;
}
static_assert(sorted_by_name());

// Returns the row of the op; one without facts if the table does not name it.
static const NamedOp& named(std::string_view name) {
  static constexpr NamedOp kOther{"", kNone};
  const auto* const found = std::lower_bound(std::begin(kNamedOps), std::end(kNamedOps), name,
                                             [](const NamedOp& row, std::string_view n) { return row.name < n; });
  return found != std::end(kNamedOps) && found->name == name ? *found : kOther;
}

}  // namespace facts

namespace {

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

static constexpr RawReader kRawReaders[] = {
    {"lstm.data", RawReads::kWeights},
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
    {"fbgemm_pack_gemm_matrix_fp16", RawReads::kAll},
};

c10::ArrayRef<RawReader> raw_readers() { return kRawReaders; }

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

OpInfo::OpInfo(const c10::OperatorHandle& handle) : op(handle), called(handle.operator_name()) {
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
  const facts::NamedOp& row = facts::named(schema.name());
  read_arguments(schema, row);
  read_tables(row);
  classify(schema, row);
  const bool never =
      (row.facts & facts::kNeverAgain) || !row.undeclared_write.empty() || storage_op || uninitialized || lazy_clone;
  const bool own = kind == OpClass::kOrdinary || kind == OpClass::kMetadata;
  recordable = own && !never && writes <= 1 && (running_mean < 0 || writes == 0);
}

void OpInfo::read_arguments(const c10::FunctionSchema& schema, const facts::NamedOp& row) {
  bool writes_out = false;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& a = schema.arguments()[i];
    const bool write = (a.alias_info() && a.alias_info()->isWrite()) ||
                       (!row.undeclared_write.empty() && row.undeclared_write == a.name());
    may_hold_tensors.push_back(holds_tensors(*a.type()));
    written.push_back(write);
    writes += write ? 1 : 0;
    writes_out |= write && a.is_out();
    if (a.type()->kind() == c10::TypeKind::GeneratorType ||
        (a.type()->kind() == c10::TypeKind::OptionalType && a.name() == "generator"))
      generator = static_cast<int>(i);
    if (a.name() == "transposed") in_order_unless = static_cast<int>(i);  // the op is a convolution's gradient
    if (row.facts & facts::kStatistics) {
      if (a.name() == "running_mean") running_mean = static_cast<int>(i);
      if (a.name() == "running_var") running_var = static_cast<int>(i);
      if (a.name() == "training") training = static_cast<int>(i);
    }
  }
  always_training = training < 0 && running_mean >= 0;
  // out= is written and not read. The returned tensor shows how much of it was written.
  overwriter =
      (row.facts & facts::kOverwrites) || (torchs && writes_out && returns && !(row.facts & facts::kAddsToOut));
}

void OpInfo::read_tables(const facts::NamedOp& row) {
  const std::string& name = op.operator_name().name;
  adds_in_any_order = row.facts & facts::kAnyOrder;
  races = row.facts & facts::kRaces;
  uninitialized = row.facts & facts::kUninitialized;
  fills = row.facts & facts::kFills;
  storage_op = row.facts & facts::kStorage;
  reads_hardly = storage_op || name == "aten::_local_scalar_dense";
  lazy_clone = name == "aten::_lazy_clone";
  nested = name.rfind("aten::_nested", 0) == 0;
  tells_stream = name == "aten::record_stream";
  for (const RawReader& raw : raw_readers())
    if (this->name() == std::string("aten::") + raw.name) reads_raw = raw.reads;
}

void OpInfo::classify(const c10::FunctionSchema& schema, const facts::NamedOp& row) {
  const std::string& name = schema.name();
  const std::string space = name.substr(0, name.find("::"));
  collective = space == "c10d";
  if (!is_own_namespace(space)) {
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
  } else if (row.facts & facts::kViews) {
    kind = OpClass::kView;
    writes = 0;
    std::fill(written.begin(), written.end(), uint8_t{0});
  } else if ((row.facts & facts::kMetadata) && writes == 0) {
    kind = OpClass::kMetadata;
  } else if (returns_aliases(schema) && !writes && !storage_op &&
             std::any_of(may_hold_tensors.begin(), may_hold_tensors.end(), [](uint8_t holds) { return holds; })) {
    kind = OpClass::kView;
  }
}

OpInfo::OpInfo(std::string name)
    : op(c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "")),
      called(op.operator_name()),
      kernel(std::move(name)) {}

std::string OpInfo::name() const {
  if (!kernel.empty()) return kernel;
  return called.name + (called.overload_name.empty() ? "" : "." + called.overload_name);
}

bool runs_above_the_kernel(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  if (is_own_namespace(std::string_view(name).substr(0, name.find("::")))) return false;
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

struct KnownOps {
  std::unordered_map<c10::OperatorHandle, std::pair<OpInfo*, uint32_t>> all;  // with ended_ops at that time
  c10::RegistrationHandleRAII listening =
      c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<CountsEnds>());
};

NoDestructor<KnownOps> known_ops;

// By a kernel's key. Guarded by the GIL.
NoDestructor<std::unordered_map<std::string, OpInfo*>> known_kernels;

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
  const Hold lock(lock_of(LockId::kOpInfos));
  auto& [info, then] = known_ops->all[op];
  // Torch's own entries are kept: their signatures have earned trust.
  if (!info || (then != ended && !(info->torchs && is_torchs(op)))) info = new OpInfo(op);
  then = ended;
  e = {hash, info, ended};
  return info;
}

OpInfo* info_of_kernel(const std::string& key, const std::string& name) {
  OpInfo*& info = (*known_kernels)[key];
  if (!info) info = new OpInfo(name);
  return info;
}

void unmark_ops() {
  for (auto& [key, info] : *known_kernels) info->marked.store(false);
  const Hold lock(lock_of(LockId::kOpInfos));
  for (auto& [op, known] : known_ops->all) known.first->marked.store(false);
}

}  // namespace memmgr::pager
