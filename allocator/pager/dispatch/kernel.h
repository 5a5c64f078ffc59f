// The kernel: one boxed fallback for every op, below autograd (design: touch, writes, recipe, redispatch, outputs).
#pragma once

#include <c10/core/DispatchKey.h>

#include "guards/touched_cells.h"

namespace memmgr::pager {

// The cells of an op that has run are evicted: all of them by turns (torture), or those that can be made again.
// Releases the frame.
void send_away(Frame* frame, bool by_turns);

}  // namespace memmgr::pager
