#include "guards/captures.h"

#include "base/lock.h"
#include "base/session.h"
#include "base/tensors.h"
#include "cells/cell.h"
#include "cells/freeze.h"
#include "cells/types.h"
#include "concurrency/deferred_steps.h"
#include "pools/capturing.h"
#include "pools/pool.h"
#include "recipes/recipe.h"
#include "residency/restore.h"
#include "residency/transfer.h"

namespace memmgr::pager {

namespace {

// Returns the absent cells with their storages: the evicted ones, or the others.
std::vector<std::pair<Cell*, StoragePtr>> absent(bool evicted) {
  std::vector<std::pair<Cell*, StoragePtr>> found;
  const Hold lock(graph_lock());
  for_each_cell_locked([&](Cell* c) REQUIRES(graph_lock()) {
    if (!(c->state.load() & kAbsent) || c->given_up || (c->absence == Absence::kEvicted) != evicted) return;
    if (StoragePtr s = hold(c)) found.emplace_back(c, std::move(s));
  });
  return found;
}

void bring_back_each(mm_arena* arena, const std::vector<std::pair<Cell*, StoragePtr>>& cells, bool only_if_room) {
  for (const auto& [c, s] : cells) {
    if (only_if_room && mm_arena_resident(arena) + c->nbytes > mm_arena_budget(arena)) continue;
    fetch(c);
  }
}

}  // namespace

void begin_capture(Session& session) {
  if (captures.load() > 0) {
    captures++;
    return;
  }
  finish_all_pending(session);
  finish_transfers(session);
  const bool may_evict = std::exchange(session.options.may_evict, false);  // room for them is made by offloading only
  try {
    for (auto gone = absent(true); !gone.empty(); gone = absent(true)) bring_back_each(session.arena, gone, false);
    bring_back_each(session.arena, absent(false), true);
  } catch (...) {
    session.options.may_evict = may_evict;
    throw;
  }
  session.options.may_evict = may_evict;
  cut_recipes(session, true);
  session.pool->settle();
  {
    const Hold lock(graph_lock());
    for_each_cell_locked([](Cell* c) { c->filled_on = kNotFilled; });  // no stream waits inside the graph
  }
  freeze_evictions(true);
  captures++;
}

void end_capture() {
  if (captures.load() > 0 && --captures == 0) freeze_evictions(false);
}

void forget_captures() {
  if (captures.exchange(0) > 0) freeze_evictions(false);
}

}  // namespace memmgr::pager
