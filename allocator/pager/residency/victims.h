// Who leaves next when malloc has to choose: in an order that a policy made ahead of need, else in malloc's own.
#pragma once

#include <cstdint>
#include <vector>

#include "cells/types.h"

namespace memmgr::pager {

// How a cell leaves, where both ways are open; else the way that is.
enum class Way : uint8_t { kCheaper, kEvict, kOffload };

bool may_be_dropped_locked(const Cell* c);
// Two values, as far as its kind is known: a bit for each element stays, the rest leaves. Not where that takes longer
// than making them again.
bool may_be_packed_locked(const Cell* c);
// What it costs to have the bytes again; negative: they cannot leave. `drop`: by making them again.
double cost_of_leaving_locked(const Cell* c, bool* drop);

struct Victim {
  Cell* cell = nullptr;
  Way way = Way::kCheaper;
};
// The next one, claimed (kBusy); without a cell when the queue is empty.
Victim next_victim_locked();
// Who should leave so that a request finds a run of addresses, too, as `Options::search` says (Coop, section 4; the
// core's window.h); claimed. Empty: no choice reaches that.
std::vector<Victim> choose_victims_locked(uint64_t need, uint64_t request);
// When cells are touched next, as a layer above foretells it; set once, before the first budget.
struct NextTouch {
  uint64_t (*ticks_until_locked)(const Cell* c) = nullptr;  // 0: not known
  bool (*has_moved_locked)() =
      nullptr;  // so much was touched since the victims were put in order that they no longer are
  void (*was_used_locked)() = nullptr;
};
extern NextTouch next_touch;

// Malloc's own order, for all that can leave now. False: there is nothing.
bool refill_victims_locked();
// ---- for a policy, on a thread of its own (memmgr/runtime/ranking.py) ----

struct Candidate {
  uint64_t serial, nbytes;
  double stale_seconds, cost_seconds, chain_seconds;
  bool droppable, clean, offloadable;
};
// What can leave now, the one that was touched last first.
std::vector<Candidate> candidates();
// The first leaves first; who was touched since candidates() stays.
void set_ranking(const std::vector<std::pair<uint64_t, Way>>& ranked);
// Waits until an order is wanted, or told to go on; without the GIL.
void wait_for_pressure();
void end_wait_for_pressure();

}  // namespace memmgr::pager
