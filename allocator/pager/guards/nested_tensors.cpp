#include "guards/nested_tensors.h"

#include <ATen/NestedTensorImpl.h>

#include "base/clock.h"
#include "base/deferred_drop.h"
#include "cells/adoption.h"
#include "cells/cell.h"
#include "cells/lifetime.h"
#include "cells/pointer_trap.h"
#include "guards/escape.h"
#include "guards/room.h"
#include "residency/restore.h"

namespace memmgr::pager {

thread_local NestedOp* NestedOp::tl_outermost = nullptr;

namespace {

// Returns the cell of a tensor of sizes; null: it has none that could be evicted.
Cell* cell_of_sizes(Session& session, const c10::TensorImpl* t) {
  if (!t->has_storage() || t->dtype() != caffe2::TypeMeta::Make<int64_t>()) return nullptr;
  c10::StorageImpl* s = t->unsafe_storage().unsafeGetStorageImpl();
  Cell* c = cell_of(s);
  if (!c && adoptable(session, s) && s->nbytes() >= session.options.small_bytes) c = adopt_in_budget(session, s, false);
  return c && !c->small ? c : nullptr;
}

void keep_sizes(Session& session, const at::Tensor& sizes) {
  if (!sizes.defined()) return;
  Cell* c = cell_of_sizes(session, sizes.unsafeGetTensorImpl());
  if (c && c->escape == Escape::kNone) escape(c, Escape::kSizes);
}

}  // namespace

NestedOp::NestedOp(Session& session, const torch::jit::Stack& stack, size_t arguments)
    : session_(session), outermost_(!tl_outermost) {
  if (outermost_) tl_outermost = this;
  try {
    for (size_t i = stack.size() - std::min(arguments, stack.size()); i < stack.size(); ++i) look_at(stack[i]);
  } catch (...) {
    end();
    throw;
  }
}

NestedOp::~NestedOp() { end(); }

void NestedOp::end() {
  if (!outermost_) return;
  tl_outermost = nullptr;
  for (auto& [c, s] : pinned_) {
    watch_writes(c);
    unpin(c);
    drop(std::move(s));
  }
  pinned_.clear();
}

void NestedOp::returned(const torch::jit::Stack& stack, size_t returns) {
  for (size_t i = stack.size() - std::min(returns, stack.size()); i < stack.size(); ++i) look_at(stack[i]);
}

void NestedOp::look_at(const c10::IValue& value) {
  each_tensor(
      value,
      [](c10::TensorImpl* t) {
        if (!t) return;
        Session& session = tl_outermost->session_;
        // A jagged tensor has the nested key, too.
        if (const auto* nested = t->key_set().has(c10::DispatchKey::NestedTensor)
                                     ? dynamic_cast<const at::native::NestedTensorImpl*>(t)
                                     : nullptr) {
          keep_sizes(session, nested->get_nested_sizes());
          keep_sizes(session, nested->get_nested_strides());
          keep_sizes(session, nested->get_storage_offsets());
        } else if (Cell* c = cell_of_sizes(session, t)) {
          StoragePtr held = StoragePtr::reclaim_copy(t->unsafe_storage().unsafeGetStorageImpl());
          pin(c, ticks());
          tl_outermost->pinned_.emplace_back(c, std::move(held));
          restore_cell(c);
        }
      },
      [](c10::StorageImpl*) {});
}

}  // namespace memmgr::pager
