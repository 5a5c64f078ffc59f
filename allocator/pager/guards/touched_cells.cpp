#include "guards/touched_cells.h"

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/quantized/QTensorImpl.h>
#include <ATen/quantized/Quantizer.h>

#include "base/deferred_drop.h"
#include "base/lock.h"
#include "base/tensors.h"
#include "cells/adoption.h"
#include "cells/cell.h"
#include "cells/pointer_trap.h"
#include "cells/stream_order.h"
#include "cells/version.h"
#include "guards/mapped_files.h"
#include "guards/room.h"
#include "pools/stream_rules.h"
#include "residency/evict.h"
#include "residency/restore.h"
#include "residency/victims.h"

namespace memmgr::pager {

// The tensors of a quantizer, which the kernels for its tensor read.
static void parts_of_quantizer(c10::TensorImpl* t, c10::SmallVector<at::Tensor, 2>* parts) {
  auto* quantized = dynamic_cast<at::QTensorImpl*>(t);  // a subclass in Python has the key, and no quantizer
  if (!quantized) return;
  const auto quantizer = quantized->quantizer();
  if (const auto* by_channel = dynamic_cast<const at::PerChannelAffineQuantizer*>(quantizer.get()))
    *parts = {by_channel->scales(), by_channel->zero_points()};
}

void Frame::tensor(c10::TensorImpl* t, bool written) {
  declares_writes_ |= written;
  each_storage(t, [&](c10::StorageImpl* s) { storage(s, written); });
  if (C10_LIKELY(!t->key_set().has(c10::DispatchKey::Quantized))) return;
  c10::SmallVector<at::Tensor, 2> parts;
  parts_of_quantizer(t, &parts);
  for (const at::Tensor& part : parts)
    if (part.has_storage()) storage(part.storage().unsafeGetStorageImpl(), false);
}

void Frame::storage(c10::StorageImpl* s, bool written) {
  if (!s) return;
  Cell* c = cell_of(s);
  if (C10_UNLIKELY(!c)) {
    grows_in_pool(session_, s);  // set_ lets a storage grow that it only reads
    if (!adopts_) return;
    if (is_small(session_.options, s)) {
      share_mapping(s);
      return;
    }
    if (!adoptable(session_, s)) return count_fixed_in_budget(session_, s, may_wait_);
    c = reads_hardly_ ? adopt_if_room(session_, s, may_wait_) : adopt_in_budget(session_, s, may_wait_);
    if (!c) return;
  }
  // A small cell is always resident. It is pinned because it may end inside the op, and its writes are watched again
  // after the op.
  if (c->small) {
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
    for (const Touched& t : cells_) restore_cell(t.cell);
  } catch (const c10::OutOfMemoryError&) {
    if (!session_.tier_writes || !one_by_one()) throw;
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
      const Hold lock(graph_lock());
      if (t.cell->newborn) end_newborn_locked(t.cell);
    }
}

void Frame::end_blank_newborns() {
  const Hold lock(graph_lock());
  for (const Touched& t : cells_)
    if (t.cell->newborn && is_blank(t.cell)) end_newborn_locked(t.cell);
}

bool Frame::one_by_one() {
  const auto unpin_all = [&] {
    while (pinned_ > 0) unpin(cells_[--pinned_].cell);
  };
  c10::SmallVector<StoragePtr, 8> held;  // an unpinned cell must not end
  bool any = false, all = true;
  {
    const Hold lock(graph_lock());
    for (const Touched& t : cells_) {
      any |= t.cell->version && t.cell->version->evicted;
      held.push_back(hold(t.cell));
      all &= static_cast<bool>(held.back());
    }
  }
  if (any && all) {
    unpin_all();
    end_blank_newborns();
    for (const Touched& t : cells_) {
      pin(t.cell, ticks());
      pinned_ = 0;
      try {
        restore_cell(t.cell);
      } catch (...) {
        unpin(t.cell);
        throw;
      }
      unpin(t.cell);
      evict(t.cell, EvictedFor::kArgument, Way::kOffload);
    }
    for (const Touched& t : cells_) {
      pin(t.cell, ticks());
      ++pinned_;
    }
    for (const Touched& t : cells_) restore_cell(t.cell);
  }
  for (StoragePtr& s : held)
    if (s) drop(std::move(s));
  return any && all;
}

}  // namespace memmgr::pager
