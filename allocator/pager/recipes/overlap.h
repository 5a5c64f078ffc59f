// Checks if an op reads bytes that it also writes, through another argument.
#pragma once

#include "cells/types.h"

namespace memmgr::pager {

// Returns true if the two views, of one storage, may share an element. Exact where they have the same strides.
bool may_overlap(const TensorArg& a, const TensorArg& b);

// Returns true if the op may read its own writes (`x[:, 1:].copy_(x[:, :-1])`). A second run has copies of both
// arguments, so it would read the bytes before the write. `storages`: those of the recipe's tensors.
bool reads_its_own_writes(const Recipe& r, c10::ArrayRef<const c10::StorageImpl*> storages);

}  // namespace memmgr::pager
