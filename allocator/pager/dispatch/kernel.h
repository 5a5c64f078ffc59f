// The kernel: one boxed fallback for every op, below autograd (design: touch, writes, recipe, redispatch, outputs).
#pragma once

#include <c10/core/DispatchKey.h>

#include "cells/cell.h"
#include "guards/touched_cells.h"

namespace memmgr::pager {

// The dispatch key that the fallback is registered on. It has to be below autograd and autocast, above every backend,
// in no alias set, and nobody else's.
constexpr c10::DispatchKey kKey = c10::DispatchKey::Fake;

// Throws it as memmgr.BudgetError, if there is a Python to say so; else returns. Takes the GIL: nothing of ours is
// held.
void raise_budget_error(const c10::OutOfMemoryError& e);
void raise_budget_error_of_python();          // the same, where an op written in Python has ended with torch's error
void raise_wrong_bytes(const c10::Error& e);  // the same, as memmgr.RecomputeError

// The cells of an op that has run are evicted: all of them by turns (torture), or those that can be made again.
// Releases the frame.
void send_away(Frame* frame, bool by_turns);

}  // namespace memmgr::pager
