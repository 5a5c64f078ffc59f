// Forks: a forked child has a pager that only brings back. What was away at the fork comes back there from what the
// child inherited: bytes that are in memory, recipes, and the parent's file (core/heirs.h). Nothing leaves, nothing is
// recorded and no thread runs.
#pragma once

#include <mutex>

namespace memmgr::pager {

// A mutex that a fork takes first, so that a child finds it free and what it guards whole. Whoever has one never waits
// for the GIL, which the forking thread has.
std::mutex& taken_by_forks(std::mutex* made);

void watch_forks();

}  // namespace memmgr::pager
