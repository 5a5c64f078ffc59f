// Graphs that are being captured.
#pragma once

#include <atomic>

namespace memmgr::pager {

// Captures under way, in any thread.
extern std::atomic<int> captures;
// Returns true if the calling thread's stream is captured: its work is recorded instead of run.
bool is_capturing();

}  // namespace memmgr::pager
