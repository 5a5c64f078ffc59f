// The memory that an op that found no room would have needed: all that it reads and makes, in memory at once.
#pragma once

#include <ATen/core/stack.h>

#include <string>
#include <vector>

#include "ops/op_info.h"

namespace memmgr::pager {

// Makes the op's need part of the floor. `stack` ends with the op's arguments, or with the rest of them.
// Known limitations: an op whose results depend on values (a mask as index) counts with its arguments alone, and so
// does one that draws.
void note_need(const c10::OperatorHandle& op, const OpInfo* info, const torch::jit::Stack& stack);

// The same of a compiled graph's kernel, which is given all that it reads and writes.
void note_need(const std::string& kernel, const std::vector<c10::TensorImpl*>& tensors);

}  // namespace memmgr::pager
