// Forked children.
#pragma once

#include <atomic>

namespace memmgr::pager {

// True: the process is a child, forked from one that has had a budget. If a budget was open at the fork, the child can
// restore the cells that were absent in its parent, and nothing else. Set once, by the handler of the fork
// (python/fork.cpp).
inline std::atomic<bool> forked_child{false};

}  // namespace memmgr::pager
