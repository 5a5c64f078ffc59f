// The next victim when malloc has to choose: in an order that a policy made ahead of need, or in malloc's own.
#pragma once

#include <cstdint>
#include <vector>

#include "base/constants.h"
#include "base/session.h"
#include "cells/types.h"

namespace memmgr::pager {

bool may_be_dropped_locked(const Cell* c) REQUIRES(graph_lock());
// Returns true if the cell may be packed: its signature has had two values only so far, and packing takes less time
// than rematerialization.
bool may_be_packed_locked(const Cell* c) REQUIRES(graph_lock());
// Returns the seconds that a restore would cost; negative: the cell cannot be evicted. `drop`: the cost is
// rematerialization's.
double cost_of_eviction_locked(const Cell* c, bool* drop) REQUIRES(graph_lock());

struct Victim {
  Cell* cell = nullptr;
  Way way = Way::kCheaper;
};
// Returns the next victim, claimed (kBusy); without a cell if the queue is empty.
Victim next_victim_locked(const Session& session) REQUIRES(graph_lock());
// Returns victims, claimed, that give a request a run of addresses, too, as `Options::search` requires (Coop, section
// 4; the core's window.h). Empty: no choice achieves that.
std::vector<Victim> choose_victims_locked(const Session& session, uint64_t need, uint64_t request)
    REQUIRES(graph_lock());
// When cells are touched next, as foretold by a higher layer. Set once, before the first budget.
struct NextTouch {
  uint64_t (*ticks_until_locked)(const Cell* c) = nullptr;  // 0: not known
  bool (*has_moved_locked)() = nullptr;  // the program has moved on so far that the victims' order is outdated
  void (*was_used_locked)() = nullptr;
};
extern NextTouch next_touch;

// Queues all cells that can be evicted now in malloc's own order. False: there are none.
bool refill_victims_locked(const Session& session) REQUIRES(graph_lock());
// ---- for a policy, on a thread of its own (memmgr/runtime/ranking.py) ----

struct Candidate {
  uint64_t serial, nbytes;
  double stale_seconds, cost_seconds, chain_seconds;
  bool droppable, clean, offloadable;
};
// Returns the cells that can be evicted now, the one that was touched last first.
std::vector<Candidate> candidates();
// Queues cells by their serials; the first is evicted first. Cells touched since candidates() are left out.
void set_ranking(const std::vector<std::pair<uint64_t, Way>>& ranked);
// Waits until an order is wanted, or until end_wait_for_pressure(). Without the GIL.
void wait_for_pressure();
void end_wait_for_pressure();

}  // namespace memmgr::pager
