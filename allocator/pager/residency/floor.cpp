#include "residency/floor.h"

#include <algorithm>
#include <utility>

#include "base/refusal.h"
#include "cells/cell.h"
#include "pools/scratch.h"

namespace memmgr::pager {

static std::atomic<uint64_t> floor_mark{0};

void note_floor(uint64_t bytes) {
  uint64_t seen = floor_mark.load(std::memory_order_relaxed);
  while (seen < bytes && !floor_mark.compare_exchange_weak(seen, bytes)) {
  }
}

uint64_t bytes_that_stay(const Session& session) {
  const uint64_t all = mm_arena_resident(session.arena);
  const uint64_t elsewhere = totals.resident_cell_bytes.load() + scratch_now();  // mostly outputs
  const uint64_t roots =
      session.may_offload() ? totals.newborn_bytes.load() : totals.root_bytes.load();  // newborns are roots
  return all - std::min(all, elsewhere) + totals.escaped_bytes.load() + totals.long_pinned_bytes.load() + roots;
}

void note_working_set(const Session& session, uint64_t pinned_bytes, Share at_once) {
  const uint64_t all = mm_arena_resident(session.arena);
  // If two threads race, one of their values is enough
  if (all > most_resident.load(std::memory_order_relaxed)) most_resident = all;
  note_floor(bytes_that_stay(session) + at_once.of(pinned_bytes + scratch_peak()));
}

void note_refused() { note_floor(refused_bytes()); }
uint64_t floor_bytes() { return floor_mark.load(); }
std::atomic<uint64_t> most_resident{0};
void reset_floor() { floor_mark = most_resident = 0; }

FailedOp& failing_op() {
  static thread_local FailedOp failed;
  return failed;
}
FailedOp take_failed_op() { return std::exchange(failing_op(), {}); }

}  // namespace memmgr::pager
