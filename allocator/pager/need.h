// What an op that found no room would have needed: all that it reads and makes, in memory at once.
#pragma once

#include <ATen/core/stack.h>

#include "ops.h"

namespace memmgr::pager {

// It is part of the floor from here on. `stack` ends with the op's arguments, or with what is left of them.
// Known limitations: an op whose results depend on values (a mask as index) counts with its arguments alone, and so
// does one that draws.
void note_need(const c10::OperatorHandle& op, const OpInfo* info, const torch::jit::Stack& stack);

}  // namespace memmgr::pager
