// Typed kernels of the ops that programs of many small ops run most. Where all tensors of such an op are small and the
// pager has nothing to do for the thread, the op goes straight on: its arguments are not boxed, and nothing is looked
// up. In any other case the boxed kernel gets the call, as if there were no other.
#include <ATen/Operators.h>
#include <ATen/core/IListRef.h>
#include <ATen/core/boxing/impl/boxing.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <tuple>
#include <type_traits>
#include <vector>

#include "base/forked_child.h"
#include "base/kernel_slots.h"
#include "base/refusal.h"
#include "base/seen_threads.h"
#include "base/thread_state.h"
#include "cells/adoption.h"
#include "cells/cell.h"
#include "cells/mapped_range.h"
#include "cells/names.h"
#include "concurrency/deferred_steps.h"
#include "dispatch/kernel.h"
#include "dispatch/the_session.h"
#include "guards/collective_pins.h"
#include "guards/ddp_reducer.h"
#include "guards/nested_tensors.h"
#include "ops/op_info.h"
#include "pools/capturing.h"
#include "pools/small_blocks.h"
#include "pools/stream_rules.h"

namespace memmgr::pager {

namespace {

// The storage of a tensor that has one and no parts; else null.
const c10::StorageImpl* storage_in(const at::Tensor& t) {
  const c10::TensorImpl* impl = t.unsafeGetTensorImpl();
  return impl->has_storage() ? impl->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

// True if the pager ignores the argument: it is no tensor, or one over a small storage without a cell.
bool passes(const at::Tensor& t) {
  const c10::StorageImpl* s = storage_in(t);
  return s && !cell_of(s) && is_small(the_session.options, s);
}
bool passes(const at::ITensorListRef& tensors) {
  for (const at::Tensor& t : tensors)
    if (!passes(t)) return false;
  return true;
}
template <class T>
bool passes(const T&) {
  using at::OptionalIntArrayRef, at::Scalar, at::ScalarType, c10::MemoryFormat, c10::SymInt, c10::SymIntArrayRef;
  static_assert(std::is_arithmetic_v<T> || std::is_same_v<T, Scalar> || std::is_same_v<T, SymInt> ||
                    std::is_same_v<T, SymIntArrayRef> || std::is_same_v<T, at::IntArrayRef> ||
                    std::is_same_v<T, OptionalIntArrayRef> || std::is_same_v<T, std::optional<ScalarType>> ||
                    std::is_same_v<T, std::optional<SymInt>> || std::is_same_v<T, std::optional<MemoryFormat>> ||
                    std::is_same_v<T, std::string_view> || std::is_same_v<T, c10::string_view>,
                "tensors may be in it");
  return true;
}

// A view's first argument: one that is read with a storage of its own.
template <class... Rest>
bool is_strided(const at::Tensor& t, const Rest&...) {
  return t.unsafeGetTensorImpl()->has_storage();
}
template <class... Rest>
bool is_strided(const at::ITensorListRef&, const Rest&...) {
  return false;
}

void add_storages(const at::Tensor& t, std::vector<const c10::StorageImpl*>* all) { all->push_back(storage_in(t)); }
void add_storages(const at::ITensorListRef& tensors, std::vector<const c10::StorageImpl*>* all) {
  for (const at::Tensor& t : tensors) add_storages(t, all);
}
template <class T>
void add_storages(const T&, std::vector<const c10::StorageImpl*>*) {}

bool is_large(const at::Tensor& t) {
  const c10::StorageImpl* s = storage_in(t);
  return s && !cell_of(s) && !s->sym_nbytes().is_heap_allocated() &&
         s->nbytes() >= least_born_bytes.load(std::memory_order_relaxed);
}

bool is_large(const std::vector<at::Tensor>& all) {
  for (const at::Tensor& t : all)
    if (is_large(t)) return true;
  return false;
}

template <class... T>
bool is_large(const std::tuple<T...>& all) {
  return std::apply([](const auto&... t) { return (is_large(t) || ...); }, all);
}

// True if the work of the pager for the op depends on its tensors alone.
bool tensors_decide(const OpInfo* info, c10::DispatchKeySet keys) {
  const auto any = [](const auto& count) { return count.load(std::memory_order_relaxed) != 0; };
  if (C10_UNLIKELY(any(queues) || any(listeners) || any(pending_slices) || any(captures))) return false;
  if (C10_UNLIKELY(any(forked_child) || any(reducers_listening) || any_ranges() || works_in_flight())) return false;
  return !NestedOp::is_one(info, keys) && !keys.has(c10::DispatchKey::Python) && tl_regions == 0 && !tl_foreign;
}

template <class Op, class Signature = typename Op::schema>
struct Typed;

template <class Op, class R, class... A>
struct Typed<Op, R(A...)> {
  static R call(c10::DispatchKeySet keys, A... args) {
    static const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
    static OpInfo* const info = info_of(op);
    if (C10_LIKELY(the_session.open.load(std::memory_order_relaxed))) {
      InKernel inside;
      if (C10_LIKELY(the_session.open.load(std::memory_order_acquire)) && tensors_decide(info, keys)) {
        const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
        if (info->kind == OpClass::kView ? is_strided(args...)
                                         : info->kind == OpClass::kOrdinary && (passes(args) && ...)) {
          if constexpr (std::is_reference_v<R>) {
            inside.count_op();
            return in_place(op, info, below, std::forward<A>(args)...);
          } else if (info->kind == OpClass::kView) {
            inside.count_op();
            const c10::impl::ExcludeDispatchKeyGuard guard(kKey);
            return Op::redispatch(below, args...);
          } else {
            R made;
            if (C10_LIKELY(functional(below, &made, args...))) {
              inside.count_op();  // else the boxed kernel counts it
              if (C10_UNLIKELY(is_large(made))) adopt(info, made, args...);
              return made;
            }
          }
        }
      }
    }
    return c10::impl::BoxedKernelWrapper<R(A...)>::call(boxed_kernel(), op, keys, std::forward<A>(args)...);
  }

 private:
  // False: it found no room. The boxed kernel makes room, or explains.
  static bool functional(c10::DispatchKeySet below, std::remove_reference_t<R>* made, const A&... args) {
    try {
      const Depth depth;
      const c10::impl::ExcludeDispatchKeyGuard guard(kKey);
      OneDnnStaysOn onednn;
      *made = Op::redispatch(below, args...);
      onednn.returned();
      return true;
    } catch (const c10::OutOfMemoryError&) {
      return false;
    } catch (...) {
      rethrow_as_ours();
    }
  }

  // It may have written already, and cannot run once more.
  static R in_place(const c10::OperatorHandle& op, const OpInfo* info, c10::DispatchKeySet below, A... args) {
    try {
      const Depth depth;
      const c10::impl::ExcludeDispatchKeyGuard guard(kKey);
      return Op::redispatch(below, args...);
    } catch (const c10::OutOfMemoryError&) {
      rethrow_as_ours(op, info, c10::impl::boxArgs<A...>(std::forward<A>(args)...));
    } catch (...) {
      rethrow_as_ours();
    }
  }

  static void adopt(OpInfo* info, const R& made, const A&... args) {
    torch::jit::Stack results;
    c10::impl::push_outputs<R, false>::copy(made, &results);
    std::vector<const c10::StorageImpl*> old;
    (add_storages(args, &old), ...);
    adopt_results(info, results, OldStorages(std::move(old)));
  }
};

template <class... Ops>
void put(torch::Library& m) {
  const auto name_of = [](const char* name, const char* overload) {
    return *overload ? std::string(name) + "." + overload : std::string(name);
  };
  (m.impl(name_of(Ops::name, Ops::overload_name).c_str(), TORCH_FN((Typed<Ops>::call))), ...);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, Fake, m) {
  namespace ops = at::_ops;
  put<ops::t, ops::view, ops::_unsafe_view, ops::expand, ops::select_int, ops::slice_Tensor, ops::transpose_int,
      ops::permute, ops::unsqueeze, ops::squeeze_dim, ops::detach>(m);
  put<ops::unsafe_split_Tensor, ops::add_Tensor, ops::sub_Tensor, ops::mul_Tensor, ops::div_Tensor, ops::neg, ops::mm,
      ops::addmm, ops::bmm, ops::cat, ops::clone, ops::sum_dim_IntList, ops::mean_dim>(m);
  put<ops::sigmoid, ops::tanh, ops::relu, ops::exp, ops::sigmoid_backward, ops::tanh_backward, ops::threshold_backward>(
      m);
  put<ops::add__Tensor, ops::sub__Tensor, ops::mul__Tensor, ops::div__Tensor, ops::sigmoid_, ops::tanh_, ops::relu_>(m);
}

}  // namespace memmgr::pager
