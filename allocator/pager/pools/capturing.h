// Graphs that are being captured.
#pragma once

#include <atomic>

namespace memmgr::pager {

// Captures that are under way, in whatever thread.
extern std::atomic<int> captures;
// Does the calling thread's stream write down what it is given, instead of running it?
bool is_capturing();

}  // namespace memmgr::pager
