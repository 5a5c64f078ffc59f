// The kernel: one boxed fallback for every op, below autograd (design: touch, writes, recipe, redispatch, outputs).
#pragma once

#include <ATen/core/boxing/BoxedKernel.h>
#include <c10/core/DispatchKey.h>

#include "dispatch/op_run.h"
#include "guards/touched_cells.h"
#include "ops/op_info.h"
#include "pools/stream_rules.h"

namespace memmgr::pager {

// Evicts the cells of an op that has run, and releases the frame. by_turns: all cells, alternately evicted and
// offloaded (torture mode). Otherwise the cells that a recipe can make.
void evict_touched(Frame* frame, bool by_turns);

// Pins the cells that a captured op or launch has touched, for good: a captured graph stores their addresses.
void keep_captured(Frame* frame);
// Called before this thread queues an op or a launch: notes its stream, and marks it where that is due.
void follow_queue();
inline void follow_stream() {
  if (C10_UNLIKELY(queues)) follow_queue();
}

// The kernel itself, for kernels that have types (small_ops.cpp).
const c10::BoxedKernel& boxed_kernel();
// The results of an op that has touched no cell: large ones become cells.
void adopt_results(OpInfo* info, const torch::jit::Stack& results, const OldStorages& old);
// Within a handler: throws the error again, as memmgr's where the budget is its cause.
[[noreturn]] void rethrow_as_ours();
// The same of an op that found no room for these arguments.
[[noreturn]] void rethrow_as_ours(const c10::OperatorHandle& op, const OpInfo* info,
                                  const torch::jit::Stack& arguments);

}  // namespace memmgr::pager
