// The kernel: one boxed fallback for every op, below autograd (design: touch, writes, recipe, redispatch, outputs).
#pragma once

#include <c10/core/DispatchKey.h>

#include "cell.h"

namespace memmgr::pager {

// The dispatch key that the fallback is registered on. It has to be below autograd and autocast, above every backend,
// in no alias set, and nobody else's. 2.14 gives Fake to its fake tensors: another key then.
constexpr c10::DispatchKey kKey = c10::DispatchKey::Fake;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
#error "memmgr: this torch uses the dispatch key Fake itself; the pager needs another one (allocator/pager/kernel.h)"
#endif

// The ops of this thread are seen from here on (rule 12), and of threads that get torch's thread state from it.
void see_this_thread(bool on);
bool thread_is_seen();

// A compiled region of this thread: what it was given is pinned, what it makes inside is its own until it returns.
void enter_region();
void leave_region();

// The net for threads that are not seen: registered with a budget.
void catch_unseen_threads(bool on);

// The address of `c` was handed out for good: pinned and never a recipe's input again (rule 9). Brings it back first.
// The caller holds its storage.
void escape(Cell* c, Escape why);

// Throws it as memmgr.BudgetError, if there is a Python to say so; else returns. Takes the GIL: nothing of ours is
// held.
void raise_budget_error(const c10::OutOfMemoryError& e);

// Cells that an asynchronous op may still be using stay pinned until its Work is done or nobody has it (rule 3).
void poll_works();
void forget_works();  // at the end of a budget: nothing leaves any more
size_t works_in_flight();

}  // namespace memmgr::pager
