// Running a recipe again.
#pragma once

#include "base/tensors.h"
#include "cells/types.h"

namespace memmgr::pager {

class Pool;

// Bytes for one argument of a run.
struct Source {
  void* data = nullptr;
  StoragePtr own;  // set: the run may write to the bytes, since no recipe needs them
};
// Runs the recipe, in memory of the pool, on these bytes (one source for each entry of `tensors`), below autograd,
// functorch and modes, with its numerics and a generator of its own. Returns the storages of its outputs, in the order
// of Recipe::outputs; null: an output has none of its own.
std::vector<StoragePtr> run(Pool& pool, const Recipe& r, std::vector<Source> sources);

}  // namespace memmgr::pager
