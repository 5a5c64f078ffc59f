// Whether a second run of an op gives the same bytes (rule 8).
#pragma once

#include "base/tensors.h"
#include "cells/types.h"

namespace memmgr::pager {

enum class Again : uint8_t {
  kSame,
  kSameWhereWritten,  // the op leaves some words of its results as malloc gave them; they are zeros in `outputs` now
  kOther,             // or it failed
};
// Does a second run give what the first one left? `outputs` are the storages that it left, null where none is wanted;
// `before` is what the op wrote to, as it was. The inputs are resident and pinned. On a device words are all compared.
Again run_again(const Recipe& r, c10::ArrayRef<c10::StorageImpl*> outputs, StoragePtr before);

// The same without room for a second result: the first one goes, and the last one stays in its place. Nobody has seen
// the first one, and an op that gives another one each time may as well have given the last. `all`: the storages of all
// results, `outputs` and those that are too small to matter. Host memory; the op writes to nothing else. What it throws
// leaves `outputs` without bytes, so the op has to run once more.
Again run_again_in_place(const Recipe& r, c10::ArrayRef<c10::StorageImpl*> outputs,
                         c10::ArrayRef<c10::StorageImpl*> all);

}  // namespace memmgr::pager
