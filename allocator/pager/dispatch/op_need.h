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

// The op of this thread that found no room.
struct FailedOp {
  std::string name;           // empty: the request came from no op
  uint64_t need_bytes = 0;    // all that it reads and makes, and the bytes that stay; 0: not known
  uint64_t read_bytes = 0;    // its arguments
  uint64_t result_bytes = 0;  // its largest result, or request; the largest tensor that it reads, where none is known
};
FailedOp failed_op();                // once
void begin_failure(uint64_t bytes);  // a request of so many bytes fails, inside of an op or not

}  // namespace memmgr::pager
