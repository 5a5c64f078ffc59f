// Eviction: a cell's bytes are copied to the tier, packed or left to its recipe, and their memory is freed.
#pragma once

#include <cstdint>

#include "cells/types.h"
#include "residency/victims.h"

namespace memmgr::pager {

// Evicts `c` if it has no pin. Returns the bytes released. No lock is held.
uint64_t evict(Cell* c, EvictedFor cause, Way way = Way::kCheaper);
// Does the same for a cell that the caller has claimed (freeze.h).
uint64_t evict_claimed(Cell* c, EvictedFor cause, Way way);
void exhume();  // frees the evicted bytes that torture mode keeps, at the end of a budget
// While one lives, cells that its thread evicts are offloaded wherever there is a tier, at any cost.
struct NothingIsDropped {
  NothingIsDropped();
  ~NothingIsDropped();
};
// The last resort: frees the bits of packed cells that their ops can make again. Returns the bytes released.
uint64_t give_up_bits(uint64_t want);

}  // namespace memmgr::pager
