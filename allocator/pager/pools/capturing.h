// Graphs that are being captured.
#pragma once

#include <atomic>

namespace memmgr::pager {

class Pool;

// Captures under way, in any thread.
extern std::atomic<int> captures;
// Returns true if the calling thread's stream on the pool's device is captured: its work is recorded instead of run.
bool is_capturing(const Pool& pool);

}  // namespace memmgr::pager
