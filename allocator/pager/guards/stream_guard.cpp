#include "guards/stream_guard.h"

#include <vector>

#include "base/deferred_drop.h"
#include "base/lock.h"
#include "base/seen_threads.h"
#include "base/session.h"
#include "base/tensors.h"
#include "base/thread_state.h"
#include "cells/cell.h"
#include "cells/pointer_trap.h"
#include "cells/stream_order.h"
#include "cells/types.h"
#include "concurrency/deferred_steps.h"
#include "pools/pool.h"

namespace memmgr::pager {

static std::atomic<bool> in_order{false};  // no work for the first stream is still to be queued
static std::atomic<bool> profiled{false};

void forget_askers() { several_streams = in_order = profiled = without_trap = false; }

// Sets a flag, and shows absent cells to readers as the flags require.
static void set_asker(std::atomic<bool>& flag, bool on) {
  std::vector<StoragePtr> held;
  {
    const Hold lock(graph_lock());
    flag = on;
    without_trap = several_streams || profiled;  // cells that are evicted later are shown in the same way
    for_each_cell_locked([&](Cell* c) REQUIRES(graph_lock()) {
      const uint32_t state = c->state.load();
      if (!(state & kAbsent) || (state & kBusy)) return;
      held.push_back(hold(c));
      if (held.back()) show_bytes(held.back().get(), nullptr, c);
    });
  }
  for (StoragePtr& s : held)
    if (s) drop(std::move(s));
}

void note_stream(const Session& session) {
  if (C10_LIKELY(in_order.load(std::memory_order_relaxed)) || session.pool->stream() == session.pool->opened_on())
    return;
  if (tl_running_recipes > 0) return;  // the recipe's op came through here when it ran first
  if (!several_streams.load()) set_asker(several_streams, true);
  finish_all_pending(session, true);
  settle_late_slices(session);
  in_order = true;
}

void note_profiler(bool on) {
  listen(kProfiler, on);
  if (profiled.load(std::memory_order_relaxed) != on) set_asker(profiled, on);
}

}  // namespace memmgr::pager
