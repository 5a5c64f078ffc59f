// Tensor hooks that C++ registers: they run between two nodes of a backward, take addresses and then allocate (rule 9).
#pragma once

#include <ATen/core/Tensor.h>

namespace memmgr::pager {

// From here on those that are registered are guarded: what they are given stays in memory while they run.
void guard_new_hooks();
// Those that a tensor has. The caller knows that no thread runs them meanwhile.
void guard_hooks_of(const at::Tensor& t);

}  // namespace memmgr::pager
