// Recipes of launches: a compiled kernel's function in C with addresses and integers, or the `run` of a Triton kernel
// with tensors and integers (rule 5).
#pragma once

#include <memory>

#include "recipes/recipe.h"

namespace memmgr::pager {

constexpr size_t kMostKernelArguments = 64;  // launches of kernels that take more are not recorded

// One argument of a compiled kernel: a tensor, or an integer.
struct KernelArgument {
  c10::TensorImpl* tensor = nullptr;
  bool written = false;
  int64_t number = 0;
};
// Describes the launch of a kernel that can run again (OpInfo::function, run), as describe() does for an op.
std::unique_ptr<Recipe> describe_launch(Session& session, OpInfo* info, c10::ArrayRef<KernelArgument> args);

}  // namespace memmgr::pager
