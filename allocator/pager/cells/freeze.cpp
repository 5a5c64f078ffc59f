#include "cells/freeze.h"

#include "base/lock.h"
#include "cells/cell.h"

namespace memmgr::pager {

static std::atomic<int> freezes{0};
static thread_local bool tl_froze = false;

void freeze_evictions(bool begin) {
  tl_froze = begin;
  freeze_all_evictions(begin);
}

void freeze_all_evictions(bool begin) {
  // Victims are claimed under the lock, so later claims see the freeze
  const Hold lock(graph_lock());
  freezes.fetch_add(begin ? 1 : -1);
}

void stay_in_child(Options& options) {
  freezes.fetch_add(1);
  options.torture = false;
}

bool is_frozen_locked() { return freezes.load() > 0; }

bool frozen() { return freezes.load() > 0; }
bool froze_by_this_thread() { return tl_froze; }

bool claim_locked(Cell* c) { return !c->small && !frozen() && begin_move(c); }

}  // namespace memmgr::pager
