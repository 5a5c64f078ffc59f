#include "recipes/recipe.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstring>
#include <unordered_map>

#include "base/lock.h"
#include "base/module_of_op.h"
#include "base/private_member.h"
#include "cells/adoption.h"
#include "cells/version.h"
#include "ops/numerics.h"
#include "ops/rng.h"
#include "pools/pool.h"
#include "pools/stream_rules.h"
#include "recipes/op_signature.h"
#include "recipes/overlap.h"

namespace memmgr::pager {

MEMMGR_PRIVATE_MEMBER(DefinitionOfHandle, c10::OperatorHandle, operatorDef_)
MEMMGR_PRIVATE_MEMBER(BoxedOfKernel, c10::KernelFunction, boxed_kernel_func_)
MEMMGR_PRIVATE_MEMBER(FunctorOfBoxed, c10::BoxedKernel, functor_)
MEMMGR_PRIVATE_MEMBER(CodeOfBoxed, c10::BoxedKernel, boxed_kernel_func_)

// Completes is_plain() for a tensor with other keys than most tensors of the CPU have.
static C10_NOINLINE bool is_plain_with_other_keys(const Session& session, const c10::TensorImpl* t) {
  using K = c10::DispatchKey;
  const c10::DispatchKeySet k = t->key_set();
  if (t->is_python_dispatch()) return false;
  if (k.has_any(c10::DispatchKeySet(
          {K::FuncTorchBatched, K::FuncTorchGradWrapper, K::Functionalize, K::ZeroTensor, K::Conjugate, K::Negative})))
    return false;
  return k.has(K::Dense) && t->layout() == c10::kStrided && !t->is_quantized() && !t->is_nested() &&
         (t->device().is_cpu() || (session.pool && t->device() == session.pool->device));
}

bool is_plain(const Session& session, const c10::TensorImpl* t) {
  using K = c10::DispatchKey;
  if (!t->has_storage() || t->has_symbolic_sizes_strides()) return false;
  constexpr c10::DispatchKeySet of_all({K::ADInplaceOrView, K::AutogradFunctionality, K::AutocastCPU});
  const uint64_t keys = t->key_set().raw_repr() & ~of_all.raw_repr();
  if (C10_LIKELY(keys == c10::DispatchKeySet(K::CPU).raw_repr())) return true;  // most
  return is_plain_with_other_keys(session, t);
}

static c10::DispatchKey key_of(c10::DeviceType type) {
  if (type == c10::kCPU) return c10::DispatchKey::CPU;
  return type == c10::kCUDA ? c10::DispatchKey::CUDA : c10::DispatchKey::PrivateUse1;
}

// ---- describing ----

namespace {

bool is_zero(const c10::IValue& v) { return v.isDouble() && v.toDouble() == 0; }

// Attention is declared to draw, also where its dropout is off.
bool draws(const OpInfo* info, const c10::IValue* args, size_t n) {
  if (!info->seeded) return false;
  const auto& arguments = info->op.schema().arguments();
  for (size_t i = 0; i < n; ++i)
    if (arguments[i].name() == "dropout_p") return !is_zero(args[i]);
  return true;
}

}  // namespace

TensorArg& add_tensor(Recipe* recipe, const c10::TensorImpl* t, size_t argument, uint64_t facts, HashOf<false>* hash) {
  TensorArg& a = recipe->tensors.emplace_back();
  a.argument = static_cast<uint16_t>(argument);
  a.storage_bytes = t->unsafe_storage().nbytes();
  a.offset = t->storage_offset();
  a.dtype = t->dtype();
  a.device = t->device();
  a.wrapped_number = t->is_wrapped_number();
  const c10::IntArrayRef sizes = t->sizes(), strides = t->strides();
  hash->mix(static_cast<uint64_t>(a.dtype.toScalarType()) * 37 + sizes.size() + (a.wrapped_number ? 2000 : 0) + facts);
  a.sizes.resize_for_overwrite(sizes.size());
  a.strides.resize_for_overwrite(sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) {  // few: quicker than a call that copies
    hash->mix(static_cast<uint64_t>(a.sizes[i] = sizes[i]));
    hash->mix(static_cast<uint64_t>(a.strides[i] = strides[i]) + 7);
  }
  return a;
}

bool is_value(const TensorArg& a, const c10::TensorImpl* t) {
  return a.storage_bytes <= sizeof a.value && t->numel() <= 1 && t->device().is_cpu() &&
         t->unsafe_storage().unsafeGetStorageImpl()->data();
}

namespace {

struct Describer {
  Session& session;
  OpInfo* info;
  Recipe* recipe;
  HashOf<false> hash;
  c10::SmallVector<Cell*, 8> cells;                       // cells of `recipe->tensors`; null for values
  c10::SmallVector<const c10::StorageImpl*, 8> storages;  // of the same tensors, if the op writes
  bool ok = true;

  void tensor(const c10::IValue& v, size_t argument, int32_t element) {
    c10::TensorImpl* t = v.unsafeToTensorImpl();
    if (!is_plain(session, t)) {
      ok = false;
      return;
    }
    c10::StorageImpl* s = t->unsafe_storage().unsafeGetStorageImpl();
    const bool written = info->written[argument];
    const bool here = s->device_type() == session.pool->device.type();
    TensorArg& a = add_tensor(recipe, t, argument, (written ? 1000 : 0) + (here ? 4000 : 0), &hash);
    a.element = element;
    a.keys = c10::DispatchKeySet(key_of(t->device().type()));
    Cell* c = cell_of(s);
    const uint64_t whole = static_cast<uint64_t>(t->numel()) * t->itemsize();
    if (info->kind == OpClass::kMetadata) {
      a.role = ArgumentRole::kShape;
      c = nullptr;
    } else if (written && info->overwriter && whole == a.storage_bytes && t->is_non_overlapping_and_dense()) {
      a.role = ArgumentRole::kFresh;
      c = nullptr;
    } else if (!written && !c && is_value(a, t)) {
      a.role = ArgumentRole::kValue;
      std::memcpy(a.value, s->data(), a.storage_bytes);
    } else if (a.storage_bytes == 0) {
      a.role = ArgumentRole::kValue;
    } else {
      a.role = written ? ArgumentRole::kWritten : ArgumentRole::kRead;
      if (!c && here) c = adopt(session, s);
      if (!c) ok = false;
    }
    cells.push_back(c);
    if (info->writes) storages.push_back(s);
  }
};

}  // namespace

// Returns the registered kernel; null: there is none. Libraries replace kernels of torch's, some while one of their
// contexts is open.
static const c10::KernelFunction* registered(const c10::OperatorHandle& op, c10::DispatchKeySet keys) {
  try {
    return &(op.*private_member(DefinitionOfHandle()))->op.lookup(keys);
  } catch (const c10::Error&) {
    return nullptr;
  }
}

// The address is not reused while a copy of the kernel exists.
static const void* code_of(const c10::KernelFunction& kernel) {
  const c10::BoxedKernel& boxed = kernel.*private_member(BoxedOfKernel());
  const void* functor = (boxed.*private_member(FunctorOfBoxed())).get();
  return functor ? functor : reinterpret_cast<const void*>(boxed.*private_member(CodeOfBoxed()));
}

// Describes the arguments of a call. False: the call cannot be recorded.
static bool describe_arguments(Describer* d, const OpInfo* info, const c10::IValue* args, size_t n) {
  Recipe* const r = d->recipe;
  const bool statistics = info->moves_statistics(args);
  r->args.reserve(n);
  for (size_t i = 0; i < n && d->ok; ++i) {
    const c10::IValue& v = args[i];
    const bool left_out =
        statistics && (static_cast<int>(i) == info->running_mean || static_cast<int>(i) == info->running_var);
    if (left_out) {  // they change once a step; the op's results in training do not depend on them
      r->args.emplace_back();
      d->hash.mix(uint64_t{29});
    } else if (v.isTensor()) {
      const bool defined = v.toTensor().defined();
      if (defined) d->tensor(v, i, -1);
      r->args.push_back(defined ? c10::IValue() : v);
      d->hash.mix(uint64_t{31});
    } else if (info->may_hold_tensors[i] && v.isList()) {
      const auto list = v.toListRef();
      d->hash.mix(33 + 64 * list.size());
      for (size_t k = 0; k < list.size(); ++k)
        if (list[k].isTensor() && list[k].toTensor().defined()) {
          d->tensor(list[k], i, static_cast<int32_t>(k));
          d->hash.mix(static_cast<uint64_t>(k));
        } else if (!list[k].isNone() && !list[k].isTensor()) {
          d->ok = false;
        }
      r->args.emplace_back(static_cast<int64_t>(list.size()));
    } else {
      if (info->may_hold_tensors[i] && !v.isNone()) d->ok = false;
      if (!d->hash.mix_value(v)) d->ok = false;
      r->args.push_back(v);
    }
  }
  size_t written = 0;
  for (const TensorArg& a : r->tensors) written += a.role == ArgumentRole::kWritten || a.role == ArgumentRole::kFresh;
  if (!d->ok || written != static_cast<size_t>(info->writes)) return false;  // a list counts each of its tensors
  return written == 0 || !reads_its_own_writes(*r, d->storages);
}

// Returns true if the recipe can have the version as an input, or as memory that its op writes.
static bool may_take_locked(const Recipe* r, const TensorArg& a, const Cell* c) REQUIRES(graph_lock()) {
  const Version* v = c->version;
  if (a.role == ArgumentRole::kFresh) return is_blank(c) && c->escape == Escape::kNone;
  // Bytes that foreign code can write to unseen, or that are uninitialized, do not determine the op's result.
  if (c->escape != Escape::kNone || v->uninitialized) return false;
  if (a.role != ArgumentRole::kWritten) return true;
  // Running statistics: a compiled kernel writes them beside its results. Their old bytes are kept by value.
  if (!r->info->kernel.empty() && c->small && !v->recipe) return true;
  return v->recipe && recipe_available_locked(v->recipe);
}

// Gives the recipe its inputs' versions, with a reference to each. False: one of them does not determine the result,
// and the recipe has no references.
static bool take_versions_locked(Recipe* r, const c10::SmallVectorImpl<Cell*>& cells) REQUIRES(graph_lock()) {
  uint16_t depth = 0;
  bool ok = true;
  for (size_t i = 0; i < r->tensors.size() && ok; ++i) {
    Cell* c = cells[i];
    if (!c) continue;
    Version* v = c->version;
    ok = may_take_locked(r, r->tensors[i], c);
    if (!ok) break;
    if (r->tensors[i].role == ArgumentRole::kFresh) continue;
    if (v->recipe) {
      depth = std::max(depth, v->depth);
      r->checked |= v->recipe->checked;
    }
    v->refs++;
    r->tensors[i].version = v;
  }
  r->depth = static_cast<uint16_t>(depth + 1);
  if (ok && r->depth <= kLongestChain) return true;
  // None of these references is the last, since each cell has one.
  for (TensorArg& a : r->tensors)
    if (a.version) a.version->refs--;
  r->tensors.clear();
  return false;
}

std::unique_ptr<Recipe> with_inputs(Session& session, std::unique_ptr<Recipe> r, HashOf<false> hash,
                                    const c10::KernelFunction& kernel, const void* code,
                                    const c10::SmallVectorImpl<Cell*>& cells) {
  r->numerics = numerics_now();
  hash.mix(static_cast<uint64_t>(r->numerics));
  r->kind = kind_of(session.options, hash.value, *r, kernel, code);
  const Trust trust = r->kind->trust.load(std::memory_order_relaxed);
  if (trust == Trust::kNo) return nullptr;
  r->checked = trust == Trust::kFamily;
  const Hold lock(graph_lock());
  if (!take_versions_locked(r.get(), cells)) return nullptr;
  r->bytes = sizeof(Recipe) + r->tensors.size() * (sizeof(TensorArg) + sizeof(Version)) +
             r->args.size() * sizeof(c10::IValue) + (r->rng.defined() ? 5056 : 0);
  totals.recipe_bytes += r->bytes;
  session.counters.recorded_ops += 1;
  return r;
}

std::unique_ptr<Recipe> describe(Session& session, OpInfo* info, c10::DispatchKeySet keys, const c10::IValue* args,
                                 size_t n) {
  if (C10_UNLIKELY(info->differs_by_chance(args, queues)) && !at::globalContext().deterministicAlgorithms())
    return nullptr;
  std::unique_ptr<Recipe> r(new Recipe);  // make_unique would fill it with zeros first
  r->info = info;
  r->keys = keys;
  Describer d{session, info, r.get(), {}, {}, {}, true};
  d.hash.mix(reinterpret_cast<uintptr_t>(info));
  d.hash.mix(r->keys.raw_repr());
  const c10::KernelFunction* const kernel = registered(info->op, r->keys);
  if (!kernel) return nullptr;
  const void* const code = code_of(*kernel);
  d.hash.mix(reinterpret_cast<uintptr_t>(code));
  if (!describe_arguments(&d, info, args, n)) return nullptr;
  if (draws(info, args, n)) {
    if (!can_draw_again(*session.pool, info)) return nullptr;
    r->rng = generator_before(*session.pool, info, args);
    if (!r->rng.defined()) return nullptr;
  }
  return with_inputs(session, std::move(r), d.hash, *kernel, code, d.cells);
}

void discard(std::unique_ptr<Recipe> recipe) {
  if (!recipe) return;
  Trash trash;
  const Hold lock(graph_lock());
  for (const TensorArg& a : recipe->tensors)
    if (a.version) release_version_locked(a.version, &trash);
  totals.recipe_bytes -= recipe->bytes;
  recipe.reset();
}

void attach_locked(std::unique_ptr<Recipe> recipe, c10::ArrayRef<Version*> outputs, Trash* trash) {
  Recipe* r = recipe.release();
  r->refs = 1;
  r->outputs.assign(outputs.begin(), outputs.end());
  r->module = module_of(r->info);
  for (const TensorArg& a : r->tensors) {
    if (!a.version) continue;
    a.version->readers.push_back(r);
    r->broken |= !available_locked(a.version);
  }
  for (Version* v : outputs) {
    if (!v) continue;
    forget_recipe_locked(v, trash);
    v->recipe = r;
    if (v->cell && v->cell->version == v) count_root_locked(v->cell);
    v->depth = r->depth;
    r->refs++;
  }
  release_recipe_locked(r, trash);
}

void keep_recipes_few(Session& session) {
  const uint64_t bytes = totals.recipe_bytes.load();
  if (C10_LIKELY(bytes <= kLeastRecipeBytes)) return;
  if (C10_UNLIKELY(bytes > recipe_bytes_limit(session))) cut_recipes(session, false);
}

void cut_recipes(Session& session, bool all) {
  Trash trash;
  const Hold lock(graph_lock());
  std::vector<std::pair<uint64_t, Version*>> found;
  for_each_cell_locked([&](Cell* c) REQUIRES(graph_lock()) {
    Version* v = c->version;
    if (v && v->recipe && v->needed == 0 && !v->evicted) found.emplace_back(c->last_touch.load(), v);
  });
  const size_t n = all ? found.size() : (found.size() + 1) / 2;
  if (n < found.size()) std::nth_element(found.begin(), found.begin() + static_cast<ptrdiff_t>(n), found.end());
  for (size_t i = 0; i < n; ++i) forget_recipe_locked(found[i].second, &trash);
  session.counters.cut_recipes += n;
}

double seconds_to_make_locked(const Version* v) {
  constexpr size_t kLooks = 48;
  c10::SmallVector<const Recipe*, kLooks> seen;
  c10::SmallVector<const Version*, kLooks> open{v};
  double seconds = 0;
  while (!open.empty()) {
    const Version* at = open.pop_back_val();
    const Recipe* r = at->recipe;
    if (!r || std::find(seen.begin(), seen.end(), r) != seen.end()) continue;
    if (seen.size() == kLooks) return seconds * 4;  // a long chain is expensive in any case
    seen.push_back(r);
    seconds += seconds_of(r);
    for (const TensorArg& a : r->tensors)
      if (a.version && !has_bytes_locked(a.version)) open.push_back(a.version);
  }
  return seconds;
}

}  // namespace memmgr::pager
