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

// Throws it as memmgr.BudgetError, if there is a Python to say so; else returns. Takes the GIL: nothing of ours is
// held.
void raise_budget_error(const c10::OutOfMemoryError& e);
void raise_wrong_bytes(const c10::Error& e);  // the same, as memmgr.RecomputeError

}  // namespace memmgr::pager
