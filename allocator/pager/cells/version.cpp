#include "cells/version.h"

#include <algorithm>
#include <cerrno>

#include "base/checksum.h"
#include "base/clock.h"
#include "base/lock.h"
#include "cells/cell_bytes.h"
#include "cells/copies.h"
#include "cells/stream_order.h"
#include "pools/pool.h"
#include "pools/small_blocks.h"
#include "pools/stream_rules.h"

namespace memmgr::pager {

bool has_bytes_locked(const Version* v) { return v->cell && !v->evicted && !v->temporary; }

bool available_locked(const Version* v) {
  return has_bytes_locked(v) || (v->recipe && recipe_available_locked(v->recipe));
}

void check_lost_locked(Version* v) {
  if (v->lost || v->evicted || available_locked(v)) return;
  v->lost = true;
  for (Recipe* r : v->readers) {
    if (r->broken) continue;
    r->broken = true;
    for (Version* made : r->outputs)
      if (made) check_lost_locked(made);
  }
}

void need_locked(Version* v) {
  const bool before = pulls_locked(v);
  v->needed++;
  if (!before && pulls_locked(v) && v->recipe) need_inputs_locked(v->recipe);
}

// Ends an orphan that no recipe needs, and frees its bytes.
static void end_orphan_locked(Version* v, Trash* trash) REQUIRES(graph_lock()) {
  Cell* c = v->cell;
  v->cell = nullptr;
  check_lost_locked(v);
  c->version = nullptr;
  const uint32_t before = c->state.fetch_or(kDead, std::memory_order_acq_rel);
  if ((before & kPinMask) || (before & kBusy)) return;  // the thread that has it pinned or busy ends it
  unregister_locked(c);
  forget_bytes_locked(c, trash);
  cell_memory().end_locked(c);
}

static bool is_orphan(const Version* v) REQUIRES(graph_lock()) {
  return v->cell && !v->cell->storage._unsafe_get_target();
}

void unneed_locked(Version* v, Trash* trash) {
  const bool before = pulls_locked(v);
  v->needed--;
  if (before && !pulls_locked(v) && v->recipe) unneed_inputs_locked(v->recipe, trash);
  if (v->needed == 0 && is_orphan(v) && !v->cell->small && !v->temporary) end_orphan_locked(v, trash);
}

void lend_bytes_locked(Pool& pool, Version* v, at::DataPtr bytes) {
  Cell* c = cell_memory().make_locked();
  c->nbytes = v->nbytes;
  c->small = c->nbytes < least_born_bytes.load(std::memory_order_relaxed);
  c->pool = &pool;
  if (queues) c->filled_on = c->pool->stream();
  c->bytes = std::move(bytes);
  note_home(c);
  c->version = v;
  c->last_touch.store(ticks(), std::memory_order_relaxed);
  v->cell = c;
  v->temporary = true;
  register_locked(c);
  if (!c->small) totals.resident_cell_bytes += c->nbytes;
}

void end_loan_locked(Version* v, Trash* trash) {
  if (!v->temporary) return;
  v->temporary = false;
  end_orphan_locked(v, trash);
}

void set_evicted_locked(Version* v, bool evicted, Trash* trash) {
  const bool before = pulls_locked(v);
  v->evicted = evicted;
  const bool after = pulls_locked(v);
  if (before == after || !v->recipe) return;
  if (after)
    need_inputs_locked(v->recipe);
  else
    unneed_inputs_locked(v->recipe, trash);
}

void forget_recipe_locked(Version* v, Trash* trash) {
  Recipe* r = v->recipe;
  if (!r) return;
  if (pulls_locked(v)) unneed_inputs_locked(r, trash);
  v->recipe = nullptr;
  if (v->cell && v->cell->version == v) count_root_locked(v->cell);
  v->depth = 0;
  forget_output_locked(r, v);
  release_recipe_locked(r, trash);
  check_lost_locked(v);
}

void release_version_locked(Version* v, Trash* trash) {
  if (--v->refs > 0) return;
  if (v->cell) end_orphan_locked(v, trash);
  forget_recipe_locked(v, trash);
  version_memory().end_locked(v);
}

Version* new_version_locked(Cell* c, Trash* trash) {
  Version* before = c->version;
  Version* v = version_memory().make_locked();
  v->cell = c;
  v->nbytes = c->nbytes;
  c->version = v;
  count_root_locked(c);
  c->checksum = Checksum();
  if (before->cell == c) {
    const bool pulled = pulls_locked(before);
    before->cell = nullptr;
    note_ghost_locked(before, c);
    if (!pulled && pulls_locked(before) && before->recipe) need_inputs_locked(before->recipe);
    check_lost_locked(before);
  }
  release_version_locked(before, trash);
  return v;
}

void settle_before_write(Cell* c) {
  Cell* copy = nullptr;
  const auto end_unused = [](Cell* unused) {
    const Hold lock(graph_lock());
    cell_memory().end_locked(unused);
  };
  {
    const Hold lock(graph_lock());
    const Version* v = c->version;
    const bool named = c->small && v->refs > 1 && !v->recipe && !v->uninitialized && room_for_kept(c);
    if (v->needed == 0 && !named) return;
    if (v->recipe && recipe_available_locked(v->recipe)) return;
    copy = cell_memory().make_locked();
  }
  copy->nbytes = c->nbytes;
  copy->pool = c->pool;
  copy->small = c->small;
  copy->lead = c->lead;
  try {
    const OwnWork own;
    copy->bytes = allocate_for(copy);
    c->pool->copy(copy->bytes.get(), c->bytes.get(), c->nbytes);
    if (queues) copy->filled_on = copy->pool->stream();
    note_home(copy);
  } catch (const c10::OutOfMemoryError&) {  // the op's pins leave no room for a copy: the tier gets it
    Session& session = c->pool->session;
    const bool below = session.may_offload() && !c->small && c->pool->on_host();
    if (below) copy->slot = mm_tier_write_now(session.tier, c->bytes.get(), c->nbytes);
    if (copy->slot < 0) {
      if (below) session.note_tier_error(static_cast<int>(-copy->slot));
      end_unused(copy);
      throw;
    }
    copy->absence = Absence::kOffloaded;
    copy->state = kAbsent;
  } catch (...) {
    end_unused(copy);
    throw;
  }
  c->pool->session.counters.copies_before_write++;
  Trash trash;
  const Hold lock(graph_lock());
  Version* v = c->version;
  v->cell = copy;
  copy->version = v;
  copy->last_touch.store(ticks(), std::memory_order_relaxed);
  register_locked(copy);
  count_root_locked(copy);
  if (copy->small) {
    keep_locked(copy);
  } else if (copy->slot >= 0) {
    note_moved_locked(copy, true);
    mm_arena_note_virtual(copy->pool->arena, static_cast<int64_t>(copy->nbytes));
    totals.absent_cells++;
  } else {
    totals.resident_cell_bytes += copy->nbytes;
  }
  new_version_locked(c, &trash);
}

void begin_new_version(Cell* c) {
  drop_slot(c);
  for (;;) {
    settle_before_write(c);
    Trash trash;
    const Hold lock(graph_lock());
    const Version* v = c->version;
    if (v->needed > 0 && !(v->recipe && recipe_available_locked(v->recipe))) continue;
    new_version_locked(c, &trash);
    return;
  }
}

void drop_slot(Cell* c) {
  if (!c->pool->session.tier) return;
  Trash trash;
  const Hold lock(graph_lock());
  cancel_write_locked(c, &trash);
  if (c->slot >= 0) trash.add_slot(c, c->slot);
  c->slot = -1;
}

bool pulls_locked(const Version* v) { return !has_bytes_locked(v) && (v->needed > 0 || v->evicted); }

void need_inputs_locked(Recipe* r) {
  for (const TensorArg& a : r->tensors)
    if (a.version) need_locked(a.version);
}

void unneed_inputs_locked(Recipe* r, Trash* trash) {
  for (const TensorArg& a : r->tensors)
    if (a.version) unneed_locked(a.version, trash);
}

void forget_output_locked(Recipe* r, const Version* v) {
  for (Version*& output : r->outputs)
    if (output == v) output = nullptr;
}

void release_recipe_locked(Recipe* r, Trash* trash) {
  if (--r->refs > 0) return;
  for (const TensorArg& a : r->tensors) {
    if (!a.version) continue;
    auto& readers = a.version->readers;
    const auto last = std::find(readers.rbegin(), readers.rend(), r);  // the youngest usually ends first
    if (last != readers.rend()) {
      *last = readers.back();
      readers.pop_back();
    }
    release_version_locked(a.version, trash);
  }
  totals.recipe_bytes -= r->bytes;
  delete r;
}

}  // namespace memmgr::pager
