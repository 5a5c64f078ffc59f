#include "cells/lifetime.h"

#include "base/checksum.h"
#include "base/lock.h"
#include "base/tensors.h"
#include "cells/cell_bytes.h"
#include "cells/names.h"
#include "cells/pointer_trap.h"
#include "cells/stream_order.h"
#include "cells/version.h"
#include "pools/pool.h"

namespace memmgr::pager {

// Parts of a cell that end outside of the lock.
struct Remains {
  Trash trash;
  WeakStorage storage{StoragePtr()};
};

// Ends the cell if no recipe needs its bytes. Otherwise makes an orphan of it.
static void last_user_is_gone_locked(Cell* c, Remains* remains) REQUIRES(graph_lock()) {
  Trash& trash = remains->trash;
  remains->storage = std::move(c->storage);
  c->storage = WeakStorage(StoragePtr());
  Version* v = c->version;
  if (v) {
    const bool remade = v->recipe && recipe_available_locked(v->recipe);
    // A small root that recipes name is kept by value, within bounds.
    const bool kept = c->small && v->refs > 1 && !v->recipe && !v->uninitialized && room_for_kept(c);
    if (has_bytes_locked(v) && ((v->needed > 0 && !remade) || kept)) {
      c->state.fetch_and(~kDead);
      v->refs--;  // the version owns the cell now
      if (c->small) keep_locked(c);
      return;
    }
    const bool before = pulls_locked(v);
    v->cell = nullptr;
    v->evicted = false;
    const bool after = pulls_locked(v);  // needed and without bytes: the recipe makes it from its inputs
    if (v->recipe && after != before) {
      if (after)
        need_inputs_locked(v->recipe);
      else
        unneed_inputs_locked(v->recipe, &trash);
    }
    check_lost_locked(v);
  }
  unregister_locked(c);
  forget_bytes_locked(c, &trash);
  if (v) release_version_locked(v, &trash);
  cell_memory().end_locked(c);
}

void last_user_is_gone(Cell* c) {
  Remains remains;
  const Hold lock(graph_lock());
  last_user_is_gone_locked(c, &remains);
}

// Called when the storage ends.
static void end_of_storage(Cell* c) {
  Remains remains;
  const Hold lock(graph_lock());
  tell_storage_died_locked(c);
  end_name_locked(c);
  if (c->version) note_ghost_locked(c->version, c);
  const uint32_t standing = c->standing_pins;
  unstand_all_locked(c);
  note_used(c);
  const uint32_t before = c->state.fetch_add(kDead - standing, std::memory_order_acq_rel);
  if ((before & kPinMask) == standing && !(before & kBusy)) last_user_is_gone_locked(c, &remains);
}

static const bool ends_storages = (on_end_of_storage = &end_of_storage, true);

bool pin_living_locked(Cell* c, uint64_t now) {
  uint32_t state = c->state.load(std::memory_order_acquire);
  do {
    if ((state & kDead) && !(state & kPinMask)) return false;  // otherwise the last pin ends it, perhaps this one
  } while (!c->state.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel));
  c->last_touch.store(now, std::memory_order_relaxed);
  return true;
}

bool end_move_locked(Cell* c, bool absent) {
  note_used(c);
  uint32_t now = c->state.load();
  while (!c->state.compare_exchange_weak(now, (now & ~(kBusy | kAbsent)) | (absent ? kAbsent : 0u),
                                         std::memory_order_acq_rel)) {
  }
  residency_changed().notify_all();
  return (now & kDead) && (now & kPinMask) == 0;
}

void escape_locked(Cell* c, Escape why) {
  c->escape = why;
  name_escaped_locked(c);
  stand_pinned_locked(c);
  totals.escaped_bytes += c->nbytes;
  count_long_pinned_locked(c);
  c->pool->session.counters.escapes++;
}

void end_move(Cell* c, bool absent) {
  bool last;
  {
    const Hold lock(graph_lock());
    last = end_move_locked(c, absent);
  }
  if (last) last_user_is_gone(c);
}

bool become_resident_locked(Cell* c, at::DataPtr bytes, mm_stream filled_on, Trash* trash) {
  end_bits_locked(c);
  if (auto* s = static_cast<c10::StorageImpl*>(c->storage._unsafe_get_target())) show_bytes(s, bytes.get(), c);
  c->bytes = std::move(bytes);
  note_home(c);
  c->filled_on.store(filled_on, std::memory_order_release);
  c->waited_for_filling.store(kNotFilled, std::memory_order_relaxed);
  totals.resident_cell_bytes += c->nbytes;
  mm_arena_note_virtual(c->pool->arena, -static_cast<int64_t>(c->nbytes));
  totals.absent_cells--;
  if (c->version) set_evicted_locked(c->version, false, trash);
  c->absence = Absence::kNone;
  c->checksum = Checksum();
  return end_move_locked(c, false);
}

}  // namespace memmgr::pager
