#include "residency/reclaim.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "base/deferred_drop.h"
#include "base/events.h"
#include "base/lock.h"
#include "base/refusal.h"
#include "base/session.h"
#include "base/thread_state.h"
#include "base/wait.h"
#include "cells/cell.h"
#include "cells/fixed_memory.h"
#include "cells/freeze.h"
#include "cells/types.h"
#include "cells/version.h"
#include "concurrency/admission.h"
#include "concurrency/python_threads.h"
#include "pools/pool.h"
#include "pools/scratch.h"
#include "residency/evict.h"
#include "residency/floor.h"
#include "residency/transfer.h"
#include "residency/victims.h"

namespace memmgr::pager {

RoomSources room_sources;
static const bool makes_room = (room_maker = {&reclaim_callback, &throw_out_of_memory}, true);

// Evicts all victims of a choice, or as many as are still free.
static uint64_t reclaim_chosen(const Session& session, uint64_t need, uint64_t request) {
  std::vector<Victim> chosen;
  {
    const Hold lock(graph_lock());
    chosen = choose_victims_locked(session, need, request);
  }
  uint64_t released = 0;
  for (const Victim& v : chosen) released += evict_claimed(v.cell, EvictedFor::kContiguity, v.way);
  return released;
}

uint64_t reclaim_callback(void* asking, uint64_t need, uint64_t request, int) {
  Session& session = static_cast<Pool*>(asking)->session;
  if (!session.open.load(std::memory_order_relaxed) || asking != session.pool) return 0;
  for (int i = 0; frozen(); ++i) {
    if (others_are_in_their_ops()) i = 0;
    if (froze_by_this_thread() || i == 2000) return 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  Wait wait;
  const ScratchStays stays;
  session.counters.reclaims++;
  look_for_ended_fixed();
  room_sources.memory_is_short();
  const uint64_t want = need ? need : request;
  poll_transfers(session);
  uint64_t released = room_sources.planned(session, want, request);
  bool refilled = false;
  if (released < want) room_sources.plan_is_short();
  if (released < want && session.options.search) {
    released += reclaim_chosen(session, need, request);
    if (released > 0) return released;
    if (session.options.window && need == 0) return 0;  // new addresses help now, not bytes
  }
  while (released < want) {
    Victim next;
    {
      const Hold lock(graph_lock());
      next = next_victim_locked(session);
      if (!next.cell) {
        if (refilled || !refill_victims_locked(session)) break;
        refilled = true;
        continue;
      }
    }
    const uint64_t n = evict_claimed(next.cell, EvictedFor::kRequest, next.way);
    if (n) refilled = false;
    released += n;
  }
  if (released == 0) released = room_sources.kept();
  if (released == 0) released = give_up_bits(want);
  while (released == 0 && finish_any_read()) {  // a cell whose read has ended may be evicted again
    const Hold lock(graph_lock());
    if (refill_victims_locked(session)) released = 1;
  }
  // The deferred-drop thread may hold the last reference to a storage. The wait is bounded, since that thread may wait
  // for the GIL.
  if (released == 0 && wait_for_dropper(0.05)) released = 1;
  if (released == 0 && others_are_running(tl_depth > 0)) {
    // Pins of other threads end with their ops (rule 3). The wait is bounded, since those may wait for this thread.
    wait_for_others(0.05);
    const Hold lock(graph_lock());
    if (refill_victims_locked(session)) released = 1;
  }
  const uint64_t waited = wait.end();
  session.counters.stall_ns += waited;
  session.counters.room_ns += waited;
  note_event(Event::kStall, nullptr, released, waited);
  return released;
}

// Returns the bytes that could be evicted. The arena evicts nothing for a request that is larger than the budget.
static uint64_t evictable_bytes() {
  uint64_t bytes = 0;
  const Hold lock(graph_lock());
  for_each_cell_locked([&](const Cell* c) REQUIRES(graph_lock()) {
    bool drop;
    if (!c->small && c->state.load() == 0 && cost_of_eviction_locked(c, &drop) >= 0) bytes += c->nbytes;
  });
  return bytes;
}

void throw_out_of_memory(Pool& pool, uint64_t request) {
  Session& session = pool.session;
  pool.throw_if_broken();
  const uint64_t limit = mm_arena_budget(pool.arena), resident = mm_arena_resident(pool.arena);
  const uint64_t taken = rounded(request);
  const uint64_t refused = taken + (request <= limit ? resident : resident - std::min(resident, evictable_bytes()));
  failing_op() = {"", refused, 0, taken};
  // memmgr/observe/error_text.py reads figures from these words.
  std::string text = pool.out_of_memory_words() + std::to_string(request) + " bytes. memmgr: the budget of " +
                     std::to_string(limit) + " bytes is spent: " + std::to_string(resident) +
                     " bytes are in use and nothing more can be evicted.";
  {
    const Hold lock(session.error_lock);
    if (!session.tier_error.empty())
      text += std::string(" The ") + session.tier_name() + " tier failed: " + session.tier_error + '.';
  }
  begin_refusal(refused, text);
  throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text);
}

}  // namespace memmgr::pager
