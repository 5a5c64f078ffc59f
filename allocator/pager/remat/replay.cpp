#include "remat/replay.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <utility>

#include "base/gil.h"
#include "base/lock.h"
#include "base/refusal.h"
#include "base/thread_state.h"
#include "ops/numerics.h"
#include "ops/op_info.h"
#include "ops/rng.h"
#include "pools/pool.h"
#include "pools/scratch.h"
#include "pools/stream_rules.h"
#include "recipes/launch_recipe.h"
#include "recipes/op_signature.h"

namespace memmgr::pager {

namespace {

// No state of the caller's thread reaches the op: no autograd, autocast, functorch or mode, and not the pager's key.
struct Below {
  Below() { ++tl_running_recipes; }
  ~Below() { --tl_running_recipes; }
  static c10::impl::LocalDispatchKeySet keys() {
    c10::impl::PODLocalDispatchKeySet pod{};
    pod.set_included(c10::DispatchKeySet(c10::DispatchKey::BackendSelect));
    pod.set_excluded(c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    return pod;
  }
  c10::impl::ForceDispatchKeyGuard guard{keys()};
};

at::Tensor tensor_over(const TensorArg& a, StoragePtr storage) {
  auto t = c10::make_intrusive<c10::TensorImpl>(c10::Storage(std::move(storage)), a.keys, a.dtype);
  t->set_sizes_and_strides(a.sizes, a.strides, a.offset);
  if (a.wrapped_number) t->set_wrapped_number(true);
  return at::Tensor(std::move(t));
}

StoragePtr storage_over(at::DataPtr bytes, uint64_t nbytes) {
  c10::Allocator* allocator = c10::GetAllocator(bytes.device().type());
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(nbytes),
                                               std::move(bytes), allocator, true);
}

StoragePtr storage_for(Pool& pool, const TensorArg& a, Source& source) {
  switch (a.role) {
    case ArgumentRole::kValue:
      return storage_over(at::DataPtr(const_cast<char*>(a.value), a.device), a.storage_bytes);
    case ArgumentRole::kShape:
      return storage_over(at::DataPtr(nullptr, a.device), a.storage_bytes);
    case ArgumentRole::kRead:
      return storage_over(at::DataPtr(source.data, a.device), a.storage_bytes);
    case ArgumentRole::kFresh:
      return storage_over(pool.allocate(a.storage_bytes), a.storage_bytes);
    case ArgumentRole::kWritten:
    case ArgumentRole::kAlias:  // of launches, which have no tensors
      break;
  }
  if (source.own) return std::move(source.own);
  StoragePtr copy = storage_over(pool.allocate(a.storage_bytes), a.storage_bytes);
  pool.copy(pointer_of(copy.get()).get(), source.data, a.storage_bytes);
  return copy;
}

// The arguments of a recipe's call, with tensors over its sources. Lists of tensors were kept as their lengths.
torch::jit::Stack arguments_of(Pool& pool, const Recipe& r, std::vector<Source> sources,
                               std::vector<StoragePtr>* inputs, StoragePtr* written) {
  torch::jit::Stack stack(r.args.begin(), r.args.end());
  std::vector<std::vector<at::Tensor>> lists(stack.size());
  std::vector<bool> is_list(stack.size(), false);
  for (size_t i = 0; i < stack.size(); ++i)
    if (r.info->may_hold_tensors[i] && stack[i].isInt()) {
      is_list[i] = true;
      lists[i].resize(static_cast<size_t>(stack[i].toInt()));
    }
  for (size_t i = 0; i < r.tensors.size(); ++i) {
    const TensorArg& a = r.tensors[i];
    StoragePtr s = storage_for(pool, a, sources[i]);
    if (a.role == ArgumentRole::kWritten || a.role == ArgumentRole::kFresh) *written = s;
    inputs->push_back(s);
    at::Tensor t = tensor_over(a, std::move(s));
    if (a.element >= 0)
      lists[a.argument][static_cast<size_t>(a.element)] = std::move(t);
    else
      stack[a.argument] = std::move(t);
  }
  const auto& arguments = r.info->op.schema().arguments();
  for (size_t i = 0; i < stack.size(); ++i) {
    if (!is_list[i]) continue;
    const bool optional = arguments[i].type()->containedTypes().size() == 1 &&
                          arguments[i].type()->containedTypes()[0]->kind() == c10::TypeKind::OptionalType;
    if (optional) {
      c10::List<std::optional<at::Tensor>> list;
      for (at::Tensor& t : lists[i]) list.push_back(t.defined() ? std::optional<at::Tensor>(t) : std::nullopt);
      stack[i] = std::move(list);
    } else {
      stack[i] = c10::List<at::Tensor>(lists[i]);
    }
  }
  return stack;
}

// The storages of a call's results; null for one that is an input's.
std::vector<StoragePtr> results_on(const torch::jit::Stack& stack, const std::vector<StoragePtr>& inputs) {
  std::vector<StoragePtr> outputs;
  const auto add = [&](const c10::IValue& v) {
    c10::TensorImpl* t = v.isTensor() ? v.unsafeToTensorImpl() : nullptr;
    c10::StorageImpl* s = t && t->has_storage() ? t->unsafe_storage().unsafeGetStorageImpl() : nullptr;
    for (const StoragePtr& input : inputs)
      if (input.get() == s) s = nullptr;
    outputs.push_back(s ? StoragePtr::reclaim_copy(s) : StoragePtr());
  };
  for (const c10::IValue& v : stack) {
    if (v.isList())
      for (const c10::IValue& item : v.toListRef()) add(item);
    else
      add(v);
  }
  return outputs;
}

template <size_t>
using Argument = uintptr_t;

// Calls a function that takes so many words: addresses and integers.
template <size_t... I>
void call_with(void* function, const uintptr_t* words, std::index_sequence<I...>) {
  reinterpret_cast<void (*)(Argument<I>...)>(function)(words[I]...);
}

template <size_t... N>
constexpr auto callers(std::index_sequence<N...>) {
  return std::array<void (*)(void*, const uintptr_t*), sizeof...(N)>{
      [](void* f, const uintptr_t* words) { call_with(f, words, std::make_index_sequence<N>()); }...};
}

// Runs a compiled kernel's function. It reads no state of the thread but the numerics.
void run_function(const Recipe& r, const std::vector<StoragePtr>& storages) {
  static constexpr auto kCallers = callers(std::make_index_sequence<kMostKernelArguments + 1>());
  std::array<uintptr_t, kMostKernelArguments> words{};
  for (size_t i = 0; i < r.args.size(); ++i)
    if (r.args[i].isInt()) words[i] = static_cast<uintptr_t>(r.args[i].toInt());
  for (size_t i = 0; i < r.tensors.size(); ++i) {
    const TensorArg& a = r.tensors[i];
    words[a.argument] = reinterpret_cast<uintptr_t>(pointer_of(storages[i].get()).get()) +
                        static_cast<uintptr_t>(a.offset) * a.dtype.itemsize();
  }
  const Hold lock(lock_of(LockId::kLaunches));
  kCallers[r.args.size()](r.info->function.load(std::memory_order_relaxed), words.data());
}

// Runs a Triton kernel by Python. Other Python code does not come between: no finalizer of a collection, and no
// compiler.
void run_in_python(const Pool& pool, const Recipe& r, const std::vector<StoragePtr>& storages) {
  const pybind11::gil_scoped_acquire gil;
  const NoCollection uncollected;
  const NotCompiled interpreted;
  const auto checked = [](PyObject* o) {
    if (o) return o;
    python_error error;
    error.persist();
    throw std::move(error);
  };
  THPObjectPtr args(checked(PyTuple_New(static_cast<Py_ssize_t>(r.args.size()))));
  for (size_t i = 0; i < r.args.size(); ++i)
    if (r.args[i].isInt())
      PyTuple_SET_ITEM(args.get(), static_cast<Py_ssize_t>(i), checked(PyLong_FromLongLong(r.args[i].toInt())));
  for (size_t i = 0; i < r.tensors.size(); ++i)
    PyTuple_SET_ITEM(args.get(), static_cast<Py_ssize_t>(r.tensors[i].argument),
                     checked(THPVariable_Wrap(tensor_over(r.tensors[i], storages[i]))));
  THPObjectPtr names(checked(Py_BuildValue("{s:K}", "stream", reinterpret_cast<uintptr_t>(pool.stream()))));
  THPObjectPtr run(Py_NewRef(r.info->run.load(std::memory_order_relaxed)));
  THPObjectPtr none(checked(PyObject_Call(run.get(), args.get(), names.get())));
}

std::vector<StoragePtr> run_launch(Pool& pool, const Recipe& r, std::vector<Source> sources) {
  std::vector<StoragePtr> storages, outputs;
  for (size_t i = 0; i < r.tensors.size(); ++i) {
    const TensorArg& a = r.tensors[i];
    storages.push_back(a.role == ArgumentRole::kAlias ? StoragePtr() : storage_for(pool, a, sources[i]));
    if (a.role == ArgumentRole::kWritten || a.role == ArgumentRole::kFresh) outputs.push_back(storages.back());
  }
  for (size_t i = 0; i < r.tensors.size(); ++i)
    if (r.tensors[i].role == ArgumentRole::kAlias) storages[i] = storages[static_cast<size_t>(r.tensors[i].element)];
  if (r.info->function.load(std::memory_order_relaxed))
    run_function(r, storages);
  else
    run_in_python(pool, r, storages);
  return outputs;
}

}  // namespace

std::vector<StoragePtr> run(Pool& pool, const Recipe& r, std::vector<Source> sources) {
  Below below;
  const OwnWork own;
  c10::OptionalDeviceGuard here;
  if (queues) here.reset_device(pool.device);
  NumericsGuard numerics(r.numerics);
  const Filling filling(r.kind->clears.load(std::memory_order_relaxed) ? 0 : taking().fill);
  if (!r.info->kernel.empty()) return run_launch(pool, r, std::move(sources));
  StoragePtr written;
  std::vector<StoragePtr> inputs;
  torch::jit::Stack stack = arguments_of(pool, r, std::move(sources), &inputs, &written);
  OneDnnStaysOn onednn;
  if (r.rng.defined())
    draw_again(pool, r.info, r.kind->kernel, r.keys, r.rng, &stack);
  else
    r.kind->kernel.callBoxed(r.info->op, r.keys, &stack);
  onednn.returned();
  if (!r.info->writes) return results_on(stack, inputs);
  return {std::move(written)};
}

}  // namespace memmgr::pager
