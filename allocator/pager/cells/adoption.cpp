#include "cells/adoption.h"

#include <c10/core/CPUAllocator.h>

#include "base/clock.h"
#include "base/forked_child.h"
#include "base/lock.h"
#include "base/tensors.h"
#include "cells/births.h"
#include "cells/cell.h"
#include "cells/cell_bytes.h"
#include "cells/copies.h"
#include "cells/lifetime.h"
#include "cells/mapped_range.h"
#include "cells/names.h"
#include "cells/pointer_trap.h"
#include "cells/stream_order.h"
#include "cells/version.h"
#include "pools/pool.h"

namespace memmgr::pager {

static bool of_pool(const Session& session, const c10::StorageImpl* s) {
  return session.pool && pointer_of(s).get_deleter() == session.pool->deleter();
}

// Returns the offset of the bytes in their block.
static uintptr_t lead_of(const at::DataPtr& p) {
  return reinterpret_cast<uintptr_t>(p.get()) - reinterpret_cast<uintptr_t>(p.get_context());
}

bool adoptable(const Session& session, const c10::StorageImpl* s) {
  const at::DataPtr& p = pointer_of(s);
  const Pool* pool = session.pool;
  if (!p.get() || !pool || forked_child || p.device().type() != pool->device.type()) return false;
  if (!pool->on_host() && p.device().index() != pool->device.index()) return false;
  if (s->sym_nbytes().is_heap_allocated() || s->nbytes() == 0) return false;
  const auto deleter = p.get_deleter();
  if (deleter == pool->deleter()) return lead_of(p) < kLine;
  if (!pool->on_host()) return false;
  return deleter == c10::GetDefaultCPUAllocator()->raw_deleter() ? lead_of(p) == 0 : is_mapped(s);
}

void grows_in_pool(const Session& session, c10::StorageImpl* s) {
  static c10::Allocator* const torchs = c10::GetDefaultCPUAllocator();
  Pool* pool = session.pool;
  const c10::Allocator* now = s->allocator();
  if (!now || !pool) return;
  const bool before = pool->on_host() ? now == torchs : pool->earlier() && now->raw_deleter() == pool->earlier();
  if (C10_UNLIKELY(before)) s->set_allocator(pool->allocator());
}

Cell* (*adopt_mapped)(Session& session, c10::StorageImpl* s, uint32_t pins) = nullptr;

Cell* adopt(Session& session, c10::StorageImpl* s, uint32_t pins, Maker maker) {
  if (C10_UNLIKELY(!of_pool(session, s) && is_mapped(s)))
    if (Cell* c = adopt_mapped(session, s, pins)) return c;
  const Hold lock(graph_lock());
  return adopt_locked(session, s, pins, ticks(), false, maker);
}

Cell* adopt_locked(Session& session, c10::StorageImpl* s, uint32_t pins, uint64_t touched_ticks, bool born,
                   Maker maker) {
  if (Cell* c = cell_of(s)) {
    c->state.fetch_add(pins);
    return c;
  }
  if (!born && !adoptable(session, s)) return nullptr;
  const bool mapped = !of_pool(session, s) && is_mapped(s);
  if (C10_UNLIKELY(mapped) && !may_begin_range_locked(s)) return nullptr;
  grows_in_pool(session, s);
  at::DataPtr& p = pointer_of(s);
  Cell* c = cell_memory().make_locked();
  c->state.store(pins);
  c->nbytes = s->nbytes();
  c->serial = next_serial_locked();
  c->pool = session.pool;
  c->small = !born && c->nbytes < session.options.small_bytes;
  c->outside = !c->small && p.get_deleter() != c->pool->deleter();
  c->storage = WeakStorage::reclaim_copy(s);
  c->version = version_memory().make_locked();
  c->version->cell = c;
  c->version->nbytes = c->nbytes;
  c->last_touch.store(touched_ticks, std::memory_order_relaxed);
  // The context is replaced in place: a thread that reads the pointer at the same time finds it unchanged.
  auto&& context = p.move_context();
  const auto deleter = context.get_deleter();
  c->bytes = at::DataPtr(p.get(), context.release(), deleter, p.device());
  if (C10_UNLIKELY(mapped))
    begin_range_locked(c);
  else
    c->lead = static_cast<uint8_t>(lead_of(c->bytes));
  note_home(c);
  name_adopted_locked(c, s);
  context = std::unique_ptr<void, c10::DeleterFnPtr>(c, &memmgr_pager_end_of_storage);
  register_locked(c);
  begin_life_locked(c, maker);
  count_root_locked(c);
  watch_writes(c);
  if (!c->small) totals.resident_cell_bytes += c->nbytes;
  if (C10_UNLIKELY(mapped) && pins == 0 && begins_away_locked(c)) {
    c->state.store(kAbsent);
    c->absence = Absence::kOffloaded;
    c->outside = false;
    become_absent_locked(c, s);
    return c;
  }
  if (c->outside) {
    mm_arena_add_outside(c->pool->arena, static_cast<int64_t>(c->nbytes));
    session.counters.adopted_bytes += c->nbytes;
  }
  if (C10_UNLIKELY(session.adopted_stay) && !born && !c->small) escape_locked(c, Escape::kOlderAddress);
  return c;
}

bool move_into_pool(Session& session, c10::StorageImpl* s) {
  Pool* pool = session.pool;
  at::DataPtr& p = pointer_of(s);
  if (!pool->earlier() || p.get_deleter() != pool->earlier() || p.device() != pool->device || lead_of(p) != 0)
    return false;
  if (s->sym_nbytes().is_heap_allocated() || s->nbytes() == 0) return false;
  at::DataPtr moved = pool->try_allocate(s->nbytes(), 0);
  if (!moved) {
    pool->settle();
    pool->trim();
    moved = pool->try_allocate(s->nbytes(), 0);
  }
  if (!moved) return false;
  pool->copy(moved.get(), p.get(), s->nbytes());
  const auto from = reinterpret_cast<uintptr_t>(p.get());
  p = std::move(moved);
  s->set_allocator(pool->allocator());
  Cell* c = adopt(session, s);
  const Hold lock(graph_lock());
  if (c && !c->name) name_moved_locked(c, from);
  return true;
}

void unadopt(Cell* c) {
  Trash trash;
  WeakStorage weak{StoragePtr()};
  StoragePtr s(nullptr);
  const Hold lock(graph_lock());
  s = c->storage.lock();
  if (!s) return;
  if (cell_of(s.get()) != c || !c->bytes.get()) return;
  if ((c->state.load() & kPinMask) > c->standing_pins) return;  // a pin outlives the budget, so the cell does, too
  if (!c->small) totals.resident_cell_bytes -= c->nbytes;
  if (c->outside) mm_arena_add_outside(c->pool->arena, -static_cast<int64_t>(c->nbytes));
  unstand_all_locked(c);
  unwatch_writes(s.get());
  at::DataPtr& p = pointer_of(s.get());
  const auto deleter = c->bytes.get_deleter();
  auto&& context = p.move_context();
  context.release();
  context = std::unique_ptr<void, c10::DeleterFnPtr>(c->bytes.release_context(), deleter);
  name_unadopted_locked(c, s.get());
  if (c->range) trash.ranges.push_back(end_range_locked(c));
  cancel_write_locked(c, &trash);
  if (c->slot >= 0) trash.add_slot(c, c->slot);
  unregister_locked(c);
  c->version->cell = nullptr;
  forget_recipe_locked(c->version, &trash);
  release_version_locked(c->version, &trash);
  weak = std::move(c->storage);
  cell_memory().end_locked(c);
}

}  // namespace memmgr::pager
