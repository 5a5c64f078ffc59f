// Eviction: how the bytes of a cell leave.
#pragma once

#include <cstdint>

#include "cells/types.h"
#include "residency/victims.h"

namespace memmgr::pager {

// Takes the bytes of `c` away if nobody has pinned it. Returns how many. No lock is held.
uint64_t let_go(Cell* c, Way way = Way::kCheaper);
// The same for a cell that the caller has claimed (freeze.h).
uint64_t leave_claimed(Cell* c, Way way);
void exhume();  // what torture has buried, at the end of a budget
// While one lives, what leaves at its thread's requests goes to the tier, where there is one, whatever it costs.
struct NothingIsDropped {
  NothingIsDropped();
  ~NothingIsDropped();
};
// The last resort: frees the bits of packed cells, where their ops can make them again. Returns the bytes.
uint64_t give_up_bits(uint64_t want);

}  // namespace memmgr::pager
