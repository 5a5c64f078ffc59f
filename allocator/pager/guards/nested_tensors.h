// Strided nested tensors. Their sizes, strides and offsets are tensors of whole numbers, which torch reads by address:
// in constructors of nested tensors, in kernels, and above the pager's kernel (rule 9).
#pragma once

#include <ATen/core/stack.h>

#include <utility>
#include <vector>

#include "base/session.h"
#include "base/tensors.h"
#include "cells/types.h"
#include "ops/op_info.h"

namespace memmgr::pager {

// An op with a nested argument or result, or an op inside of one. Tensors of whole numbers that it reads by address are
// resident until it returns. The sizes of a nested argument or result stay where they are while they live.
class NestedOp {
 public:
  static bool is_one(const OpInfo* info, c10::DispatchKeySet keys) {
    return C10_UNLIKELY(tl_outermost != nullptr || info->nested || keys.has(c10::DispatchKey::NestedTensor));
  }
  NestedOp(Session& session, const torch::jit::Stack& stack, size_t arguments);
  ~NestedOp();
  NestedOp(const NestedOp&) = delete;
  NestedOp& operator=(const NestedOp&) = delete;
  void returned(const torch::jit::Stack& stack, size_t returns);

 private:
  static void look_at(const c10::IValue& value);
  void end();

  static thread_local NestedOp* tl_outermost;
  Session& session_;
  const bool outermost_;
  std::vector<std::pair<Cell*, StoragePtr>>
      pinned_;  // of the outermost op: tensors of whole numbers that it, or an op inside, reads or makes
};

}  // namespace memmgr::pager
