// Does an op read what it writes to, through another of its arguments?
#pragma once

#include "cells/types.h"

namespace memmgr::pager {

// May an element of one be an element of the other? Both lie in the same storage. Exact where they have the same
// strides.
bool may_overlap(const TensorArg& a, const TensorArg& b);

// May the op see its own writes in what it reads (`x[:, 1:].copy_(x[:, :-1])`)? Run again it has copies of both, and
// reads what was there before. `storages` are those of the recipe's tensors.
bool reads_its_own_writes(const Recipe& r, c10::ArrayRef<const c10::StorageImpl*> storages);

}  // namespace memmgr::pager
