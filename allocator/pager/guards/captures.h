// Graphs that are captured while a budget is open: what lies in a graph is an address for good.
#pragma once

#include <atomic>

namespace memmgr::pager {

// What was evicted is back, no recipe is left, and nothing leaves until the end. Throws where there is no room for it.
void begin_capture();
void end_capture();
void forget_captures();
}  // namespace memmgr::pager
