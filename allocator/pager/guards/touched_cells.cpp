#include "guards/touched_cells.h"

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/SparseTensorImpl.h>

#include "base/budget.h"
#include "cells/deferred_drop.h"
#include "cells/stream_order.h"
#include "concurrency/admission.h"
#include "guards/fixed_memory.h"
#include "guards/unseen_threads.h"
#include "pools/pool.h"
#include "residency/reclaim.h"

namespace memmgr::pager {

Cell* adopt_in_budget(c10::StorageImpl* s, bool may_wait) {
  const uint64_t nbytes = s->nbytes();
  if (pointer_of(s).get_deleter() == budget.pool->deleter() || nbytes < budget.options.small_bytes) return adopt(s);
  Cell* made = nullptr;
  with_room(nbytes, may_wait, [&] { made = adopt(s); });
  return made;
}

Cell* adopt_if_room(c10::StorageImpl* s, bool may_wait) {
  try {
    return adopt_in_budget(s, may_wait);
  } catch (const c10::OutOfMemoryError&) {
    if (!is_mapped(s)) throw;
  }
  share_mapping(s);
  return nullptr;
}

void with_room(uint64_t nbytes, bool may_wait, c10::function_ref<void()> take) {
  const Depth depth;  // else it would wait for itself: who runs alone is counted
  std::optional<Admitted> alone;
  for (int pauses = 0;;) {
    const bool newborns_before = others_have_newborns();  // one that ends meanwhile has left room
    {
      const Promised promised(budget.arena, nbytes);  // another thread would take the room
      bool may_leave = true;
      for (int i = 0; may_leave; ++i) {
        const uint64_t shortage = mm_arena_shortage(budget.arena);
        if (shortage == 0) return take();
        may_leave = reclaim_callback(budget.pool, shortage, nbytes, i);
      }
    }
    if (!may_wait || (alone && (++pauses > kMostPauses || !(newborns_before || others_have_newborns()))))
      throw_out_of_memory(nbytes);
    alone.reset();
    if (pauses > 0) wait_for_others(kPauseSeconds);
    alone.emplace(nbytes, true);
  }
}

void parts_of_sparse(c10::TensorImpl* t, c10::SmallVector<c10::TensorImpl*, 3>* parts) {
  if (t->layout() == c10::kSparse) {
    auto* sparse = static_cast<at::SparseTensorImpl*>(t);
    *parts = {sparse->indices().unsafeGetTensorImpl(), sparse->values().unsafeGetTensorImpl()};
  } else if (at::sparse_csr::is_sparse_compressed(t->layout())) {
    auto* sparse = static_cast<at::SparseCsrTensorImpl*>(t);
    *parts = {sparse->compressed_indices().unsafeGetTensorImpl(), sparse->plain_indices().unsafeGetTensorImpl(),
              sparse->values().unsafeGetTensorImpl()};
  }
}

void Frame::tensor(c10::TensorImpl* t, bool written) {
  declares_writes_ |= written;
  each_storage(t, [&](c10::StorageImpl* s) { storage(s, written); });
}

void Frame::storage(c10::StorageImpl* s, bool written) {
  if (!s) return;
  Cell* c = cell_of(s);
  if (C10_UNLIKELY(!c)) {
    grows_in_pool(s);  // set_ lets a storage grow that it only reads
    if (!adopts_) return;
    if (is_small(s)) {
      share_mapping(s);
      return;
    }
    if (!adoptable(s)) return count_fixed_in_budget(s, may_wait_);
    c = reads_hardly_ ? adopt_if_room(s, may_wait_) : adopt_in_budget(s, may_wait_);
    if (!c) return;
  }
  if (c->small) {  // always there; pinned because it may end inside the op, and its writes are watched again after it
    pin(c, 0);
    small_.push_back({c, written});
    writes_small_ |= written;
    return;
  }
  cells_.push_back({c, written});
  bytes_ += c->nbytes;
}

void Frame::value(const c10::IValue& v, bool written) {
  each_tensor(v, [&](c10::TensorImpl* t) { tensor(t, written); }, [&](c10::StorageImpl* s) { storage(s, written); });
}

void Frame::pin_all() {
  const uint64_t now = ticks();
  bool all = true;
  for (const Touched& t : cells_) {
    all &= pin(t.cell, now);
    ++pinned_;
  }
  if (C10_LIKELY(all)) {
    if (C10_UNLIKELY(queues))
      for (const Touched& t : cells_) use_here(t.cell);
    return;
  }
  try {
    for (const Touched& t : cells_) bring_back(t.cell);
  } catch (const c10::OutOfMemoryError&) {
    if (!budget.tier_writes || !one_by_one()) throw;
  }
}

void Frame::release() {
  while (pinned_ > 0) {
    Cell* c = cells_[--pinned_].cell;
    watch_writes(c);
    unpin(c);
  }
  for (const Touched& t : small_) {
    watch_writes(t.cell);
    unpin(t.cell);
  }
  cells_.clear();
  small_.clear();
  writes_small_ = false;
  bytes_ = 0;
  declares_writes_ = false;
}

void Frame::begin_writes() {
  for (const Touched& t : small_)
    if (t.written) begin_new_version(t.cell);
  for (const Touched& t : cells_)
    if (t.written) begin_new_version(t.cell);
}

void Frame::end_newborns() {
  for (const Touched& t : cells_)
    if (C10_UNLIKELY(t.cell->newborn)) {
      std::lock_guard<std::mutex> lock(graph_lock());
      if (t.cell->newborn) end_newborn_locked(t.cell);
    }
}

bool Frame::one_by_one() {
  const auto unpin_all = [&] {
    while (pinned_ > 0) unpin(cells_[--pinned_].cell);
  };
  c10::SmallVector<StoragePtr, 8> held;  // what is unpinned may not end
  bool any = false, all = true;
  {
    std::lock_guard<std::mutex> lock(graph_lock());
    for (const Touched& t : cells_) {
      any |= t.cell->version && t.cell->version->evicted;
      held.push_back(hold(t.cell));
      all &= static_cast<bool>(held.back());
    }
  }
  if (any && all) {
    unpin_all();
    for (const Touched& t : cells_) {
      pin(t.cell, ticks());
      pinned_ = 0;
      try {
        bring_back(t.cell);
      } catch (...) {
        unpin(t.cell);
        throw;
      }
      unpin(t.cell);
      let_go(t.cell, Way::kOffload);
    }
    for (const Touched& t : cells_) {
      pin(t.cell, ticks());
      ++pinned_;
    }
    for (const Touched& t : cells_) bring_back(t.cell);
  }
  for (StoragePtr& s : held)
    if (s) drop(std::move(s));
  return any && all;
}

}  // namespace memmgr::pager
