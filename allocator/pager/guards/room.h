// Room for memory that is not the pool's: storages that become cells, and memory of other libraries.
#pragma once

#include <c10/util/FunctionRef.h>

#include "cells/types.h"

namespace memmgr::pager {

// Memory of torch's default allocator counts from its adoption on: others leave for it first.
// may_wait: the calling thread is in no op that has been admitted, so others may end theirs first.
Cell* adopt_in_budget(c10::StorageImpl* s, bool may_wait);
// The same, but a mapped storage stays as it is where there is no room: null.
Cell* adopt_if_room(c10::StorageImpl* s, bool may_wait);
// Calls `take` once there is room for so many bytes that are not the pool's.
void with_room(uint64_t nbytes, bool may_wait, c10::function_ref<void()> take);

// Counts a storage that cannot leave (fixed_memory.h), once there is room for it. Throws where there is none.
void count_fixed_in_budget(c10::StorageImpl* s, bool may_wait);

}  // namespace memmgr::pager
