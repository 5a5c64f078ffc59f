// The memory that an op without room would have needed: all that it reads and makes, resident at the same time.
#pragma once

#include <ATen/core/stack.h>

#include <string>
#include <vector>

#include "ops/op_info.h"

namespace memmgr::pager {

// Makes the op's need part of the floor. `stack` ends with the op's arguments, or with those that it has not taken.
// Known limitation: an op whose result sizes depend on values (a mask as index), or one that draws, counts with its
// arguments alone.
void note_need(const c10::OperatorHandle& op, const OpInfo* info, const torch::jit::Stack& stack);

// Does the same for a compiled graph's kernel, whose arguments are all that it reads and writes.
void note_need(const std::string& kernel, const std::vector<c10::TensorImpl*>& tensors);

}  // namespace memmgr::pager
