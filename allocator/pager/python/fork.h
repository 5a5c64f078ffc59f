// Forks: a forked child has a pager that only brings back. What was away at the fork comes back there from what the
// child inherited: bytes that are in memory, recipes, and the parent's file (core/heirs.h). Nothing leaves, nothing is
// recorded and no thread runs.
#pragma once

namespace memmgr::pager {

void watch_forks();

}  // namespace memmgr::pager
