// Graphs that are captured while a budget is open. A graph stores addresses, so no cell moves until the last capture
// ends.
#pragma once

#include <atomic>

namespace memmgr::pager {

struct Session;

// Restores the evicted cells, cuts all recipes, and freezes eviction until the end. Throws if the evicted cells find no
// room.
void begin_capture(Session& session);
void end_capture();
void forget_captures();
}  // namespace memmgr::pager
