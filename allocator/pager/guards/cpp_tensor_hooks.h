// Tensor hooks that C++ registers: they run between two nodes of a backward, take addresses and then allocate (rule 9).
#pragma once

#include <ATen/core/Tensor.h>

namespace memmgr::pager {

struct Session;

// Guards the hooks that are registered from now on: their tensors are resident and pinned while they run.
void guard_new_hooks(Session& session);
// Guards the hooks that a tensor has. The caller ensures that no thread runs them during the call.
void guard_hooks_of(Session& session, const at::Tensor& t);

}  // namespace memmgr::pager
