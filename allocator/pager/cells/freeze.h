// Freezes: times in which no cell may be evicted. These are captures, the end of a budget, and ops of threads that are
// not seen.
#pragma once

#include "base/session.h"
#include "cells/types.h"

namespace memmgr::pager {

// Begins or ends a freeze. Freezes are counted: while there is one, reclaim waits a while for its end and then frees
// nothing.
void freeze_evictions(bool begin);
bool is_frozen_locked() REQUIRES(graph_lock());
void freeze_all_evictions(bool begin);  // a freeze that also requests of the calling thread wait for
void stay_in_child(Options& options);   // a freeze without an end, in a forked child
bool frozen();                          // without the lock
bool froze_by_this_thread();

// Claims a cell that may be evicted now: no other thread moves it until the caller's move ends.
bool claim_locked(Cell* c) REQUIRES(graph_lock());

}  // namespace memmgr::pager
