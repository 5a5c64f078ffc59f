// Graphs that are captured while a budget is open: what lies in a graph is an address for good.
#pragma once

#include <atomic>

#include "cells/cell.h"

namespace memmgr::pager {

// Captures that are under way, in whatever thread.
extern std::atomic<int> captures;
// What was evicted is back, no recipe is left, and nothing leaves until the end. Throws where there is no room for it.
void begin_capture();
void end_capture();
void forget_captures();
// Does the calling thread's stream write down what it is given, instead of running it?
bool is_capturing();

}  // namespace memmgr::pager
