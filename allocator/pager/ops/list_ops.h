// List ops: torch._foreach_* and the fused steps of optimizers. One call touches all parameters, so its working set
// would be all of them. Its work at one index depends on no other index. So a call runs as several calls on slices of
// its lists, with the same bits.
#pragma once

#include <ATen/core/stack.h>

#include "base/session.h"
#include "base/share.h"
#include "ops/op_info.h"

namespace memmgr::pager {

// Returns the first index of each slice, and the end, for lists with so many bytes at each index; empty: they are not
// cut. A slice has a share of the budget at most, unless a single index has more.
std::vector<size_t> cuts(const Session& session, const std::vector<uint64_t>& bytes);

// A tensor of the lists, and its index in its list.
struct InList {
  const c10::TensorImpl* tensor;
  size_t index;
};

// Returns true if two tensors with different indices share memory.
bool share_memory(const std::vector<InList>& all);

// Returns the bytes of the tensor that can be evicted.
uint64_t bytes_in_list(const Options& options, const at::Tensor& t);
// Returns the bytes at the largest index of the call on top of the stack, and at all: with a small budget the call is
// cut at every index.
Share largest_index(const Session& session, const OpInfo* info, const torch::jit::Stack& stack);
// Returns the cuts of the call on top of the stack.
std::vector<size_t> cuts(const Session& session, const OpInfo* info, const torch::jit::Stack& stack);
// Returns the arguments of one slice, from `first` to before `end`.
torch::jit::Stack slice_of(const c10::IValue* args, size_t n, size_t first, size_t end);

// Runs the call in slices, each by `call(&its stack)`. False: it is small enough, or cannot be cut.
template <class Call>
bool run_in_slices(Session& session, const OpInfo* info, torch::jit::Stack* stack, Call&& call) {
  const std::vector<size_t> at = cuts(session, info, *stack);
  if (at.empty()) return false;
  const size_t n = info->op.schema().arguments().size(), base = stack->size() - n;
  std::vector<c10::impl::GenericList> results;
  for (size_t k = 0; k + 1 < at.size(); ++k) {
    session.counters.slices++;
    torch::jit::Stack slice = slice_of(stack->data() + base, n, at[k], at[k + 1]);
    call(&slice);
    for (size_t i = 0; i < slice.size(); ++i) {
      if (k == 0) results.emplace_back(slice[i].toList().elementType());
      for (const c10::IValue& made : slice[i].toListRef()) results[i].push_back(made);
    }
  }
  stack->resize(base);
  for (c10::impl::GenericList& list : results) stack->emplace_back(std::move(list));
  return true;
}

}  // namespace memmgr::pager
