// Whose ops are seen (rule 12), and where in an op a thread is.
#pragma once

#include "cell.h"

namespace memmgr::pager {

// Ops that are under way in this thread: an op inside another has been admitted with it.
extern thread_local int tl_depth;
// Compiled regions that this thread is in: what they were given is pinned, what they make is theirs until they return.
extern thread_local int tl_regions;
// Calls of raw readers that this thread is in: they have said what they write.
extern thread_local int tl_readers;

struct Depth {
  Depth() { ++tl_depth; }
  ~Depth() { --tl_depth; }
};

// The ops of this thread are seen from here on, and of threads that get torch's thread state from it.
void see_this_thread(bool on);
bool thread_is_seen();

// A thread on which a backend runs its works: what it makes there is its own (rule 5).
bool is_backends_thread();

// The net for threads that are not seen: registered with a budget.
void catch_unseen_threads(bool on);

}  // namespace memmgr::pager
