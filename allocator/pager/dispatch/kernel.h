// The kernel: one boxed fallback for every op, below autograd (design: touch, writes, recipe, redispatch, outputs).
#pragma once

#include <c10/core/DispatchKey.h>

#include "guards/touched_cells.h"

namespace memmgr::pager {

// Evicts the cells of an op that has run, and releases the frame. by_turns: all cells, alternately evicted and
// offloaded (torture mode). Otherwise the cells that a recipe can make.
void send_away(Frame* frame, bool by_turns);

}  // namespace memmgr::pager
