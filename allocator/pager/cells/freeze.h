// Times in which no cell may be evicted: a capture, the end of a budget, ops of threads that nobody has seen.
#pragma once

#include "cells/types.h"

namespace memmgr::pager {

// Counted: while it is above 0 reclaim waits a while for its end and then has nothing to give.
void nothing_leaves(bool begin);
bool nothing_leaves_locked();
void hold_departures(bool begin);  // the same, whichever thread asks for room
void stay_in_child();              // the same in a forked child, for ever
bool frozen();                     // without the lock
bool froze_by_this_thread();

// Claims a cell that may be evicted now: no other thread moves it until its move ends.
bool claim_locked(Cell* c);

}  // namespace memmgr::pager
