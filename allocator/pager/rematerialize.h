// Running recipes again (rule 10), and whether that gives the same bytes (rule 8).
#pragma once

#include <vector>

#include "recipe.h"

namespace memmgr::pager {

// Makes the bytes of `c`, which is evicted and which the caller has busy. Iterative; each op runs once; what comes out
// on the way for other evicted cells goes to them. No lock is held. Throws c10::OutOfMemoryError, or a c10::Error that
// says what went wrong.
at::DataPtr rematerialize(Cell* c);

// Did a second run give what the first one left? `outputs` are the storages that it left, null where none is wanted;
// `before` is what the op wrote to, as it was. The inputs are resident and pinned. Says false, too, when it failed.
bool reproduces(const Recipe& r, const std::vector<c10::StorageImpl*>& outputs, StoragePtr before);

}  // namespace memmgr::pager
