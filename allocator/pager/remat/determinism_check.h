// Compares the bytes of a second run of an op with those of the first (rule 8).
#pragma once

#include "base/session.h"
#include "base/tensors.h"
#include "cells/types.h"

namespace memmgr::pager {

enum class Again : uint8_t {
  kSame,
  kSameWhereWritten,  // the op leaves words of its results unwritten; they are zeros in `outputs` now
  kOther,             // or the run failed
};
// Runs the recipe a second time and compares. `outputs`: the storages that the first run made; null: not compared.
// `before`: the bytes that the op wrote to, as they were, for each such tensor. The inputs are resident and pinned.
// Where the pool does not fill, gaps are compared like all other words. On a device that fills, a run without fills is
// timed before.
Again run_again(Session& session, const Recipe& r, c10::ArrayRef<c10::StorageImpl*> outputs,
                std::vector<StoragePtr> before);

// Does the same without room for a second result: the first result is freed, and the last one replaces it. No op has
// read the first one, and an op with another result each time might as well have given the last. `all`: the storages of
// all results, `outputs` and the small ones. Only for host memory, and for ops that write to nothing else. After an
// exception `outputs` have no bytes, so the op has to run once more.
Again run_again_in_place(Session& session, const Recipe& r, c10::ArrayRef<c10::StorageImpl*> outputs,
                         c10::ArrayRef<c10::StorageImpl*> all);

}  // namespace memmgr::pager
